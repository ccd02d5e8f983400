"""Models that are scored and never trained, the reference and the teacher: on the device, or in
host memory between passes.
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
    def present(self) -> AbstractContextManager[Model]:
        """Inside, a model that holds the weights on the device."""
        ...


@dataclass(frozen=True)
class OwnModel:
    """A model of its own, whose weights stay on the device or are offloaded in host memory between
    passes.
    """

    model: Model

    def present(self) -> AbstractContextManager[Model]:
        return self.model.present()


@dataclass(frozen=True)
class SwappedIn:
    """Weights in host memory that borrow the policy's place: no more device memory than the policy
    itself.
    """

    policy: Model
    weights: HostWeights

    @contextmanager
    def present(self) -> Iterator[Model]:
        with self.policy.present(), self.weights.lent_to(self.policy.chunks):
            yield self.policy


def build_reference(context: BuildContext, policy: Model) -> Frozen:
    """The model that KL is measured against: `reference.path`, or the policy's weights as they are.
    Call before training.
    """
    given = context.config.reference
    return _build(context, policy, given.path, "reference.path", offload=given.offload)


def build_teacher(context: BuildContext, policy: Model) -> Frozen:
    """The model that the policy learns from, of any size but with its vocabulary and layout. Call
    before training starts.

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
    if offload and _differ_by_weights_alone(arch, context.arch):
        return SwappedIn(policy, _host_weights(context, policy, arch, path))
    model = context.build(arch)
    if path is None:
        copy_weights(policy.chunks, model.chunks)
    else:
        load_hf(model.chunks, arch, Path(path), context.parallel)
    # Passes run without gradients, but the weights keep `requires_grad`: by it torch.matmul folds
    # [T, 1, H] to a matrix, where it might else expand the weight to [T, H, H']; and so the
    # reference computes what the policy does, bit for bit.
    for module in model.modules:
        module.eval()
    model.make_parkable(context.device, offload=offload)
    return OwnModel(model)


def _host_weights(
    context: BuildContext, policy: Model, arch: Architecture, path: str | None
) -> HostWeights:
    """The weights of `path` in host memory, read through the policy, which gets its own back."""
    initial = HostWeights(policy.chunks)
    if path is None:
        return initial
    load_hf(policy.chunks, arch, Path(path), context.parallel)
    weights = HostWeights(policy.chunks)
    initial.restore(policy.chunks)
    return weights


def _differ_by_weights_alone(arch: Architecture, policy: Architecture) -> bool:
    """Whether the policy would compute what the other model does if it had its weights, and so can
    lend it its place.
    """
    computed = (
        "family",
        "transformer",
        "activation",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
    )
    return all(getattr(arch, name) == getattr(policy, name) for name in computed)
