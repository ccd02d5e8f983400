"""The parameters of the embedded engine's model, updated by transaction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, UntypedStorage, nn

from rlcore.adapter_folder import read_policies
from rlcore.errors import ModelError
from rlcore.quantised_weights import dequantised, unquantised
from rlcore.weights import Bucket, TensorSpec, are_factors, saved_buffers
from rollout.engines.embedded.adapters import Adapters
from rollout.weight_sync.version_state import SHOWN, WeightState, shorten

LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")


class ModelWeights(WeightState):
    """The parameters of `module` under the names of a Hugging Face folder, updated by transaction.
    Tied ones appear once.

    Args:
        alpha: `policy.lora.alpha` of a run that publishes adapters.
        policies: `rollout.policies`.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        alpha: float | None = None,
        policies: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(name)
        config = getattr(module, "config", None)
        self._layers = None if config is None else config.get_text_config().num_hidden_layers
        self.tensors: dict[str, Tensor] = dict(as_published(module))
        self.aliases = aliases(module)
        self.adapters = None
        if alpha is not None:
            frozen = read_policies(policies)
            self.adapters = Adapters(self.tensors, linears(module), alpha, frozen)
        # Whether the open update is one of adapters.
        self._adapts = False
        # bytes of what is released
        self._sizes: dict[UntypedStorage, int] = {}

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Open an update. The engine is then stale.

        Raises ModelError when the names or shapes are not exactly the model's, and for adapters
        before the weights below them.
        """
        super().begin(buckets)
        self._buckets = None
        specs = [spec for bucket in buckets for spec in unquantised(bucket)]
        self._adapts = self.adapters is not None and are_factors(specs)
        if not self._adapts:
            self._check_layout([spec for spec in specs if not self._predicts_further(spec.name)])
            if self.adapters is not None:
                self.adapters.forget()
        elif not self.holds_base:
            raise ModelError(f"{self.name}: adapters came before the weights below them")
        else:
            assert self.adapters is not None
            self.adapters.begin(specs)
        self._buckets = tuple(buckets)

    def use(self, policy: str | None) -> None:
        """Compute with the adapters of a frozen policy, or of the trained one."""
        if self.adapters is not None:
            self.adapters.policy = policy

    def copy(self, index: int, flat: Tensor) -> None:
        """Take bucket `index`, uint8 [num_bytes] on any device, casting where the engine's dtype
        differs. Quantised matrices are turned back into the engine's dtype.
        """
        into = self.tensors
        if self._adapts and self.adapters is not None:
            into = self.adapters.factors
        with torch.no_grad():
            for name, tensor in dequantised(self.bucket(index).views(flat)):
                if self._adapts or not self._predicts_further(name):
                    into[name].copy_(tensor)
        self.received(index)

    def end(self) -> None:
        """Close the update."""
        super().end()
        if self._adapts and self.adapters is not None:
            self.adapters.end()

    def release(self) -> None:
        """Release the memory of the weights. Storages shrink in place, so that views stay views."""
        if self.adapters is not None:
            self.adapters.forget()
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

    def _predicts_further(self, name: str) -> bool:
        """Whether a tensor is of a layer behind the last one, of which transformers has none."""
        found = LAYER.match(name)
        return found is not None and self._layers is not None and int(found[1]) >= self._layers

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

    transformers stacks experts, and gate on up; the weights of experts are views of these. The
    folders of gpt-oss have them as transformers does.
    """
    for name, tensor in _alone(module):
        yield _in_folder(module, name), tensor


def _in_folder(module: nn.Module, name: str) -> str:
    """The name in the folder of the larger model, if the module is a part of one."""
    alone, inside = getattr(getattr(module, "config", None), "published_prefix", ("", ""))
    return inside + name.removeprefix(alone) if name.startswith(alone) else name


def _alone(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under the names of a language model's own folder."""
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    mixtral = model_type in ("mixtral", "minimax_m2")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    weights = (*module.named_parameters(), *saved_buffers(module))
    for name, parameter in weights:
        # The indexers of sparse attention are not trained.
        if ".indexer." in name:
            continue
        published = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        experts, _, kind = published.rpartition(".")
        if parameter.dim() != 3 or not experts.endswith(".experts") or model_type == "gpt_oss":
            yield published, parameter
            continue
        # gate_up_proj is [experts, 2 * width, hidden], up_proj [experts, width, hidden], and
        # down_proj [experts, hidden, width].
        parts = {"gate_up_proj": (gate, up), "up_proj": (up,), "down_proj": (down,)}[kind]
        for expert, stacked in enumerate(parameter.data):
            for part, view in zip(parts, stacked.chunk(len(parts))):
                yield f"{experts}.{expert}.{part}.weight", view


def linears(module: nn.Module) -> dict[str, nn.Module]:
    """The linear layers, by the published names of their weights."""
    layers = {id(m.weight): m for m in module.modules() if isinstance(m, nn.Linear)}
    published = ((name, layers.get(id(weight))) for name, weight in as_published(module))
    return {name: layer for name, layer in published if layer is not None}


def aliases(module: nn.Module) -> dict[str, str]:
    """Return {other name of a tied parameter: the name it is published under}."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {
        _in_folder(module, name): _in_folder(module, first[id(parameter)])
        for name, parameter in every
        if name != first[id(parameter)]
    }
