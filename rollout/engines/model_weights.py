"""An engine's weights as a state machine: what it holds is either one whole version, or nothing it may generate with.

    empty -> updating -> unversioned -> ready
               ^  ^ ______________________/
               |   (a failure on the way leaves it `updating`: stale until a whole update came)

From each of them its memory can be released: the weights are gone then, and once it is restored it is `empty` again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, UntypedStorage, nn

from rlcore.errors import ModelError, RunFailed
from rlcore.weights import Bucket, TensorSpec, digest, saved_buffers

SHOWN = 5       # names listed in an error

State = Literal["empty", "updating", "unversioned", "ready", "released"]


class ModelWeights:
    """The parameters of `module` under the names of a Hugging Face folder, updated by transaction. Tied ones appear once."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.tensors: dict[str, Tensor] = dict(as_published(module))
        self.aliases = aliases(module)
        self.state: State = "empty"
        self.version: int | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._received: set[int] = set()
        self._sizes: dict[UntypedStorage, int] = {}     # bytes of what is released

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Open an update. From here on the weights are nobody's version.

        Raises ModelError when the names or shapes are not exactly the model's.
        """
        if self.state == "released":
            raise RunFailed(f"{self.name}: the memory of its weights is released; restore it before an update")
        self.state = "updating"
        self._buckets, self._received = (), set()
        self._check_layout([spec for bucket in buckets for spec in bucket.tensors])
        self._buckets = tuple(buckets)

    def copy(self, index: int, flat: Tensor) -> None:
        """Take bucket `index`, uint8 [num_bytes] on any device, casting where the engine's dtype differs."""
        if self.state != "updating" or not self._buckets:
            raise RunFailed(f"{self.name}: a bucket came outside an update; call begin_update first")
        if not 0 <= index < len(self._buckets):
            raise RunFailed(f"{self.name}: bucket {index} of {len(self._buckets)}")
        with torch.no_grad():
            for name, tensor in self._buckets[index].views(flat):
                self.tensors[name].copy_(tensor)
        self._received.add(index)

    def end(self) -> None:
        """Close the update. Raises RunFailed when a bucket is missing; the engine is stale then."""
        if self.state != "updating" or not self._buckets:
            raise RunFailed(f"{self.name}: end_update without begin_update")
        missing = sorted(set(range(len(self._buckets))) - self._received)
        if missing:
            raise RunFailed(
                f"{self.name}: the update ended without bucket{'s' * (len(missing) > 1)} {shorten(missing)} "
                f"of {len(self._buckets)}; the engine is stale until a whole update comes"
            )
        self.state = "unversioned"

    def set_version(self, version: int) -> None:
        """Put the new weights in force as `version`, a counter that never goes back."""
        if self.state not in ("unversioned", "ready"):
            raise RunFailed(f"{self.name}: version {version} cannot be set, the weights are {self.state}")
        if self.version is not None and version < self.version:
            raise RunFailed(f"{self.name}: version {version} after {self.version}: versions never go back")
        self.version, self.state = version, "ready"

    def require_ready(self) -> int:
        """The version in force. Raises RunFailed when there is none."""
        if self.state == "ready" and self.version is not None:
            return self.version
        if self.state == "empty":
            raise RunFailed(f"{self.name}: no weights were published to this engine yet, it cannot generate")
        if self.state == "released":
            raise RunFailed(f"{self.name}: the memory of its weights is released, it cannot generate")
        raise RunFailed(f"{self.name}: its weights are stale ({self.state}): publish a whole update before generating")

    def release(self) -> None:
        """Give the memory back, the weights with it; storages shrink in place, so that every view of them stays one."""
        if self.state != "released":
            self._sizes = {t.untyped_storage(): t.untyped_storage().nbytes() for t in self.tensors.values()}
            for storage in self._sizes:
                storage.resize_(0)
            self.state = "released"

    def restore(self) -> None:
        """Take the memory again, for a whole update to fill."""
        if self.state == "released":
            for storage, size in self._sizes.items():
                storage.resize_(size)
            self.state, self._sizes = "empty", {}

    def checksum(self) -> str:
        return digest(self.tensors.items())

    def _check_layout(self, specs: Sequence[TensorSpec]) -> None:
        given = {spec.name: spec for spec in specs}
        problems = []
        if len(given) != len(specs):
            problems.append("a name appears twice")
        if missing := self.tensors.keys() - given.keys():
            problems.append(f"missing {shorten(sorted(missing))}")
        if unexpected := given.keys() - self.tensors.keys():
            tied = "".join(f"; {name} is tied to {self.aliases[name]}: leave it out" for name in sorted(unexpected)
                           if name in self.aliases)
            problems.append(f"unexpected {shorten(sorted(unexpected))}{tied}")
        for name, spec in given.items():
            if name in self.tensors and tuple(self.tensors[name].shape) != tuple(spec.shape):
                problems.append(f"{name} has shape {tuple(spec.shape)}, the engine's {tuple(self.tensors[name].shape)}")
        if problems:
            raise ModelError(f"{self.name}: the published weights do not fit model.path: {'; '.join(problems[:SHOWN])}")


def as_published(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names of a Hugging Face folder: transformers stacks experts, and gate on up; here are views."""
    mixtral = getattr(getattr(module, "config", None), "model_type", None) == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, parameter in module.named_parameters():
        published = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        experts, _, kind = published.rpartition(".")
        if kind == "gate_up_proj" and parameter.dim() == 3:         # [experts, 2 * width, hidden]
            for expert, stacked in enumerate(parameter.data):
                for part, view in zip((gate, up), stacked.chunk(2)):
                    yield f"{experts}.{expert}.{part}.weight", view
        elif kind == "down_proj" and parameter.dim() == 3:          # [experts, hidden, width]
            for expert, view in enumerate(parameter.data):
                yield f"{experts}.{expert}.{down}.weight", view
        else:
            yield published, parameter
    yield from saved_buffers(module)


def aliases(module: nn.Module) -> dict[str, str]:
    """{other name of a tied parameter: the name it is known by}."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]}


def shorten(items: Iterable[object]) -> str:
    shown = [str(item) for item in items]
    rest = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + rest
