"""Says in words when something looks wrong in a run, once until it is over.

A rule (`rlcore.tracking.notice_rules`) is said once it holds in `patience` rows of the log in a
row, and is over once it has not held in `calm` rows. From the first row that it holds in until it
is over, it compares with the rows before that one: what stays wrong does not become the usual.
Both ends are kept in notices.jsonl.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rlcore.runs.files import append_json_line, read_json_lines, write_atomic
from rlcore.tracking.notice_rules import MIN_ROWS, RULES, WINDOW, History, Row, Rule

RAISED: Literal["raised"] = "raised"
CLEARED: Literal["cleared"] = "cleared"


@dataclass(frozen=True)
class Notice:
    """Something that looks wrong from `step` on, or does so no more."""

    step: int
    notice: str
    state: Literal["raised", "cleared"]
    text: str
    look_at: str = ""

    def __str__(self) -> str:
        if self.state == CLEARED:
            return f"notice of step {self.step}: {self.notice}: over ({self.text})"
        return f"NOTICE of step {self.step}: {self.notice}: {self.text}. Look at: {self.look_at}"


@dataclass
class _Streak:
    """For how many rows in a row a rule has held, or not held while it is said."""

    rows: int = 0
    said: bool = False
    before: Sequence[Row] = ()  # the rows before it held


class Notices:
    """Checks each row of the log against `RULES`, and keeps what it said in a file.

    Args:
        path: notices.jsonl of the run.
        groups: as in `History`.
        earlier: rows that the run has written before this process.
    """

    def __init__(
        self,
        path: Path,
        *,
        groups: int = 0,
        earlier: Callable[[], Sequence[Row]] = lambda: (),
    ) -> None:
        self.path = path
        self._groups = groups
        self._earlier = earlier
        self._rows: deque[Row] = deque(maxlen=WINDOW)
        self._first: list[Row] = []
        self._streaks = {rule.name: _Streak() for rule in RULES}
        self._begun = False

    @property
    def current(self) -> list[str]:
        """The names of what looks wrong now."""
        return [name for name, streak in self._streaks.items() if streak.said]

    def check(self, step: int, row: Row) -> list[Notice]:
        """Return what is new with the row of `step`, and write it to the file."""
        if not self._begun:
            self._go_on(step)
        found = [notice for rule in RULES if (notice := self._check(rule, step, row))]
        # the evaluation before training is no step to compare with
        if step > 0:
            self._remember([row])
        for notice in found:
            append_json_line(self.path, asdict(notice))
        return found

    def _check(self, rule: Rule, step: int, row: Row) -> Notice | None:
        streak = self._streaks[rule.name]
        if not streak.said and not streak.rows:
            streak.before = list(self._rows)
        text = rule.check(row, History(streak.before, self._first, self._groups))
        if bool(text) == streak.said:
            streak.rows = 0
            return None
        streak.rows += 1
        if streak.rows < (rule.calm or rule.patience if streak.said else rule.patience):
            return None
        streak.rows = 0
        streak.said = not streak.said
        if streak.said:
            return Notice(step, rule.name, RAISED, text, rule.look_at.format(step=step))
        return Notice(step, rule.name, CLEARED, "it has not been so since")

    def _go_on(self, step: int) -> None:
        """Continue the file of an earlier process: what it said of `step` and later is void."""
        self._begun = True
        kept = [notice for notice in read_notices(self.path) if notice.step < step]
        if self.path.exists():
            lines = "".join(json.dumps(asdict(notice)) + "\n" for notice in kept)
            write_atomic(self.path, lines.encode())
        rows = [row for row in self._earlier() if 0 < row["step"] < step]
        # checked once more, for rules that have begun to hold
        again = rows[-WINDOW:]
        self._remember(rows[:-WINDOW])
        for notice in kept:
            streak = self._streaks.get(notice.notice)
            if streak is not None and not (again and notice.step >= again[0]["step"]):
                streak.said = notice.state == RAISED
                streak.before = [row for row in rows if row["step"] < notice.step][-WINDOW:]
        for row in again:
            for rule in RULES:
                self._check(rule, int(row["step"]), row)
            self._remember([row])

    def _remember(self, rows: Sequence[Row]) -> None:
        self._rows.extend(rows)
        self._first += rows[: MIN_ROWS - len(self._first)]


def read_notices(path: Path) -> list[Notice]:
    """Read what was said of a run. A last line without its end is being written, or was torn."""
    return [Notice(**row) for row in read_json_lines(path)]
