"""The parameters of the embedded engine's model, updated by transaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage, nn

from rlcore.errors import ModelError
from rlcore.quantised_weights import dequantised, unquantised
from rlcore.weights import Bucket, TensorSpec, saved_buffers
from rollout.weight_sync.version_state import SHOWN, WeightState, shorten


class ModelWeights(WeightState):
    """The parameters of `module` under the names of a Hugging Face folder, updated by transaction.
    Tied ones appear once.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name)
        self.tensors: dict[str, Tensor] = dict(as_published(module))
        self.aliases = aliases(module)
        # bytes of what is released
        self._sizes: dict[UntypedStorage, int] = {}

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Open an update. The engine is then stale.

        Raises ModelError when the names or shapes are not exactly the model's.
        """
        super().begin(buckets)
        self._buckets = None
        self._check_layout([spec for bucket in buckets for spec in unquantised(bucket)])
        self._buckets = tuple(buckets)

    def copy(self, index: int, flat: Tensor) -> None:
        """Take bucket `index`, uint8 [num_bytes] on any device, casting where the engine's dtype
        differs. Quantised matrices are turned back into the engine's dtype.
        """
        with torch.no_grad():
            for name, tensor in dequantised(self.bucket(index).views(flat)):
                self.tensors[name].copy_(tensor)
        self.received(index)

    def release(self) -> None:
        """Release the memory of the weights. Storages shrink in place, so that views stay views."""
        if self.state != "released":
            self._sizes = {
                t.untyped_storage(): t.untyped_storage().nbytes() for t in self.tensors.values()
            }
            for storage in self._sizes:
                storage.resize_(0)
        super().release()

    def restore(self) -> None:
        """Take the memory again, for a whole update to fill."""
        for storage, size in self._sizes.items():
            storage.resize_(size)
        self._sizes = {}
        super().restore()

    def _check_layout(self, specs: Sequence[TensorSpec]) -> None:
        given = {spec.name: spec for spec in specs}
        problems = []
        if len(given) != len(specs):
            problems.append("a name appears twice")
        if missing := self.tensors.keys() - given.keys():
            problems.append(f"missing {shorten(sorted(missing))}")
        if unexpected := given.keys() - self.tensors.keys():
            tied = "".join(
                f"; {name} is tied to {self.aliases[name]}: leave it out"
                for name in sorted(unexpected)
                if name in self.aliases
            )
            problems.append(f"unexpected {shorten(sorted(unexpected))}{tied}")
        for name, spec in given.items():
            if name in self.tensors and tuple(self.tensors[name].shape) != tuple(spec.shape):
                problems.append(
                    f"{name} has shape {tuple(spec.shape)}, the engine's"
                    f" {tuple(self.tensors[name].shape)}"
                )
        if problems:
            raise ModelError(
                f"{self.name}: the published weights do not fit model.path:"
                f" {'; '.join(problems[:SHOWN])}"
            )


def as_published(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under the names of a Hugging Face folder.

    transformers stacks experts, and gate on up; the weights of experts are views of these.
    """
    mixtral = getattr(getattr(module, "config", None), "model_type", None) == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, parameter in module.named_parameters():
        published = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        experts, _, kind = published.rpartition(".")
        # The parameter is [experts, 2 * width, hidden].
        if kind == "gate_up_proj" and parameter.dim() == 3:
            for expert, stacked in enumerate(parameter.data):
                for part, view in zip((gate, up), stacked.chunk(2)):
                    yield f"{experts}.{expert}.{part}.weight", view
        elif kind == "down_proj" and parameter.dim() == 3:
            # The parameter is [experts, hidden, width].
            for expert, view in enumerate(parameter.data):
                yield f"{experts}.{expert}.{down}.weight", view
        else:
            yield published, parameter
    yield from saved_buffers(module)


def aliases(module: nn.Module) -> dict[str, str]:
    """Return {other name of a tied parameter: the name it is published under}."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]}
