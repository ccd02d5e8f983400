"""Experts as one grouped matmul for all experts of a rank, without Transformer Engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from backends.megatron.cpu.kernels import is_hopper, kernel_type
from backends.megatron.model.lora import adapters, grouped


class GroupedExperts(SequentialMLP):
    """Megatron's experts, with the same parameters, computed together if a kernel supports it.

    Otherwise they run one by one, like Megatron's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.add_bias_linear:
            for expert in self.local_experts:
                # Megatron would sum its gradient over the tensor-parallel ranks of the dense
                # weights, and count it on the first of them alone.
                expert.linear_fc2.bias.sequence_parallel = False
                expert.linear_fc2.bias.tensor_model_parallel = True

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """Rows [T, H], sorted by expert, and their weights [T] -> [T, H]."""
        # the dispatcher has them on the host
        counts: list[int] = tokens_per_expert.tolist()
        if self.config.add_bias_linear:
            return self._with_biases(hidden, counts, probs), None
        if not any(counts) or not groups_matmuls(self, hidden):
            alone: tuple[Tensor, None] = super().forward(hidden, tokens_per_expert, probs)
            return alone
        ends = tokens_per_expert.cumsum(0).to(hidden.device, torch.int32, non_blocking=True)
        experts = list(self.local_experts)
        rows = _product([expert.linear_fc1 for expert in experts], hidden, ends, counts)
        rows = experts[0].activation_func(rows)
        rows = (rows * probs.unsqueeze(-1)).to(rows.dtype)
        return _product([expert.linear_fc2 for expert in experts], rows, ends, counts), None

    def _with_biases(self, hidden: Tensor, counts: list[int], probs: Tensor) -> Tensor:
        """Experts one by one; Megatron's adds its second bias in place, which autograd refuses."""
        outputs = []
        parts = zip(self.local_experts, hidden.split(counts), probs.split(counts), strict=True)
        for expert, rows, shares in parts:
            weights = shares.unsqueeze(-1)
            wide, bias = expert.linear_fc1(rows)
            active = expert.activation_func(wide if bias is None else wide + bias)
            out, bias = expert.linear_fc2((active * weights).to(active.dtype))
            outputs.append(out if bias is None else out + (bias * weights).to(out.dtype))
        return torch.cat(outputs)


def _product(layers: Sequence[Any], x: Tensor, ends: Tensor, counts: list[int]) -> Tensor:
    """The product of each expert's layer, with its adapter's."""
    out: Tensor = _GroupedLinear.apply(x, ends, counts, *(layer.weight for layer in layers))
    found = [layer.lora for layer in layers if hasattr(layer, "lora")]
    if not found:
        return out

    def linear(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        product: Tensor = _GroupedLinear.apply(x, ends, counts, *weights)
        return product

    return out + grouped(found, x, linear)


def groups_matmuls(experts: SequentialMLP, hidden: Tensor) -> bool:
    """Whether torch has a grouped matmul for these experts.

    torch's kernel is for Hopper, and for bf16 rows of a multiple of 16 bytes. It is not documented
    to be deterministic.
    """
    first = experts.local_experts[0]
    ranks = [factors.a.size(0) for adapter in adapters([first]) for factors in adapter.factors()]
    sizes = [*first.linear_fc2.weight.shape, *ranks]
    return (
        kernel_type(hidden.device) == "cuda"
        and hidden.dtype == torch.bfloat16
        and is_hopper(hidden.device)
        and all(size % 8 == 0 for size in sizes)
        and not torch.are_deterministic_algorithms_enabled()
        and not experts.config.moe_apply_probs_on_input
    )


class _GroupedLinear(torch.autograd.Function):
    """x [T, in], sorted by expert, times each expert's weight [out, in] -> [T, out].

    The weights lie in separate storages and are joined for each product. Saving the joined weights
    would keep a second copy of every layer's experts.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, ends: Tensor, counts: list[int], *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        ctx.counts = counts
        return F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        d_x = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        # Those of a layer are trained together or not at all.
        if not ctx.needs_input_grad[3]:
            return (d_x, None, None, *[None] * len(weights))
        d_weights = F.grouped_mm(grad.t(), x, offs=ends).unbind()
        for count, d_weight in zip(ctx.counts, d_weights):
            if not count:
                # A kernel may leave the product of zero rows unwritten.
                d_weight.zero_()
        return (d_x, None, None, *d_weights)
