"""Draws whose prompts a curriculum chooses.

A choice depends on results, so it is no function of seed and draw alone: it is made once, when the
draw is made first, and written down, in the ledger's journal and, until the draw is settled, in
the snapshot. It follows from

- the seed and the number of the draw, whose random words are addressed as everywhere;
- the weights, which the curriculum gives at each hand-over, from the results at that moment;
- what must not be drawn: prompts of draws that are not settled, and those drawn since.

So nothing else is state, and a run that is resumed at a hand-over chooses as it would have.
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

_TRIES = 16  # words of a draw that may hit prompts which are drawn already
_FORGOTTEN = -1  # the row of a draw that was settled before this process began


class CurriculumStream(PromptStream):
    """Endless draws of prompts, each with a probability that a curriculum says.

    Args:
        base: says from which rows a draw is: with weights of sources, from those of its source.
        memory, passes_at: see `rlcore.config.sections.data.CurriculumConfig`.
        lengths: tokens of each prompt.
        sources: of each prompt, an index into `source_names`.
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
        self._rows = array("q")  # of each draw
        self._open: set[int] = set()  # draws that are not settled
        self._weights: NDArray[np.float64] | None = None  # since the last hand-over
        self._cumulative = np.zeros(0)  # of the weights without the prompts that were drawn then
        self._drawn: set[int] = set()  # rows that must not be drawn before the next hand-over

    # --- choices ----------------------------------------------------------------------------------

    def row(self, draw: int) -> int:
        """Return the row of a draw that was made."""
        if not 0 <= draw < len(self._rows):
            raise ValueError(f"draw {draw} was not made: {len(self._rows)} draws were")
        row = self._rows[draw]
        return self._base.row(draw) if row == _FORGOTTEN else row

    def rows_of(self, draw: int) -> range:
        """Return the rows among which a draw is."""
        return self._base.rows_of(draw)

    def chosen(self, draw: int) -> int | None:
        """Return the row of a draw, for the journal."""
        return self.row(draw)

    def take(self, count: int) -> list[int]:
        """Return the next `count` draws; new ones have their prompts chosen."""
        weights = self._weights if self._weights is not None else self._weigh()
        made = self.cursor
        draws = super().take(count)
        for draw in range(made, self.cursor):
            row = self._choose(draw, weights)
            self._drawn.add(row)
            self._keep(draw, row)
        self._open.update(draws)
        return draws

    def _keep(self, draw: int, row: int) -> None:
        if draw < len(self._rows):
            self._rows[draw] = row
        else:
            self._rows.append(row)

    def _weigh(self) -> NDArray[np.float64]:
        """Ask the curriculum for the weights of this moment."""
        weights = weigh(self._curriculum, self._results.history(*self._facts))
        self._weights = weights
        self._drawn = {self.row(draw) for draw in self._open}
        free = weights.copy()
        free[list(self._drawn)] = 0.0
        self._cumulative = free.cumsum()
        return weights

    def _choose(self, draw: int, weights: NDArray[np.float64]) -> int:
        """Choose a prompt that is not drawn yet, or any where all with a weight are.

        A hit of one that is drawn already is thrown away, which leaves the others' odds as they
        are; only where that goes on, sums are made anew.
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
        for candidates in (free, own, np.ones(len(rows))):  # a source whose weights are all 0
            if candidates.any():
                break
        sums = candidates.cumsum()
        at = int(np.searchsorted(sums, numbers[_TRIES] * sums[-1], side="right"))
        return rows.start + min(at, int(candidates.nonzero()[0][-1]))

    # --- results ----------------------------------------------------------------------------------

    def outcome(self, samples: Sequence[Sample]) -> Outcome:
        """Return how the group of a draw went."""
        return Outcome.of(samples, self._passes_at)

    def finished(self, draw: int, outcome: Outcome | None) -> None:
        """Note the result of a draw's group. It counts from the next hand-over on."""
        if outcome is None:
            raise ValueError(f"draw {draw}: a curriculum needs the outcome of each finished group")
        self._results.add(self.row(draw), outcome)

    def settled(self, draw: int) -> None:
        """Note that a draw was consumed or dropped, and so will not come again."""
        self._open.discard(draw)

    def failed(self, draw: int) -> None:
        """Note that the group of a draw was given up. It counts from the next hand-over on."""
        self._results.add_failure(self.row(draw))
        self._open.discard(draw)

    def handed_over(self) -> None:
        """Weigh the prompts anew, by all results so far."""
        self._weigh()

    def check_told(self) -> None:
        """Raise RunFailed where groups have finished and nothing says which samples pass."""
        if self._results.count and not self._results.num_told:
            raise RunFailed(
                f"data.curriculum: none of the {self._results.count} groups so far has a sample of"
                " which a part of the reward says right or wrong, so all prompts look alike: set"
                " data.curriculum.passes_at to the reward from which a sample passes, or return"
                " `correct` from a reward function (docs/rewards.md)"
            )

    def metrics(self) -> dict[str, float]:
        """Return what the curriculum knows and wants, at a hand-over."""
        history = self._results.history(*self._facts)
        weights = self._weights if self._weights is not None else self._weigh()
        known = history.told > 0
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
        """The curriculum's own: nothing but its results, and chance, says which row comes next."""
        return {}

    def snapshot(self) -> dict[str, Any]:
        """Return the state, JSON-able: the rows of draws that are not settled, and all results."""
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

        Rows of later draws are remembered until `move`: this process may keep some of them.

        Raises:
            DataError: the prompts are not those of the snapshot, or it is of no curriculum.
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
        """Return the row of a later draw than the snapshot's, which is kept; see `restore`."""
        if draw == len(self._rows):  # of another process
            self._rows.append(_FORGOTTEN)
        self._open.add(draw)
        return self.row(draw)

    def move(self, cursor: int, requeued: Sequence[int]) -> None:
        """Go to another position, behind the draws that were kept; see `adopted`."""
        super().move(cursor, requeued)
        del self._rows[cursor:]
        self._weights = None
