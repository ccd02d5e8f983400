"""Sampling of tokens. Every random number has an address: it depends on no batch and no history.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011): a bijection of a 128-bit counter under a 64-bit key. Here the key is the seed and the counter
is the address itself, so two addresses never share a block. A token is the inverse of the
cumulative distribution, in vocabulary order, at one such uniform number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional

from rlcore.data.generation import SamplingParams
from rlcore.data.sample import SamplingMasks

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
BLOCK = 128  # tokens of the vocabulary whose weights are summed together


def philox4x32(
    counter: Sequence[ArrayLike], key: tuple[int, int]
) -> tuple[NDArray[np.uint64], ...]:
    """Return Philox4x32-10's four 32-bit words for each counter, as uint64 of their shape."""
    c0, c1, c2, c3 = np.broadcast_arrays(
        *(np.asarray(word, dtype=np.uint64) & LOW for word in counter)
    )
    for round_index in range(ROUNDS):
        k0, k1 = (
            np.uint64((word + round_index * step) & 0xFFFFFFFF) for word, step in zip(key, WEYL)
        )
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        c0 = (product1 >> HALF) ^ c1 ^ k0
        c1 = product1 & LOW
        c2 = (product0 >> HALF) ^ c3 ^ k1
        c3 = product0 & LOW
    return c0, c1, c2, c3


def uniforms(
    seed: int, draw: ArrayLike, sample: ArrayLike, turn: ArrayLike, position: ArrayLike
) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each address, a multiple of 2^-52; the arguments broadcast.

    52 bits and not 53: `u * total` then stays strictly below `total` in float64, for any total.
    """
    high, low, _, _ = philox4x32(
        (draw, sample, turn, position), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    )
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    return bits.astype(np.float64) * 2.0**-52


@dataclass(frozen=True)
class SamplingTable:
    """The sampling parameters of R rows. A field is None when no row needs it."""

    temperature: Tensor | None  # float32 [R], 1 where the row is greedy
    greedy: Tensor | None  # bool [R]
    top_p: Tensor | None  # float64 [R]
    top_k: Tensor | None  # int64 [R], the vocabulary size where it is off
    # bool [R]: log-probs are those of the truncated distribution, and the mask is reported
    truncated: Tensor | None

    @classmethod
    def build(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str = "cpu"
    ) -> SamplingTable:
        temperature = [p.temperature or 1.0 for p in params]
        greedy = [p.temperature == 0 for p in params]
        top_p = [p.top_p for p in params]
        top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
        truncated = [p.sampling_mask and p.temperature > 0 for p in params]

        def column(values: Sequence[float], dtype: torch.dtype, needed: bool) -> Tensor | None:
            return torch.tensor(values, dtype=dtype, device=device) if needed else None

        filtered = any(p < 1 for p in top_p) or any(k < vocab_size for k in top_k)
        return cls(
            temperature=column(temperature, torch.float32, any(t != 1 for t in temperature)),
            greedy=column(greedy, torch.bool, any(greedy)),
            top_p=column(top_p, torch.float64, filtered),
            top_k=column(top_k, torch.int64, filtered),
            truncated=column(truncated, torch.bool, filtered and any(truncated)),
        )

    def select(self, rows: Tensor) -> SamplingTable:
        """The table of some of the rows; `rows` is int64 [r]."""
        columns = (self.temperature, self.greedy, self.top_p, self.top_k, self.truncated)
        return SamplingTable(*(None if column is None else column[rows] for column in columns))


def keep_mask(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return the tokens that top-k, then top-p on the rest, allow: bool [R, V].

    Probabilities need not sum to 1.

    Top-p keeps the smallest set of most probable tokens whose mass reaches `top_p`; the most
    probable one always stays. Equally probable tokens stay in the order of their ids.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    within_k = rank < top_k[:, None]
    ordered = ordered.double() * within_k
    mass = ordered.cumsum(-1)
    before = mass - ordered
    within_p = (before < top_p[:, None] * mass[:, -1:]) | (top_p[:, None] >= 1) | (rank == 0)
    return torch.zeros_like(within_k).scatter_(-1, order, within_k & within_p)


class Drawn(NamedTuple):
    """One token for each of R rows."""

    tokens: Tensor  # int64 [R]
    logprobs: Tensor  # float32 [R]
    # bool [R, V]: the tokens that could be drawn; None where no row reports its mask
    kept: Tensor | None = None


def sample_tokens(logits: Tensor, table: SamplingTable, uniform: Tensor) -> Drawn:
    """Draw one token for each row.

    Log-probs are taken under `logits / temperature`, from the full distribution or, if the table
    says so, from the truncated one. `logits` is [R, V], `uniform` float64 [R] in [0, 1). Greedy
    rows take the arg max, with log-probs at temperature 1. NaN logits give NaN log-probs.
    """
    logits = logits.float()
    if table.temperature is not None:
        logits = logits / table.temperature[:, None]
    highest = logits.amax(-1, keepdim=True)
    weights = (logits - highest).exp_()
    kept = None
    if table.top_p is not None and table.top_k is not None:
        kept = keep_mask(weights, table.top_p, table.top_k)
        tokens, mass = draw(weights * kept, uniform)
        whole = weights.sum(-1, dtype=torch.float64)
        if table.truncated is not None:
            mass = torch.where(table.truncated, mass, whole)
            kept = kept | ~table.truncated[:, None]
        else:
            mass = whole
            kept = None
    else:
        tokens, mass = draw(weights, uniform)
    if table.greedy is not None:
        tokens = torch.where(table.greedy, logits.argmax(-1), tokens)
    chosen = (logits.gather(-1, tokens[:, None]) - highest)[:, 0]
    return Drawn(tokens, (chosen.double() - mass.log()).float(), kept)


def draw(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw an index of each row with probabilities in proportion to `weights`, fp32 [R, V].

    Returns the indices, int64 [R], and the rows' sums, float64 [R]. NaN weights give any index.
    """
    # Sums of blocks first: a cumulative sum over the vocabulary would write eight bytes a token.
    size = weights.shape[-1]
    blocks = functional.pad(weights, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    mass = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    point = uniform[:, None] * mass[:, -1:]
    block = torch.searchsorted(mass, point, right=True).clamp_(max=mass.shape[-1] - 1)
    before = functional.pad(mass, (1, 0)).gather(-1, block)
    own = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
    inside = before + own.cumsum(-1, dtype=torch.float64)
    # The two sums of a block may differ by rounding; then its last token with a weight is drawn.
    last = inside[:, -1:]
    point = torch.where(point < last, point, last.nextafter(before))
    tokens = block * BLOCK + torch.searchsorted(inside, point, right=True)
    return tokens[:, 0].clamp_(max=size - 1), mass[:, -1]


class SamplingMaskRecorder:
    """The sampling masks, in host memory, of R responses that grow by one token a step."""

    def __init__(self) -> None:
        # For each step, the rows that have a mask, ascending.
        self._rows: list[NDArray[np.int64]] = []
        self._counts: list[NDArray[np.int64]] = []
        self._tokens: list[NDArray[np.int32]] = []

    def add(self, kept: Tensor | None, alive: Tensor, active: Tensor | None) -> None:
        """Record the masks of one step.

        Args:
            kept: bool [A, V]; None: no row was truncated.
            alive: bool [A]: rows whose response has not ended.
            active: int64 [A]: the rows' numbers among the R; None: all of them, in order.
        """
        if kept is None:
            kept = alive.new_ones(len(alive), 1)
        # A mask of the whole vocabulary is not recorded.
        masked = alive & ~kept.all(-1)
        places = masked.nonzero()[:, 0]
        some = kept[places]
        rows = places if active is None else active[places]
        self._rows.append(rows.cpu().numpy())
        self._counts.append(some.sum(-1).cpu().numpy())
        self._tokens.append(some.nonzero()[:, 1].to(torch.int32).cpu().numpy())

    def masks(self, lengths: Sequence[int]) -> list[SamplingMasks]:
        """The masks of each of the R responses, which are `lengths` tokens long."""
        counts = np.zeros((len(lengths), len(self._rows)), dtype=np.int32)
        pieces: list[list[NDArray[np.int32]]] = [[] for _ in lengths]
        for step, (rows, sizes, tokens) in enumerate(zip(self._rows, self._counts, self._tokens)):
            counts[rows, step] = sizes
            for row, piece in zip(rows.tolist(), np.split(tokens, sizes.cumsum()[:-1])):
                pieces[row].append(piece)
        nothing = np.zeros(0, dtype=np.int32)
        return [
            SamplingMasks(np.concatenate([nothing, *piece]), row[:length].copy())
            for piece, row, length in zip(pieces, counts, lengths)
        ]
