"""Log-probs and entropy at trainable positions, without ever holding `[tokens, vocabulary]`.

The head works through the rows in chunks and recomputes a chunk's softmax in the backward pass. The vocabulary is split over
the tensor-parallel ranks: two small all-reduces per micro-batch give the softmax statistics, however many chunks there are.
Columns that Megatron added to pad the vocabulary take no part in softmax, entropy or gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

_NO_COLUMN = -1e20      # the logit of a shard without any real column: finite, since 0 * -inf would be NaN in the entropy


@dataclass(frozen=True)
class Targets:
    """What to compute for one micro-batch: which slots of the hidden states, and the tokens that they predict."""

    index: Tensor               # int64 [M]: slots in the pack, before the sequence-parallel split
    tokens: Tensor              # int64 [M]: the successor of each slot
    entropy: bool = True        # whether the entropy is wanted
    temperature: float = 1.0    # log-probs are those of logits / temperature
    chunk_elements: int = 1 << 22


@dataclass(frozen=True)
class _Shard:
    """The part of the vocabulary that this rank holds, and how rows are chunked."""

    live: int                   # columns of the shard that are real tokens
    temperature: float
    chunks: tuple[slice, ...]

    def logits(self, hidden: Tensor, weight: Tensor, rows: slice) -> Tensor:
        """fp32 [rows, max(live, 1)]."""
        z = (hidden[rows] @ weight[: max(self.live, 1)].t()).float()
        if self.temperature != 1.0:
            z.div_(self.temperature)
        return z if self.live else z.fill_(_NO_COLUMN)


class _VocabParallelLogprobs(torch.autograd.Function):
    """(hidden [M, H], weight [V/tp, H]) -> (logprobs [M], entropy [M]), fp32.

    The gradient of `hidden` is this rank's part only: the caller's region op sums it over the tensor-parallel ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Targets, vocab_size: int, tp: ProcessGroup
    ) -> tuple[Tensor, Tensor | None]:
        m, first = hidden.size(0), tp.rank() * weight.size(0)
        live = min(max(vocab_size - first, 0), weight.size(0))
        step = max(1, targets.chunk_elements // max(live, 1))
        shard = _Shard(live, targets.temperature, tuple(slice(i, min(i + step, m)) for i in range(0, m, step)))
        local = targets.tokens - first
        mine = (local >= 0) & (local < live)
        local = local.clamp(0, max(live, 1) - 1)
        highest = hidden.new_empty(m, dtype=torch.float32)
        sums = hidden.new_zeros(3, m, dtype=torch.float32)      # of e^x, of e^x * x, the target's x; x = logit - highest
        for rows in shard.chunks:
            z = shard.logits(hidden, weight, rows)
            highest[rows] = z.amax(-1)
            z.sub_(highest[rows, None])
            sums[2, rows] = z.gather(1, local[rows, None])[:, 0]
            if targets.entropy:
                e = z.exp()
                sums[0, rows] = e.sum(-1)
                sums[1, rows] = e.mul_(z).sum(-1)
            else:
                sums[0, rows] = z.exp_().sum(-1)
        if tp.size() > 1:
            common = highest.clone()
            dist.all_reduce(common, op=dist.ReduceOp.MAX, group=tp)
            shift = highest - common                            # every sum moves to the common maximum
            sums[1].add_(shift * sums[0])
            sums[:2].mul_(shift.exp())
            sums[2] = (sums[2] + shift).masked_fill(~mine, 0.0)
            dist.all_reduce(sums, group=tp)
            highest = common
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0] if targets.entropy else None
        ctx.save_for_backward(hidden, weight, local, mine, highest + log_sum, entropy)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return sums[2] - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_logprobs, d_entropy = gradients
        hidden, weight, local, mine, log_normalizer, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.zeros_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None   # fp32 over the chunks
        for rows in shard.chunks if shard.live else ():
            z = shard.logits(hidden, weight, rows).sub_(log_normalizer[rows, None])         # log p
            p = z.exp()
            # d logprob / d logit = 1[target] - p,   d entropy / d logit = -p (log p + entropy)
            if d_entropy is None:
                dz = p if d_logprobs is None else p.mul_(-d_logprobs[rows, None])
            else:
                z.add_(entropy[rows, None]).mul_(d_entropy[rows, None])
                if d_logprobs is not None:
                    z.add_(d_logprobs[rows, None])
                dz = p.mul_(z.neg_())
            if d_logprobs is not None:
                dz.scatter_add_(1, local[rows, None], (d_logprobs[rows] * mine[rows])[:, None])
            if shard.temperature != 1.0:
                dz.div_(shard.temperature)
            dz = dz.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[rows] = dz @ weight[: shard.live]
            if d_weight is not None and d_weight.dtype == hidden.dtype:
                d_weight[: shard.live].addmm_(dz.t(), hidden[rows])
            elif d_weight is not None:
                d_weight[: shard.live] += dz.t() @ hidden[rows]
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


class LogprobHead(ColumnParallelLinear):
    """Megatron's output layer with another `forward`.

    It stays a *called* module, since Megatron's DDP waits for gathered parameters in a pre-forward hook; names and sharding of
    its state are those of the stock layer.
    """

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Targets, vocab_size: int, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [T, 1, H] (its sequence-parallel share) -> (logprobs [M], entropy [M] or None), fp32.

        `weight`: the shared embedding where the model ties its head, else the layer's own.
        """
        assert self.bias is None, "an output layer with a bias is not supported"
        assert hidden.size(1) == 1, "packed input has a batch dimension of 1"
        if self.sequence_parallel:      # the backward of the gather is the reduce-scatter of the ranks' parts
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.tp_group)
            rows = hidden[:, 0].index_select(0, targets.index)
        else:                           # index first: the backward then all-reduces [M, H], not [T, H]
            rows = copy_to_tensor_model_parallel_region(hidden[:, 0].index_select(0, targets.index), group=self.tp_group)
        own = self.weight if weight is None else weight
        return _VocabParallelLogprobs.apply(rows, own, targets, vocab_size, self.tp_group)


class ValueHead(nn.Module):
    """A linear map to one value, replicated over TP; initialised with std 1 / sqrt(hidden + 1), the same on every rank.

    Values are computed in fp32 on the rank's own share of the tokens, so that under sequence parallelism only [T] is gathered;
    the weight's gradient is then partial on every rank, which the mark on it makes Megatron sum.
    """

    def __init__(self, config: Any, tp_group: ProcessGroup, *, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        initial = torch.randn(1, config.hidden_size, generator=generator) * (config.hidden_size + 1) ** -0.5
        device = torch.cuda.current_device()        # the CPU inside `megatron_device("cpu")`
        self.weight = nn.Parameter(initial.to(device=device, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group

    def forward(self, hidden: Tensor, targets: Targets) -> Tensor:
        """hidden [T, 1, H] (its sequence-parallel share) -> values [M], fp32, of the states that choose the target tokens."""
        values = (hidden[:, 0].float() @ self.weight.float().t())[:, 0]
        if self.sequence_parallel:      # every rank goes on alike: the backward takes the own share, without a sum
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self.tp_group)
        return values.index_select(0, targets.index)
