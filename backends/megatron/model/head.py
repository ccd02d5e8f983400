"""The head of language models: log-probs and entropy at trainable positions.

Log-probs and entropy of hidden states under a vocabulary-parallel output layer are computed tile by
tile. A tile is a block of the logits, small enough for the caches and square enough for the
matmuls. The forward pass keeps three running sums per row; the backward pass computes each tile
again. Two small all-reduces give the softmax over all tensor-parallel ranks, for any number of
tiles. Columns that Megatron added to pad the vocabulary, and columns outside a row's sampling mask,
take no part in softmax, entropy or gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from backends.megatron.batch.pack import MicroBatch
from backends.megatron.cpu.kernels import kernel_type
from backends.megatron.model.fused import Fused, fuses
from rlcore.config.sections.policy import default_chunk_elements
from rlcore.data.batch import BatchSamplingMasks
from rlcore.weights import add_product


@dataclass(frozen=True)
class HeadOptions:
    """Options of the output layer."""

    temperature: float  # log-probs are those of logits / temperature
    # Logits in memory at one time; None: `default_chunk_elements` of the device.
    chunk_elements: int | None
    entropy: bool = True  # whether to compute the entropy
    fp32: bool = False  # whether the logits of a bf16 model stay in fp32


@dataclass(frozen=True)
class Targets:
    """The micro-batch whose M targets on this rank are predicted, and the options."""

    micro: MicroBatch
    options: HeadOptions


class LogprobHead(ColumnParallelLinear):
    """Megatron's output layer with another `forward`.

    Call it as a module, since Megatron's DDP waits for gathered parameters in a pre-forward hook.
    Its state has the names and sharding of the stock layer.
    """

    # Logits are cap * tanh(logits / cap); None: not capped.
    logit_cap: float | None = None

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Targets, vocab_size: int, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute (logprobs [M], entropy [M] or None), in fp32.

        Args:
            hidden: [T, 1, H], or its sequence-parallel share.
            weight: the shared embedding if the model ties its head; otherwise the layer's own.
        """
        assert self.bias is None, "an output layer with a bias is not supported"
        assert hidden.size(1) == 1, "packed input has a batch dimension of 1"
        micro = targets.micro
        # The backward of the gather is a reduce-scatter of the ranks' parts.
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self.tp_group
            )
            rows = hidden[:, 0].index_select(0, micro.target_index)
        else:
            # Index first, so that the backward all-reduces [M, H] instead of [T, H].
            rows = copy_to_tensor_model_parallel_region(
                hidden[:, 0].index_select(0, micro.target_index), group=self.tp_group
            )
        return fused_logprobs(
            rows,
            self.weight if weight is None else weight,
            micro.target_tokens,
            vocab_size=vocab_size,
            tp=self.tp_group,
            entropy=targets.options.entropy,
            fp32=targets.options.fp32,
            temperature=targets.options.temperature,
            cap=self.logit_cap,
            tile_elements=targets.options.chunk_elements,
            sampling_mask=micro.sampling_mask,
        )


# --- the fused log-probs --------------------------------------------------------------------------


ALIGNED = 128  # columns
FUSED_ELEMENTS = 1 << 26  # default elements of a tile without a copy in fp32
# The logit of a masked column; finite, since 0 * -inf would be NaN in the entropy.
_NO_COLUMN = -1e20


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    vocab_size: int,
    tp: ProcessGroup,
    entropy: bool = True,
    fp32: bool = False,
    temperature: float = 1.0,
    cap: float | None = None,
    tile_elements: int | None = None,
    sampling_mask: BatchSamplingMasks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute (logprobs [M], entropy [M] or None), in fp32 or wider.

    The logits are hidden @ weight.T, the distribution is softmax(logits / temperature) over the
    first `vocab_size` columns; with `sampling_mask`, over only the columns of a row's mask,
    renormalised. The gradient of `hidden` is this rank's part, which the caller's region op sums
    over `tp`.

    Args:
        hidden: [M, H].
        weight: [V/tp, H].
        tokens: int64 [M].
        cap: logits are cap * tanh(logits / cap).
        fp32: round neither logits nor the summands of gradients to the dtype of bf16 factors.
        sampling_mask: on the device of `hidden`.
        tile_elements: logits in memory at one time; by default `default_chunk_elements`.
    """
    default = default_chunk_elements(kernel_type(hidden.device))
    fused = FUSED_ELEMENTS // (2 if fp32 and hidden.dtype.itemsize < 4 else 1)
    elements = tile_elements or (fused if fuses(hidden.device) else default)
    first = tp.rank() * weight.size(0)
    live = min(max(vocab_size - first, 0), weight.size(0))
    shard = _Shard(first, live, temperature, cap, elements, fp32, sampling_mask)
    return _FusedLogprobs.apply(hidden, weight, tokens, shard, entropy, tp)


@dataclass(frozen=True)
class _Shard:
    """The part of the vocabulary on this rank, and options of the softmax."""

    first: int  # token of the first column
    live: int  # number of columns that are real tokens
    temperature: float
    cap: float | None  # of the logits
    elements: int  # at most this many in a tile
    fp32: bool  # products of bf16 factors are not rounded to bf16
    sampling_mask: BatchSamplingMasks | None


class _Tiles:
    """The logits of one shard, one tile at a time, in memory that all tiles share."""

    def __init__(self, hidden: Tensor, weight: Tensor, shard: _Shard) -> None:
        self.hidden = hidden
        self.weight = weight
        self.shard = shard
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        rows = hidden.size(0)
        live = shard.live
        width = max(isqrt(2 * shard.elements), shard.elements // max(rows, 1), 1)
        # A matmul with rows that are not aligned is several times as slow on a GPU.
        width -= width % ALIGNED if width > ALIGNED else 0
        self.width = min(width, max(live, 1))
        self.height = max(1, min(shard.elements // self.width, rows))
        self.rows = [slice(i, min(i + self.height, rows)) for i in range(0, rows, self.height)]
        self.columns = [slice(i, min(i + self.width, live)) for i in range(0, live, self.width)]
        size = self.height * self.width
        self.fused = fuses(hidden.device)
        if self.fused:
            dtype = self.dtype if shard.fp32 else hidden.dtype
            self._product = hidden.new_empty(size, dtype=dtype)
        else:
            self._logits, self._other = (hidden.new_empty(size, dtype=self.dtype) for _ in range(2))
            wide = hidden.dtype == self.dtype
            self._operand = self._logits if wide else hidden.new_empty(size)
            self._product = self._logits if shard.fp32 else self._operand
        sampling_mask = shard.sampling_mask
        # int64 [K]: the row of each token of the masks.
        self._row_of = None
        if sampling_mask is not None:
            counts = sampling_mask.offsets.diff().to(hidden.device)
            # Whether a row has no mask.
            self._whole = counts == 0
            self._row_of = torch.arange(rows, device=hidden.device).repeat_interleave(
                counts, output_size=len(sampling_mask.tokens)
            )

    def product(self, rows: slice, columns: slice) -> Tensor:
        """Compute a tile of hidden @ weight.T / temperature, valid until the next call."""
        z = _view(self._product, rows, columns)
        weight = self.weight[columns].t()
        temperature = self.shard.temperature
        cap = self.shard.cap
        add_product(z, self.hidden[rows], weight, beta=0, alpha=1 / (cap or temperature))
        if cap is not None:
            z.tanh_().mul_(cap / temperature)
        if self.shard.sampling_mask is not None:
            z.masked_fill_(~self._unmasked(self.shard.sampling_mask, rows, columns), _NO_COLUMN)
        return z

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """Compute a tile in fp32 or wider, valid until the next call."""
        product = self.product(rows, columns)
        logits = _view(self._logits, rows, columns)
        return logits if self._product is self._logits else logits.copy_(product)

    def slope(self, z: Tensor) -> Tensor | None:
        """The derivative of the capped logits by the logits, of a tile; None: no cap."""
        if self.shard.cap is None:
            return None
        return 1 - (z.to(self.dtype) * (self.shard.temperature / self.shard.cap)).square()

    def exp(self, z: Tensor) -> Tensor:
        """Compute e^z in a separate buffer, valid until the next call."""
        return torch.exp(z, out=self._other[: z.numel()].view(z.shape))

    def as_operand(self, dz: Tensor, rows: slice, columns: slice) -> Tensor:
        """Cast `dz` to the dtype of the matmuls; this may overwrite the buffer of `product`."""
        same = self._operand is self._logits
        return dz if same else _view(self._operand, rows, columns).copy_(dz)

    def add_product(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        """Add a @ b to `out`, which may be wider than the factors."""
        if self.shard.fp32 or out.dtype == a.dtype:
            add_product(out, a, b)
        else:
            out.add_(a @ b)

    def target(self, tokens: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Each row's token as a column of the tile, and whether the tile has it: both [rows, 1]."""
        column = tokens[rows, None] - (self.shard.first + columns.start)
        width = columns.stop - columns.start
        return column.clamp(0, width - 1), (column >= 0) & (column < width)

    def _unmasked(self, sampling_mask: BatchSamplingMasks, rows: slice, columns: slice) -> Tensor:
        """The columns of a tile inside the sampling masks: bool [rows, columns].

        Tokens outside the tile go to an extra column, so that no shape depends on data.
        """
        assert self._row_of is not None
        part = slice(int(sampling_mask.offsets[rows.start]), int(sampling_mask.offsets[rows.stop]))
        width = columns.stop - columns.start
        column = sampling_mask.tokens[part].long() - (self.shard.first + columns.start)
        column = torch.where((column >= 0) & (column < width), column, width)
        unmasked = self._whole[rows, None].repeat(1, width + 1)
        unmasked[self._row_of[part] - rows.start, column] = True
        return unmasked[:, :width]


def _view(memory: Tensor, rows: slice, columns: slice) -> Tensor:
    height = rows.stop - rows.start
    width = columns.stop - columns.start
    return memory[: height * width].view(height, width)


@dataclass
class _Softmax:
    """Running statistics of M rows over the columns so far, relative to their highest logit."""

    highest: Tensor  # [M]
    exp: Tensor  # [M], sum of e^x where x = logit - highest
    weighted: Tensor  # [M], sum of e^x * x
    target: Tensor  # [M], the logit of the target; 0 until its tile is absorbed

    @classmethod
    def empty(cls, like: Tensor, rows: int, dtype: torch.dtype) -> _Softmax:
        """Statistics of zero columns."""
        sums = like.new_zeros(3, rows, dtype=dtype)
        return cls(like.new_full((rows,), _NO_COLUMN, dtype=dtype), *sums)

    def part(self, rows: slice) -> _Softmax:
        """The statistics of some rows, as views."""
        return _Softmax(self.highest[rows], self.exp[rows], self.weighted[rows], self.target[rows])

    def absorb(
        self, tiles: _Tiles, tokens: Tensor, rows: slice, columns: slice, *, entropy: bool
    ) -> None:
        """Add a tile of these rows to the statistics; `weighted` changes only with `entropy`."""
        if tiles.fused:
            own = (self.highest, self.exp, self.weighted, self.target)
            column = tokens[rows] - (tiles.shard.first + columns.start)
            for old, new in zip(own, _fused_absorb(tiles.product(rows, columns), column, *own)):
                old.copy_(new)
            return
        z = tiles.logits(rows, columns)
        column, there = tiles.target(tokens, rows, columns)
        self.target.add_(z.gather(1, column).masked_fill_(~there, 0.0)[:, 0])
        self.raise_to(torch.maximum(self.highest, z.amax(-1)))
        e = tiles.exp(z.sub_(self.highest[:, None]))
        self.exp.add_(e.sum(-1))
        if entropy:
            self.weighted.add_(e.mul_(z).sum(-1))

    def raise_to(self, highest: Tensor) -> None:
        """Rescale the sums to a higher maximum."""
        shift = self.highest - highest
        factor = shift.exp()
        self.weighted.add_(shift * self.exp).mul_(factor)
        self.exp.mul_(factor)
        self.highest.copy_(highest)

    def reduce(self, tp: ProcessGroup) -> None:
        """Combine the statistics of all ranks' shards. Collective."""
        if tp.size() == 1:
            return
        common = self.highest.clone()
        dist.all_reduce(common, op=dist.ReduceOp.MAX, group=tp)
        self.raise_to(common)
        sums = torch.stack([self.exp, self.weighted, self.target])
        dist.all_reduce(sums, group=tp)
        self.exp, self.weighted, self.target = sums.unbind()


@Fused
def _fused_absorb(
    z: Tensor, column: Tensor, highest: Tensor, exp: Tensor, weighted: Tensor, target: Tensor
) -> tuple[Tensor, ...]:
    """Combine the statistics of [rows] so far with a tile [rows, columns].

    `column` is the column of each row's token, which may lie outside the tile.
    """
    here = torch.arange(z.size(1), device=z.device) == column[:, None]
    z = z.to(highest.dtype)
    top = torch.maximum(highest, z.amax(-1))
    x = z - top[:, None]
    e = x.exp()
    shift = highest - top
    factor = shift.exp()
    return (
        top,
        exp * factor + e.sum(-1),
        (weighted + shift * exp) * factor + (e * x).sum(-1),
        target + torch.where(here, z, 0.0).sum(-1),
    )


@Fused
def _fused_gradient(
    z: Tensor,
    column: Tensor,
    log_normalizer: Tensor,
    through_p: Tensor,
    d_entropy: Tensor,
    d_target: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """See `_d_logits`."""
    here = torch.arange(z.size(1), device=z.device) == column[:, None]
    log_p = z.to(log_normalizer.dtype) - log_normalizer[:, None]
    d_z = log_p.exp() * (through_p[:, None] - log_p * d_entropy[:, None])
    return (d_z + torch.where(here, d_target[:, None], 0.0)).to(dtype)


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        shard: _Shard,
        entropy: bool,
        tp: ProcessGroup,
    ) -> tuple[Tensor, Tensor | None]:
        tiles = _Tiles(hidden, weight, shard)
        softmax = _Softmax.empty(hidden, hidden.size(0), tiles.dtype)
        for rows in tiles.rows:
            part = softmax.part(rows)
            for columns in tiles.columns:
                part.absorb(tiles, tokens, rows, columns, entropy=entropy)
        softmax.reduce(tp)
        log_sum = softmax.exp.log()
        entropies = log_sum - softmax.weighted / softmax.exp if entropy else None
        ctx.save_for_backward(hidden, weight, tokens, softmax.highest + log_sum, entropies)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return (softmax.target - softmax.highest) - log_sum, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, log_normalizer, entropies = ctx.saved_tensors
        d_logprobs, d_entropy = (
            None if g is None else g / ctx.shard.temperature for g in gradients
        )
        tiles = _Tiles(hidden, weight, ctx.shard)
        d_hidden = torch.zeros_like(hidden, dtype=tiles.dtype) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for columns in tiles.columns:
            # Sums over many tiles are in fp32, whatever the dtype of the weights.
            d_columns = (
                None if d_weight is None else torch.zeros_like(weight[columns], dtype=tiles.dtype)
            )
            for rows in tiles.rows:
                dz = _d_logits(
                    tiles, rows, columns, tokens, log_normalizer, entropies, d_logprobs, d_entropy
                )
                if d_hidden is not None:
                    tiles.add_product(d_hidden[rows], dz, weight[columns])
                if d_columns is not None:
                    tiles.add_product(d_columns, dz.t(), hidden[rows])
            if d_weight is not None and d_columns is not None:
                d_weight[columns] = d_columns
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, None, None, None, None


def _d_logits(
    tiles: _Tiles,
    rows: slice,
    columns: slice,
    tokens: Tensor,
    log_normalizer: Tensor,
    entropies: Tensor | None,
    d_logprobs: Tensor | None,
    d_entropy: Tensor | None,
) -> Tensor:
    """The gradient of one tile of logits.

    d logprob / d logit = 1[target] - p,   d entropy / d logit = -p (log p + entropy)
    """
    normalizer = log_normalizer[rows]
    through_p = torch.zeros_like(normalizer) if d_logprobs is None else -d_logprobs[rows]
    if tiles.fused:
        none = torch.zeros_like(normalizer)
        spread = none if d_entropy is None else d_entropy[rows]
        if entropies is not None:
            through_p = through_p - spread * entropies[rows]
        column = tokens[rows] - (tiles.shard.first + columns.start)
        d_target = none if d_logprobs is None else d_logprobs[rows]
        product = tiles.product(rows, columns)
        slope = tiles.slope(product)
        given = (product, column, normalizer, through_p, spread, d_target)
        d_z: Tensor = _fused_gradient(*given, tiles.hidden.dtype)
        return d_z if slope is None else d_z.mul_(slope)
    z = tiles.logits(rows, columns)
    slope = tiles.slope(z)
    # z is log p.
    z.sub_(normalizer[:, None])
    p = tiles.exp(z)
    if d_entropy is None:
        p.mul_(through_p[:, None])
    else:
        assert entropies is not None
        through_p = through_p - d_entropy[rows] * entropies[rows]
        p.mul_(z.mul_(-d_entropy[rows, None]).add_(through_p[:, None]))
    if d_logprobs is not None:
        column, there = tiles.target(tokens, rows, columns)
        p.scatter_(1, column, p.gather(1, column) + d_logprobs[rows, None] * there)
    if slope is not None:
        p.mul_(slope)
    return tiles.as_operand(p, rows, columns)
