"""Draws whose prompts a curriculum chooses.

A choice depends on results, so seed and draw alone do not determine it: it is made once, when the
draw is first made, and written to the ledger's journal and, until the draw is consumed or dropped,
to the snapshot. It follows from

- the seed and the number of the draw, whose random words are addressed as everywhere;
- the weights, which the curriculum computes at each hand-over from the results at that moment;
- the excluded prompts: those of draws in progress, and those drawn since the hand-over.

There is no other state, so a run that resumes at a hand-over makes the same choices.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data.curriculum.history import Outcome, Results, Weigh, weigh
from rlcore.data.prompts import PromptStream
from rlcore.data.sample import Sample
from rlcore.errors import DataError, RunFailed

_TRIES = 16  # words of a draw that may hit excluded prompts
_FORGOTTEN = -1  # row of a draw that was finished before this process began


class CurriculumStream(PromptStream):
    """Endless draws of prompts, with probabilities from a curriculum.

    Args:
        base: gives the rows to draw from: with weights of sources, the rows of the draw's source.
        memory, passes_at: see `rlcore.config.sections.data.CurriculumConfig`.
        lengths: the tokens of each prompt.
        sources: the source of each prompt, an index into `source_names`.
    """

    def __init__(
        self,
        base: PromptStream,
        curriculum: Weigh,
        *,
        memory: float,
        passes_at: float | None,
        lengths: NDArray[np.int64],
        sources: NDArray[np.int64],
        source_names: tuple[str, ...] = (),
    ) -> None:
        super().__init__(base.size, seed=base.seed, fingerprint=base.fingerprint)
        self.record = base.record
        self._base = base
        self._curriculum = curriculum
        self._passes_at = passes_at
        self._facts = (lengths, sources, source_names)
        digest = hashlib.blake2b(f"{base.seed}:curriculum".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "little")
        self._results = Results(base.size, memory)
        # The row of each draw.
        self._rows = array("q")
        # Draws that are neither consumed nor dropped.
        self._open: set[int] = set()
        # Weights since the last hand-over.
        self._weights: NDArray[np.float64] | None = None
        # Cumulative weights without the prompts that were excluded when it was made.
        self._cumulative = np.zeros(0)
        # Rows that must not be drawn before the next hand-over.
        self._drawn: set[int] = set()

    # --- choices ----------------------------------------------------------------------------------

    def row(self, draw: int) -> int:
        """Return the row of an existing draw."""
        if not 0 <= draw < len(self._rows):
            raise ValueError(f"draw {draw} does not exist: {len(self._rows)} draws were made")
        row = self._rows[draw]
        return self._base.row(draw) if row == _FORGOTTEN else row

    def rows_of(self, draw: int) -> range:
        """Return the rows among which a draw is."""
        return self._base.rows_of(draw)

    def chosen(self, draw: int) -> int | None:
        """Return the row of a draw, for the journal."""
        return self.row(draw)

    def take(self, count: int) -> list[int]:
        """Return the next `count` draws, choosing prompts for the new ones."""
        weights = self._weights if self._weights is not None else self._weigh()
        made = self.cursor
        draws = super().take(count)
        for draw in range(made, self.cursor):
            row = self._choose(draw, weights)
            self._drawn.add(row)
            # After a restore, rows of later draws are still known.
            self._rows[draw : draw + 1] = array("q", [row])
        self._open.update(draws)
        return draws

    def _weigh(self) -> NDArray[np.float64]:
        """Compute the curriculum's weights from the current results."""
        weights = weigh(self._curriculum, self._results.history(*self._facts))
        self._weights = weights
        self._drawn = {self.row(draw) for draw in self._open}
        free = weights.copy()
        free[list(self._drawn)] = 0.0
        self._cumulative = free.cumsum()
        return weights

    def _choose(self, draw: int, weights: NDArray[np.float64]) -> int:
        """Choose a prompt that is not drawn yet; any prompt if all those with a weight are drawn.

        A hit of a drawn prompt is rejected, which leaves the odds of the others unchanged. The sums
        are only recomputed after repeated rejections.
        """
        rows = self.rows_of(draw)
        key = np.array([self._key, draw], dtype=np.uint64)
        numbers = (np.random.Philox(key=key).random_raw(_TRIES + 1) >> np.uint64(11)) * 2.0**-53
        before = float(self._cumulative[rows.start - 1]) if rows.start else 0.0
        total = float(self._cumulative[rows.stop - 1]) - before
        for number in numbers[:_TRIES] if total > 0 else ():
            at = int(np.searchsorted(self._cumulative, before + number * total, side="right"))
            row = min(at, rows.stop - 1)
            if row not in self._drawn and weights[row] > 0:
                return row
        own = weights[rows.start : rows.stop]
        free = own.copy()
        free[[row - rows.start for row in self._drawn if row in rows]] = 0.0
        # The last candidates serve a source whose weights are all 0.
        for candidates in (free, own, np.ones(len(rows))):
            if candidates.any():
                break
        sums = candidates.cumsum()
        at = int(np.searchsorted(sums, numbers[_TRIES] * sums[-1], side="right"))
        return rows.start + min(at, int(candidates.nonzero()[0][-1]))

    # --- results ----------------------------------------------------------------------------------

    def outcome(self, samples: Sequence[Sample]) -> Outcome:
        """Return the result of a draw's group."""
        return Outcome.of(samples, self._passes_at)

    def finished(self, draw: int, outcome: Outcome | None) -> None:
        """Add the result of a draw's group. It counts from the next hand-over on."""
        if outcome is None:
            raise ValueError(f"draw {draw}: a curriculum needs the outcome of each finished group")
        self._results.add(self.row(draw), outcome)

    def finish(self, draw: int) -> None:
        """Mark a draw as consumed or dropped; it will not come again."""
        self._open.discard(draw)

    def failed(self, draw: int) -> None:
        """Record that a draw's group was given up. It counts from the next hand-over on."""
        self._results.add_failure(self.row(draw))
        self._open.discard(draw)

    def handed_over(self) -> None:
        """Recompute the weights of the prompts from all results so far."""
        self._weigh()

    def check_results(self) -> None:
        """Raise RunFailed if groups have finished and none has a known result."""
        if self._results.count and not self._results.num_known:
            raise RunFailed(
                f"data.curriculum: none of the {self._results.count} groups so far has a sample"
                " that a part of the reward calls right or wrong, so all prompts look alike: set"
                " data.curriculum.passes_at to the reward from which a sample passes, or return"
                " `correct` from a reward function (docs/rewards.md)"
            )

    def metrics(self) -> dict[str, float]:
        """Return the curriculum's results and weights as metrics, at a hand-over."""
        history = self._results.history(*self._facts)
        weights = self._weights if self._weights is not None else self._weigh()
        known = history.judged > 0
        metrics = {
            "curriculum/seen": float((history.seen > 0).mean()),
            "curriculum/most_seen": float(history.seen.max()),
            "curriculum/effective_prompts": float(1 / np.square(weights / weights.sum()).sum()),
        }
        if known.any():
            rates = history.pass_rate[known]
            metrics |= {
                "curriculum/pass_rate": float(rates.mean()),
                "curriculum/always_right": float((rates == 1).mean()),
                "curriculum/never_right": float((rates == 0).mean()),
            }
        return metrics

    # --- state ------------------------------------------------------------------------------------

    @property
    def order(self) -> dict[str, Any]:
        """The order's own key: the next row depends only on the curriculum's results and chance."""
        return {}

    def snapshot(self) -> dict[str, Any]:
        """Return the state, JSON-able: the rows of unfinished draws, and all results."""
        rows = [[draw, self.row(draw)] for draw in sorted(self._open)]
        curriculum = {"rows": rows, "results": self._results.snapshot()}
        return {**super().snapshot(), "curriculum": curriculum}

    def beginning(self) -> dict[str, Any]:
        """Return the snapshot before the first draw."""
        nothing = Results(0, 0.0).snapshot()
        return {**super().beginning(), "curriculum": {"rows": [], "results": nothing}}

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        if "curriculum" not in state:
            raise DataError(
                "the run was saved without data.curriculum: resume it without, or start a new run"
                " from its weights"
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `snapshot` was taken.

        Rows of later draws are remembered until `move`, since this process may keep some of them.

        Raises:
            DataError: the prompts differ from the snapshot's, or the snapshot has no curriculum.
        """
        super().restore(state)
        found = state["curriculum"]
        later = self._rows[self.cursor :]
        self._rows = array("q", [_FORGOTTEN]) * self.cursor
        for draw, row in found["rows"]:
            self._rows[draw] = row
        self._rows.extend(later)
        self._open = {draw for draw, _ in found["rows"]}
        self._results.restore(found["results"])
        self._weights = None

    def adopted(self, draw: int) -> int | None:
        """Return the row of a kept draw that is later than the snapshot; see `restore`."""
        if draw == len(self._rows):
            # The draw was made by another process.
            self._rows.append(_FORGOTTEN)
        self._open.add(draw)
        return self.row(draw)

    def move(self, cursor: int, requeued: Sequence[int]) -> None:
        """Move to another position, after the kept draws; see `adopted`."""
        super().move(cursor, requeued)
        del self._rows[cursor:]
        self._weights = None
