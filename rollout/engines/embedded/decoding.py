"""One chunk of responses, decoded together, token by token.

Prompts are padded on the left, so that every row's newest token is in the same column:

    column      0 1 2 3 | 4 5 6         prompt width 4
    row 0       . . a b | x y eos       pad 2
    row 1       c d e f | z w v         pad 0

Each prompt is run through the model once; its part of the cache is then copied to its samples. A
response that continues a prefix has its own text, prompt and prefix; its tokens are only the new
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlcore.data.generation import Completion, GenerateRequest, StopStrings
from rlcore.data.sample import FinishReason, VersionSpan
from rlcore.errors import RunFailed
from rollout.engines.embedded.cache import BLOCK, Cache
from rollout.engines.embedded.causal_lm import CausalLM
from rollout.engines.embedded.routed_experts import ExpertLog, stacked
from rollout.engines.embedded.sampling import (
    SamplingMaskRecorder,
    SamplingTable,
    sample_tokens,
    uniforms,
)

PREFILL_TOKENS = 1 << 16  # most tokens in one prefill pass; bounds its activations
UNIFORM_BLOCK = 64  # positions whose random numbers are made at once
COMPACT_BELOW = 0.75  # finished rows leave when fewer than this share is alive


@dataclass(frozen=True)
class Slot:
    """One response to make: number `place` of the `n` of request number `request` of the call."""

    request: int
    place: int


class Decoding:
    """R responses in progress. `step` makes one token of each; `completions` returns the result."""

    def __init__(
        self,
        model: CausalLM,
        requests: Sequence[GenerateRequest],
        slots: Sequence[Slot],
        stop_strings: Callable[[tuple[str, ...]], StopStrings],
    ) -> None:
        self.model = model
        self.requests = requests
        self.slots = slots
        # The request of each row.
        own = [requests[slot.request] for slot in slots]
        sampling = [request.sampling for request in own]
        device = model.device
        rows = len(slots)
        prefixes = [request.made(slot.place) for request, slot in zip(own, slots)]
        distinct = [np.asarray(request.prompt, dtype=np.int64) for request in requests]
        prompts = [distinct[slot.request] for slot in slots]
        # [R]: what comes before each response; one array for the samples of a prompt
        self.texts = [
            np.concatenate([prompt, prefix]) if len(prefix) else prompt
            for prompt, prefix in zip(prompts, prefixes)
        ]
        # [R]: the position of each row's first token
        self.before = np.array([len(prefix) for prefix in prefixes])
        limits = [p.max_new_tokens - len(prefix) for p, prefix in zip(sampling, prefixes)]
        self.max_new = torch.tensor(limits, device=device)
        self.most_new = max(limits)
        self.shortest_limit = min(limits)
        # Each row's stop ids, padded with -1, which is not a token.
        width = max(1, max(len(p.stop_token_ids) for p in sampling))
        padded = [[*p.stop_token_ids, *[-1] * (width - len(p.stop_token_ids))] for p in sampling]
        self.stop_ids = torch.tensor(padded, dtype=torch.int64, device=device)
        self.strings = {row: stop_strings(p.stop) for row, p in enumerate(sampling) if p.stop}
        self.table = SamplingTable.build(sampling, model.vocab_size, device)
        self.sampling_mask = (
            SamplingMaskRecorder() if any(p.sampling_mask for p in sampling) else None
        )
        self.experts = ExpertLog() if any(p.routed_experts for p in sampling) else None
        # Choices of the routers in the last forward passes, int16 [A, Q, layers, k].
        self._chosen: list[Tensor] = []
        addresses = [(r.seed, r.draw, r.samples[s.place], r.turn) for r, s in zip(own, slots)]
        self.addresses = np.array(addresses, dtype=np.uint64)

        width = min(self.most_new, BLOCK)
        self.tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, width, dtype=torch.float32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        # The rows still in the batch.
        self.alive = torch.ones(rows, dtype=torch.bool, device=device)
        # Numbers of these rows, int64 [A]; None while all rows are in the batch.
        self.active: Tensor | None = None
        self.num_alive = rows
        # Tokens made so far by each live row.
        self.made = 0
        # (version, first token made by it)
        self.starts: list[tuple[int, int]] = []
        self.aborted = False
        self._cache: Cache | None = None
        self._most_columns = 0
        self._uniforms = torch.zeros(rows, 0, dtype=torch.float64)

    # --- one token --------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether no row needs another token."""
        return self.num_alive == 0 or self.aborted

    @property
    def _rows(self) -> Tensor | slice:
        """The index of the rows still in the batch."""
        return slice(None) if self.active is None else self.active

    def _row_numbers(self) -> Sequence[int]:
        return range(len(self.slots)) if self.active is None else self.active.tolist()

    def step(self, version: int) -> None:
        """Make one token for every row that is alive, by policy `version`."""
        if not self.starts or self.starts[-1][0] != version:
            self.starts.append((version, self.made))
        logits = self._prefill() if self._cache is None else self._advance(self._cache)
        table = self.table if self.active is None else self.table.select(self.active)
        drawn = sample_tokens(logits, table, self._uniform())
        if self.sampling_mask is not None:
            self.sampling_mask.add(drawn.kept, self.alive, self.active)
        self._store(drawn.tokens, drawn.logprobs)
        self._retire(drawn.tokens)

    def drop_cache(self) -> None:
        """Drop the cache; the next step computes it again from the tokens."""
        self._cache = None

    def abort(self) -> None:
        """End all rows as they are."""
        self.aborted = True

    def _store(self, tokens: Tensor, logprobs: Tensor) -> None:
        if self.made == self.tokens.shape[1]:
            more = min(self.most_new, 2 * self.made) - self.made
            self.tokens = torch.nn.functional.pad(self.tokens, (0, more))
            self.logprobs = torch.nn.functional.pad(self.logprobs, (0, more))
        rows = self._rows
        self.tokens[rows, self.made] = tokens
        self.logprobs[rows, self.made] = logprobs
        self.lengths[rows] += self.alive
        self.made += 1

    def _retire(self, tokens: Tensor) -> None:
        """Mark the rows that this token ended, and drop finished rows when they are many."""
        rows = self._rows
        hit = (tokens[:, None] == self.stop_ids[rows]).any(1)
        if self.strings:
            hit |= self._string_hits(tokens.device)
        hit &= self.alive
        self.stopped[rows] |= hit
        ended = hit
        if self.made >= self.shortest_limit:
            ended = hit | (self.made >= self.max_new[rows])
        self.alive &= ~ended
        self.num_alive = int(self.alive.sum())
        if 0 < self.num_alive <= COMPACT_BELOW * len(self.alive):
            self._compact()

    def _string_hits(self, device: torch.device) -> Tensor:
        hits = [False] * len(self.alive)
        for place, (row, alive) in enumerate(zip(self._row_numbers(), self.alive.tolist())):
            if alive and row in self.strings:
                stop = self.strings[row]
                hits[place] = stop.hit(
                    self.tokens[row, max(0, self.made - stop.window) : self.made].tolist()
                )
        return torch.tensor(hits, device=device)

    def _compact(self) -> None:
        staying = self.alive.nonzero()[:, 0]
        self.active = staying if self.active is None else self.active[staying]
        self.alive = torch.ones_like(staying, dtype=torch.bool)
        if self._cache is not None:
            self._cache.select(staying)

    def _uniform(self) -> Tensor:
        """The random number of each row's next token: float64 [A]."""
        column = self.made % UNIFORM_BLOCK
        if column == 0:
            positions = np.arange(self.made, min(self.made + UNIFORM_BLOCK, self.most_new))
            block = np.empty((len(self.slots), len(positions)))
            seed, draw, sample, turn = self.addresses.T
            for value in np.unique(seed):
                rows = seed == value
                block[rows] = uniforms(
                    int(value),
                    draw[rows, None],
                    sample[rows, None],
                    turn[rows, None],
                    self.before[rows, None] + positions[None, :],
                )
            self._uniforms = torch.from_numpy(block).to(self.model.device)
        return self._uniforms[self._rows, column]

    # --- the model --------------------------------------------------------------------------------

    def _prefill(self) -> Tensor:
        """Fill the cache with all tokens so far; return the next tokens' logits [A, V]."""
        rows = self._row_numbers()
        # Prefill each text once; samples of one request are adjacent.
        if self.made == 0:
            own = [self.texts[row] for row in rows]
            distinct = {id(text): text for text in own}
            place = {key: i for i, key in enumerate(distinct)}
            texts = list(distinct.values())
            copies = [place[id(text)] for text in own]
        else:
            made = self.tokens[:, : self.made].cpu().numpy()
            texts = [np.concatenate([self.texts[row], made[row]]) for row in rows]
            copies = list(range(len(rows)))
        width = max(map(len, texts))
        self._most_columns = width - self.made + self.most_new
        pads = torch.tensor([width - len(text) for text in texts], device=self.model.device)
        ragged = any(len(text) != width for text in texts)

        pieces = []
        logits = []
        at_once = max(1, PREFILL_TOKENS // width)
        capacity = min(self._most_columns, width + BLOCK)
        for start in range(0, len(texts), at_once):
            part = slice(start, start + at_once)
            piece = Cache(capacity, pads[part] if ragged else None)
            logits.append(self._prefill_piece(texts[part], width, piece))
            pieces.append(piece)
        if self.experts is not None:
            experts = torch.cat(self._chosen)
            if self.made == 0:
                self.experts.add_prompts(experts, pads.tolist(), copies)
            else:
                self.experts.add_token(experts[:, -1], self.active)
            self._chosen.clear()
        self._cache = Cache(capacity, pads if ragged else None)
        self._cache.fill(pieces)
        source = torch.tensor(copies, device=self.model.device)
        if copies != list(range(len(texts))):
            self._cache.select(source)
        return torch.cat(logits)[source]

    def _prefill_piece(self, texts: list[NDArray[np.int64]], width: int, cache: Cache) -> Tensor:
        padded = np.zeros((len(texts), width), dtype=np.int64)
        for row, text in zip(padded, texts):
            row[width - len(text) :] = text
        return self._forward(torch.from_numpy(padded).to(self.model.device), cache)

    def _advance(self, cache: Cache) -> Tensor:
        newest = self.tokens[self._rows, self.made - 1]
        cache.reserve(cache.length + 1, self._most_columns)
        logits = self._forward(newest[:, None], cache)
        if self.experts is not None:
            self.experts.add_token(self._chosen.pop()[:, 0], self.active)
        return logits

    def _forward(self, tokens: Tensor, cache: Cache) -> Tensor:
        if self.experts is None:
            return self.model.forward(tokens, cache)
        with self.model.tap.listening() as heard:
            logits = self.model.forward(tokens, cache)
        self._chosen.append(stacked(heard, len(tokens)))
        return logits

    # --- the result -------------------------------------------------------------------------------

    def completions(self) -> list[Completion]:
        """Return one completion for each slot, in order."""
        tokens = self.tokens.cpu().numpy().astype(np.int32)
        logprobs = self.logprobs.cpu().numpy()
        lengths = self.lengths.tolist()
        stopped = self.stopped.tolist()
        limits = self.max_new.tolist()
        masks = None if self.sampling_mask is None else self.sampling_mask.masks(lengths)
        routed = None if self.experts is None else self.experts.records(lengths)
        result = []
        for row, length in enumerate(lengths):
            request = self.requests[self.slots[row].request]
            reason: FinishReason = (
                "stop" if stopped[row] else "length" if length == limits[row] else "abort"
            )
            if not np.isfinite(logprobs[row, :length]).all():
                raise RunFailed(
                    f"the model's log-probs for draw {request.draw} are not finite: its weights are"
                    " broken"
                )
            result.append(
                Completion(
                    tokens[row, :length].copy(),
                    logprobs[row, :length].copy(),
                    reason,
                    self._spans(length),
                    masks[row] if masks and request.sampling.sampling_mask else None,
                    routed[row] if routed and request.sampling.routed_experts else None,
                    cached_tokens=0,
                )
            )
        return result

    def _spans(self, length: int) -> tuple[VersionSpan, ...]:
        ends = [start for _, start in self.starts[1:]] + [self.made]
        spans = (
            (version, start, min(end, length)) for (version, start), end in zip(self.starts, ends)
        )
        return tuple(VersionSpan(*span) for span in spans if span[1] < span[2])
