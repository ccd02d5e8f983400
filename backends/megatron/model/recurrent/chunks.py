"""What recurrent layers share: the convolution before a state, and a state's way over a pack.

Neither passes from one sequence of a pack to another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.megatron.batch.cp_layout import PackLayout
from backends.megatron.batch.scan import Scan
from backends.megatron.model.recurrent.kernels import Kernels


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: PackLayout, kernels: Kernels
) -> Tensor:
    """Causal convolution of each channel inside each sequence, then silu.

    Args:
        x: [N, channels], all slots of the pack in the order of the sequences.
        weight: [channels, 1, width]; the last column belongs to the token itself.
        bias: [channels].
    """
    if kernels.kind == "fla":
        from fla.modules.causal_conv1d import causal_conv1d

        out: Tensor = causal_conv1d(
            x[None], weight[:, 0], bias, activation="silu", cu_seqlens=layout.cu_seqlens.long()
        )[0]
        return out[0]
    # Zeros before each sequence, as many as its first token would see of another one.
    gap = weight.size(2) - 1
    sequences = layout.scan.sequences
    place = torch.arange(x.size(0), device=x.device) + gap * sequences
    apart = x.new_zeros(x.size(0) + gap * len(layout.lengths), x.size(1))
    apart = apart.index_copy(0, place + gap, x)
    convolved = F.conv1d(apart.t()[None], weight, bias, groups=x.size(1))[0]
    return F.silu(convolved.t().index_select(0, place))


def by_chunk(x: Tensor, heads: tuple[int, int], slots: Tensor) -> Tensor:
    """[N, heads, d] -> [chunks, key heads, heads of each, size, d], in fp32 at least."""
    rows = x.index_select(0, slots.view(-1)).to(torch.promote_types(x.dtype, torch.float32))
    return rows.view(*slots.shape, *heads, x.size(2)).permute(0, 2, 3, 1, 4)


def kept_between(since: Tensor) -> Tensor:
    """What a chunk's token i sees of token j: exp(c_i - c_j), 0 for a later one.

    Args:
        since: [..., size, 1]: c, the logarithm of the decay since the chunk's start.
    """
    size = since.size(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=since.device).triu(1)
    return (since - since.transpose(-1, -2)).masked_fill(later, float("-inf")).exp()


class Chunks(NamedTuple):
    """What each chunk adds to its outputs and to the state, without the state before it.

    All are [chunks, key heads, heads of each, ...]. With the state S before a chunk, the state and
    the outputs behind it are

        d = added - read S        S' = over S + to_state d        o = from_state S + inside d
    """

    added: Tensor  # [..., size, d_v]
    read: Tensor | None  # [..., size, d_k]; None: what is added does not depend on the state
    inside: Tensor  # [..., size, size]
    from_state: Tensor  # [..., size, d_k]
    to_state: Tensor  # [..., d_k, size]
    over: Tensor  # [..., 1, 1]

    def outputs(self, scan: Scan) -> Tensor:
        """The outputs of all slots, [N, heads, d_v]; the state of every sequence starts from 0."""
        added = self.added
        state = added.new_zeros(
            scan.counts[0], *added.shape[1:3], self.to_state.size(-2), added.size(-1)
        )
        reads = [None] * len(scan.counts) if self.read is None else self.read.split(scan.counts)
        others = (added, self.inside, self.from_state, self.to_state, self.over)
        outputs: list[Tensor] = []
        # Of each step, for the sequences that are this long.
        for read, added, inside, from_state, to_state, over in zip(
            reads, *(x.split(scan.counts) for x in others), strict=True
        ):
            state = state[: added.size(0)]
            change = added if read is None else added - read @ state
            outputs.append(from_state @ state + inside @ change)
            state = over * state + to_state @ change
        # [chunks, key heads, heads of each, size, d_v] -> [chunks * size, heads, d_v]
        flat = torch.cat(outputs).flatten(1, 2).transpose(1, 2).flatten(0, 1)
        return flat.index_select(0, scan.restore)
