"""Attention over a pack in parts that are merged by their log-sum-exps: prefixes, and sinks.

Each sequence's own tokens attend to each other. All queries behind a prefix attend to it as one
run, so that the prefix's keys are read once and never copied for each sequence. A sink is a score
of each head beside those of the keys, with a value of 0 (gpt-oss; Xiao et al. 2023, arXiv
2309.17453): a part that changes the log-sum-exp alone.

The backward pass of each part gets the merged output and log-sum-exp. Then exp(score - lse) are the
probabilities of the whole softmax, sum(output * its gradient) is the whole's too, and the gradients
of the parts add up: no gradient passes through a log-sum-exp, as in ring attention (Liu et al.
2023, arXiv 2310.01889). Autograd would need that gradient, and torch's `varlen_attn` drops it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from backends.megatron.batch.cp_layout import PackLayout, Runs, by_length, offsets, padded


@dataclass(frozen=True)
class RectangleKernel:
    """Runs of similar length as one batch, through torch's flash attention on the CPU.

    Runs are padded on the right; without `causal` all runs have the same number of keys.

    Attributes:
        slots: int64 [n], the part's queries.
        causal: whether the keys are the sequences' own tokens, the first part of each query.
        window: number of keys up to its own that a query sees; None: all.
    """

    queries: Tensor  # int64 [b, longest]
    key_rows: Tensor  # int64 [b, longest]
    # int64 [b, 1, 1, 1]: number of keys before the first query of each run; None: 0 for every run
    before: Tensor | None
    real: Tensor | None  # int64: indices of the queries that are not pads; None: all
    slots: Tensor
    causal: bool
    window: int | None = None

    @classmethod
    def of_part(cls, part: Runs, window: int | None = None) -> list[RectangleKernel]:
        """Divide a part into batches."""
        counts = part.num_queries.tolist()
        lengths = part.num_keys.tolist()
        alike: dict[int, list[int]] = {}
        for run, length in enumerate(lengths):
            alike.setdefault(0 if part.causal else length, []).append(run)
        before = (part.num_keys - part.num_queries).view(-1, 1, 1, 1)
        aligned = part.causal and bool(before.any())
        kernels = []
        for runs in alike.values():
            for places in by_length([counts[run] for run in runs]):
                batch = [runs[place] for place in places]
                queries, real = padded(part.queries, part.num_queries, batch)
                rows, _ = padded(part.keys, part.num_keys, batch)
                own = None if bool(real.all()) else real.reshape(-1).nonzero()[:, 0]
                skipped = before[batch] if aligned else None
                kernels.append(cls(queries, rows, skipped, own, queries[real], part.causal, window))
        return kernels

    @property
    def keys(self) -> Tensor:
        """The rows of the gradients of keys and values: int64 [m]."""
        return self.key_rows.view(-1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output [n, heads, d] and the log-sum-exp, fp32 [n, heads].

        q is [T, heads, d], of this rank; k and v are [CP * T, groups, d], gathered.
        """
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q, self.queries),
            _heads_first(k, self.key_rows),
            _heads_first(v, self.key_rows),
            is_causal=self.causal and not self._masked,
            attn_mask=self._mask(q.dtype),
            scale=scale,
        )
        return self._flat(out), self._flat(lse)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q [n, heads, d], and of k and v [m, groups, d] at `keys`."""
        padded_grad = grad[self.queries]
        # A pad repeats a query; its gradient must not count again.
        if self.real is not None:
            keep = padded_grad.new_zeros(self.queries.numel())
            keep[self.real] = 1
            padded_grad *= keep.view(*self.queries.shape, 1, 1)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            padded_grad.transpose(1, 2),
            _heads_first(q, self.queries),
            _heads_first(k, self.key_rows),
            _heads_first(v, self.key_rows),
            _heads_first(out, self.queries),
            _heads_first(lse, self.queries),
            0.0,
            self.causal and not self._masked,
            attn_mask=self._mask(q.dtype),
            scale=scale,
        )
        return self._flat(dq), dk.transpose(1, 2).flatten(0, 1), dv.transpose(1, 2).flatten(0, 1)

    @property
    def _masked(self) -> bool:
        narrow = self.window is not None and self.window < self.key_rows.size(1)
        return self.before is not None or narrow

    def _mask(self, dtype: torch.dtype) -> Tensor | None:
        """[b, 1, queries, keys]: 0 where a query sees a key; None where no mask is needed."""
        if not self._masked:
            return None
        hidden = ~visible(self.before, self.queries.size(1), self.key_rows.size(1), self.window)
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, float("-inf"))

    def _flat(self, rows: Tensor) -> Tensor:
        flat = rows.transpose(1, 2).flatten(0, 1)
        return flat if self.real is None else flat[self.real]


def visible(before: Tensor | None, queries: int, keys: int, window: int | None) -> Tensor:
    """Whether a query of a run sees a key: bool [b or 1, 1, queries, keys].

    Args:
        before: int64 [b, 1, 1, 1], number of keys before the first query; None: 0.
        window: number of keys up to its own that a query sees; None: all.
    """
    device = None if before is None else before.device
    last = torch.arange(queries, device=device)[:, None]
    last = last[None, None] if before is None else before + last
    key = torch.arange(keys, device=device)
    seen = key <= last
    return seen if window is None else seen & (key > last - window)


def _heads_first(rows: Tensor, index: Tensor) -> Tensor:
    """[T, heads, ...] -> [b, heads, longest, ...]."""
    return rows.index_select(0, index.view(-1)).view(*index.shape, *rows.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class VarlenKernel:
    """A part computed by torch's variable-length flash attention."""

    slots: Tensor
    keys: Tensor
    cu_queries: Tensor  # int32 [n+1]
    cu_keys: Tensor
    longest_queries: int
    longest_keys: int
    causal: bool
    window: int | None = None

    @classmethod
    def of_part(cls, part: Runs, device: torch.device, window: int | None = None) -> VarlenKernel:
        """Lay a part out on `device`."""
        return cls(
            part.queries.to(device),
            part.keys.to(device),
            offsets(part.num_queries).int().to(device),
            offsets(part.num_keys).int().to(device),
            int(part.num_queries.max()),
            int(part.num_keys.max()),
            part.causal,
            window,
        )

    @property
    def _window(self) -> list[int]:
        before = -1 if self.window is None else self.window - 1
        return [before, 0] if self.causal else [-1, -1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See `RectangleKernel.forward`."""
        out, lse, _ = _operators()._varlen_attn(
            q[self.slots],
            k[self.keys],
            v[self.keys],
            self.cu_queries,
            self.cu_keys,
            self.longest_queries,
            self.longest_keys,
            self._window == [-1, 0],
            scale=scale,
            window_size=self._window,
            **_gqa_option(),
        )
        return out, lse.t()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `RectangleKernel.backward`."""
        gradients: tuple[Tensor, Tensor, Tensor] = _operators()._varlen_attn_backward(
            grad[self.slots],
            q[self.slots],
            k[self.keys],
            v[self.keys],
            out[self.slots],
            lse[self.slots].t().contiguous(),
            self.cu_queries,
            self.cu_keys,
            self.longest_queries,
            self.longest_keys,
            self._window == [-1, 0],
            # The random state of dropout, which is off.
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            scale=scale,
            window_size=self._window,
        )
        return gradients


@cache
def _operators() -> Any:
    """The operators of variable-length attention, which their module's import defines."""
    import torch.nn.attention.varlen

    return torch.ops.torch_attn


@cache
def _gqa_option() -> dict[str, bool]:
    """The option for fewer heads of keys, which the operator has since torch 2.12."""
    arguments = _operators()._varlen_attn.default._schema.arguments
    return {"enable_gqa": True} if "enable_gqa" in {each.name for each in arguments} else {}


Kernel = RectangleKernel | VarlenKernel


def merged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackLayout,
    scale: float,
    *,
    varlen: bool,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention inside each sequence of a pack; returns [T, heads * d].

    Args:
        query: [T, heads, d].
        key, value: [CP * T, groups, d], gathered.
        varlen: use CUDA's variable-length kernel instead of the CPU's.
        window: number of keys up to its own that a query sees; None: all.
        sinks: [heads], a further score of each head; None: none.
    """
    # The kernels of a pack's parts are made once for all layers alike.
    made: dict[tuple[bool, int | None], tuple[Kernel, ...]]
    made = layout.__dict__.setdefault("_merged", {})
    kind = (varlen, window)
    if kind not in made:
        # A window ends in the middle of a prefix, so each sequence gets the prefix's keys.
        parts = layout.runs if window or layout.prefixes is None else layout.parts
        if varlen:
            made[kind] = tuple(VarlenKernel.of_part(part, layout.device, window) for part in parts)
        else:
            made[kind] = tuple(k for part in parts for k in RectangleKernel.of_part(part, window))
    out: Tensor = _Merged.apply(query, key, value, sinks, made[kind], scale)
    return out.flatten(1)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        kernels: tuple[Kernel, ...],
        scale: float,
    ) -> Tensor:
        shape = query.shape[:2]
        lse = query.new_full(shape, float("-inf"), dtype=torch.float32)
        merged = query.new_zeros(*shape, value.size(-1), dtype=torch.float32)
        for kernel in kernels:
            out, own = kernel.forward(query, key, value, scale)
            if kernel.causal:
                merged[kernel.slots] = out.float()
                lse[kernel.slots] = own
                continue
            before = lse[kernel.slots]
            both = torch.logaddexp(before, own)
            weighted = out * (own - both).exp()[..., None]
            merged[kernel.slots] = (
                weighted + merged[kernel.slots] * (before - both).exp()[..., None]
            )
            lse[kernel.slots] = both
        if sinks is not None:
            both = torch.logaddexp(lse, sinks.float())
            merged *= (lse - both).exp()[..., None]
            lse = both
        result = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, lse)
        ctx.kernels = kernels
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, sinks, out, lse = ctx.saved_tensors
        gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
        for kernel in ctx.kernels:
            parts = kernel.backward(grad, query, key, value, out, lse, ctx.scale)
            rows = (kernel.slots, kernel.keys, kernel.keys)
            for total, index, part in zip(gradients, rows, parts):
                total.index_add_(0, index, part.float())
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(gradients, (query, key, value)))
        d_sinks = None
        if sinks is not None:
            share = (sinks.float() - lse).exp()
            d_sinks = -(share * (out.float() * grad.float()).sum(-1)).sum(0).to(sinks.dtype)
        return dq, dk, dv, d_sinks, None, None
