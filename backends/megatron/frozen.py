"""The reference and the teacher: models that are scored and never trained.

Their weights are on the device, or in host memory between passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from backends.megatron.build import BuildContext
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.load import load_hf
from backends.megatron.training.passes import Model
from backends.megatron.weights.copies import HostWeights, copy_weights
from rlcore.errors import ConfigError


class Frozen(Protocol):
    """A model for passes without gradients: a `Model` of its own, or `SwappedIn`."""

    def on_device(self) -> AbstractContextManager[Model]:
        """Inside, a model that holds the weights on the device."""
        ...


@dataclass(frozen=True)
class SwappedIn:
    """Weights in host memory that are swapped into the policy's modules for a pass.

    It takes no device memory beside the policy's.
    """

    policy: Model
    weights: HostWeights

    @contextmanager
    def on_device(self) -> Iterator[Model]:
        """Inside, the policy's modules with these weights."""
        with self.policy.on_device(), self.weights.swapped_into(self.policy.chunks):
            yield self.policy


def build_reference(context: BuildContext, policy: Model) -> Frozen:
    """Build the model that KL is measured against: `reference.path`, or the policy as it is now.

    Call before training starts.
    """
    given = context.config.reference
    return _build(context, policy, given.path, "reference.path", offload=given.offload)


def build_teacher(context: BuildContext, policy: Model) -> Frozen:
    """Build the model that the policy learns from. Call before training starts.

    It may have any size, but has the policy's vocabulary and layout.

    Raises:
        ConfigError: `teacher.path` is not given.
        ModelError: its vocabulary is not the policy's, or it cannot be laid out like it.
    """
    given = context.config.teacher
    if given.path is None:
        raise ConfigError("teacher.path: missing: name the model to learn from")
    return _build(context, policy, given.path, "teacher.path", offload=given.offload)


def _build(
    context: BuildContext, policy: Model, path: str | None, key: str, *, offload: bool
) -> Frozen:
    arch = context.other_architecture(path, key)
    if offload and _computes_like(arch, context.arch):
        return SwappedIn(policy, _host_weights(context, policy, arch, path))
    model = context.build(arch)
    if path is None:
        copy_weights(policy.chunks, model.chunks)
    else:
        load_hf(model.chunks, arch, Path(path), context.parallel)
    # Passes run without gradients, but the weights keep `requires_grad`: because of it torch.matmul
    # folds [T, 1, H] to a matrix, where it might else expand the weight to [T, H, H']. So the
    # reference computes what the policy does, bit for bit.
    for module in model.modules:
        module.eval()
    model.make_offloadable(context.device, offload=offload)
    return model


def _host_weights(
    context: BuildContext, policy: Model, arch: Architecture, path: str | None
) -> HostWeights:
    """Read the weights of `path` through the policy's modules, which get their own back."""
    initial = HostWeights(policy.chunks)
    if path is None:
        return initial
    load_hf(policy.chunks, arch, Path(path), context.parallel)
    weights = HostWeights(policy.chunks)
    initial.restore(policy.chunks)
    return weights


def _computes_like(arch: Architecture, policy: Architecture) -> bool:
    """Whether the policy's modules with the other model's weights compute what that model does."""
    computed = (
        "family",
        "transformer",
        "activation",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
    )
    return all(getattr(arch, name) == getattr(policy, name) for name in computed)
