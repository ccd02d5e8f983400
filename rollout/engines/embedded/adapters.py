"""Low-rank adapters on the embedded engine's model, beside its weights.

A linear layer computes `W x + scale B (A x)`, so that an update far smaller than the weights is not
rounded away. Experts are stacked in one parameter, which transformers' kernels read: their products
are added to a copy of the weights, in fp32 alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlcore.adapter_folder import AdapterFolder
from rlcore.errors import ModelError
from rlcore.weights import FACTORS, TensorSpec


class Adapters:
    """The adapters of a model.

    Args:
        weights: the model's weights by their published names.
        linears: its linear layers, by the published names of their weights.
        alpha: a product counts alpha / rank times.
        frozen: other policies on the same weights, by name.

    Raises ModelError for a frozen policy with adapters of experts.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        linears: Mapping[str, nn.Module],
        alpha: float,
        frozen: Mapping[str, AdapterFolder] = MappingProxyType({}),
    ) -> None:
        self._weights = weights
        self._linears = linears
        self._alpha = alpha
        self.factors: dict[str, Tensor] = {}
        # The name of the policy that computes; None: the trained one.
        self.policy: str | None = None
        self._frozen: dict[str, tuple[dict[str, Tensor], float]] = {}
        for name, folder in frozen.items():
            factors = {
                factor: tensor.to(next(iter(weights.values())))
                for factor, tensor in folder.factors().items()
            }
            self._frozen[name] = factors, folder.alpha
            self._attach(factors)
        # Of matrices in a stack of experts: as they were published.
        self._plain: dict[str, Tensor] = {}

    def begin(self, specs: Sequence[TensorSpec]) -> None:
        """Make room for factors of a layout.

        Raises ModelError for one that fits no matrix of the model.
        """
        given = {spec.name: spec for spec in specs}
        for name, spec in given.items():
            module = name.removesuffix(FACTORS[0]).removesuffix(FACTORS[1])
            weight = self._weights.get(f"{module}.weight")
            pair = [given.get(module + factor) for factor in FACTORS]
            if weight is None or any(factor is None for factor in pair):
                raise ModelError(
                    f"{name}: no such matrix in model.path, or one factor without the other"
                )
            (rank, width), (rows, other) = (factor.shape for factor in pair if factor is not None)
            if (rows, width) != tuple(weight.shape) or rank != other:
                raise ModelError(
                    f"{name}: factors {(rank, width)} and {(rows, other)} for a matrix of"
                    f" {tuple(weight.shape)}"
                )
            if name not in self.factors or self.factors[name].shape != spec.shape:
                self.factors[name] = weight.new_empty(spec.shape)
        for name in self.factors.keys() - given.keys():
            del self.factors[name]
        self._attach(self.factors)

    def _attach(self, factors: Mapping[str, Tensor]) -> None:
        for name in modules(factors):
            weight = f"{name}.weight"
            layer: Any = self._linears.get(weight)
            if layer is not None:
                if not hasattr(layer, "rlcore_adapter"):
                    layer.rlcore_adapter = layer.register_forward_hook(self._hook(name))
            elif self._frozen:
                raise ModelError(
                    f"{weight}: the embedded engine merges the adapters of experts, so it cannot"
                    " serve rollout.policies beside them: leave experts out of the targets, or use"
                    " rollout.engine.kind: sglang"
                )
            elif weight not in self._plain:
                tensor = self._weights[weight]
                if tensor.dtype != torch.float32:
                    raise ModelError(
                        f"{weight}: the embedded engine merges the adapters of experts, and"
                        f" {tensor.dtype} would round most of them away: set rollout.engine.dtype"
                        " to fp32, or policy.lora.expert_rank to 0"
                    )
                self._plain[weight] = tensor.clone()

    def _hook(self, name: str) -> Any:
        def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            own = (self.factors, self._alpha)
            factors, alpha = own if self.policy is None else self._frozen[self.policy]
            a = factors.get(name + FACTORS[0])
            if a is None:
                return output
            low = linear(inputs[0], a) * (alpha / a.shape[0])
            return output + linear(low, factors[name + FACTORS[1]])

        return add

    @torch.no_grad()
    def end(self) -> None:
        """Put new factors of experts in force; those of linear layers are already."""
        for weight, plain in self._plain.items():
            module = weight.removesuffix(".weight")
            a = self.factors.get(module + FACTORS[0])
            product = torch.zeros_like(plain)
            if a is not None:
                scale = self._alpha / a.shape[0]
                product = scale * (self.factors[module + FACTORS[1]] @ a)
            self._weights[weight].copy_(plain + product)

    def forget(self) -> None:
        """Drop the trained policy's factors: whole weights are on their way."""
        self.factors.clear()
        self._plain.clear()


def modules(factors: Mapping[str, Tensor]) -> set[str]:
    """The names of the adapted matrices, without `.weight`."""
    return {name.removesuffix(FACTORS[0]) for name in factors if name.endswith(FACTORS[0])}
