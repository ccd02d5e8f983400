"""The attention function of the embedded engine, in transformers' interface.

transformers gives it what it gives flash attention: a window, a cap and sinks as keywords, and no
mask. The masks are made here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlcore.errors import ModelError

ATTENTION = "rlcore_cache"
# Most scores that are in memory at once where they are written out, in fp32.
SCORES = 1 << 27
# Fewest queries that look through a window together.
WINDOW_QUERIES = 512


class Masks:
    """What the queries of one forward pass see. Masks are shared by the layers.

    Args:
        first: the column of the first query.
        pads: as in `Cache`.
    """

    def __init__(self, first: int, pads: Tensor | None = None) -> None:
        self._first = first
        self._pads = None if pads is None else pads.view(-1, 1, 1, 1)
        self._made: dict[tuple[int, int, int, int | None, bool], Tensor | None] = {}

    def of(
        self, start: int, end: int, window: int | None, query: Tensor, *, causal: bool
    ) -> tuple[slice, Tensor | None]:
        """Return the key columns that queries start to end see, and their mask.

        The mask is additive, [R or 1, 1, end - start, columns]. It is None where every query sees
        all columns, and for causal rows from the first column on if the caller does those itself.

        Args:
            window: the most columns that a query sees, its own included.
            query: a tensor of the dtype and device of the mask.
            causal: whether the caller does causal rows.
        """
        last = self._first + end
        begin = 0 if window is None else max(0, self._first + start - window + 1)
        # A window of all columns hides none.
        hiding = window if window is not None and window < last - begin else None
        key = (start, end, begin, hiding, causal)
        if key not in self._made:
            plain = self._pads is None and hiding is None
            square = begin == self._first + start
            if plain and (end - start == 1 or (causal and square)):
                self._made[key] = None
            else:
                self._made[key] = self._mask(start, end, begin, hiding, query)
        return slice(begin, last), self._made[key]

    def _mask(self, start: int, end: int, begin: int, window: int | None, like: Tensor) -> Tensor:
        columns = torch.arange(begin, self._first + end, device=like.device)
        if end - start == 1 and self._pads is not None:
            hidden = columns < self._pads
            # A padded query sees nothing, which some attention kernels turn into NaN and the values
            # carry on: let it see itself.
            hidden[..., -1] = False
        else:
            rows = columns[start - end :, None]
            hidden = columns > rows
            if window is not None:
                hidden |= columns <= rows - window
            if self._pads is not None:
                hidden = hidden | ((columns < self._pads) & (columns != rows))
            hidden = hidden.view(-1, 1, end - start, len(columns))
        return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(
            hidden, -torch.inf
        )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    masks: Masks | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query `[R, heads, Q, d]` to `[R, Q, heads, d]`.

    Args:
        key, value: `[R, KV heads, columns, d]`; the queries are the last columns.
        softcap: scores are `softcap * tanh(score / softcap)`.
        s_aux: [heads], the scores of sinks, which take part in the softmax and have no value.
        masks: what the queries see; None: causal rows.
    """
    if options.get("position_bias") is not None:
        raise ModelError(
            "the embedded engine does not do attention with position_bias; use rollout.engine.kind:"
            " sglang"
        )
    rows, heads, queries, _ = query.shape
    columns = key.shape[2]
    masks = masks or Masks(columns - queries)
    few = queries == 1 and query.device.type == "cpu"
    written_out = few or softcap is not None or s_aux is not None
    together = queries
    if sliding_window is not None:
        together = max(sliding_window, WINDOW_QUERIES)
    if written_out:
        together = min(together, max(1, SCORES // (rows * heads * columns)))
    pieces = []
    for start in range(0, queries, together):
        end = min(queries, start + together)
        own = query if end - start == queries else query[:, :, start:end]
        seen, mask = masks.of(start, end, sliding_window, query, causal=not written_out)
        whole = seen.stop - seen.start == columns
        keys = key if whole else key[:, :, seen]
        values = value if whole else value[:, :, seen]
        if written_out:
            pieces.append(_written_out(own, keys, values, mask, scaling, softcap, s_aux))
        else:
            pieces.append(_fused(own, keys, values, mask, scaling))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1), None


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attention by torch's kernels, [R, Q, heads, d]."""
    rows, heads, queries, size = query.shape
    groups = key.shape[1]
    if queries == 1:
        # Grouped heads as queries of their KV head need no copies of the keys.
        packed = query.reshape(rows, groups, heads // groups, size)
        mixed = functional.scaled_dot_product_attention(
            packed, key, value, attn_mask=mask, scale=scaling
        )
        return mixed.reshape(rows, 1, heads, value.shape[3])
    mixed = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=heads != groups,
    )
    return mixed.transpose(1, 2)


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with scores in memory, in fp32: [R, Q, heads, d].

    For caps and sinks, which torch's kernels do not have, and for single queries on a CPU, for
    which its kernel takes three times as long.
    """
    rows, heads, queries, size = query.shape
    groups = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    packed = query.reshape(rows, groups, -1, size) * scale
    scores = torch.matmul(packed, key.transpose(-1, -2)).float().view(rows, heads, queries, -1)
    if softcap is not None:
        scores = (scores / softcap).tanh_() * softcap
    if mask is not None:
        scores += mask
    weights = scores.softmax(-1)
    if sinks is not None:
        # Sinks take a share of the softmax.
        total = scores.logsumexp(-1, keepdim=True)
        weights *= (total - sinks.float()[:, None, None]).sigmoid()
    weights = weights.to(value.dtype).view(rows, groups, -1, scores.shape[-1])
    mixed = torch.matmul(weights, value)
    if queries == 1:
        return mixed.view(rows, 1, heads, -1)
    return mixed.view(rows, heads, queries, -1).transpose(1, 2)
