"""Raises an alert in words, once, when something looks wrong in a run, and clears it later.

A rule (`rlcore.tracking.notice_rules`) raises its alert once it holds in `patience` consecutive
rows of the log, and clears it after `calm` rows without it. Meanwhile the rule compares with the
rows before the first row in which it held, so a lasting problem does not become the norm.
notices.jsonl keeps both ends.
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


@dataclass(frozen=True)
class Notice:
    """An alert that was raised or cleared at `step`."""

    step: int
    notice: str
    state: Literal["raised", "cleared"]
    text: str
    look_at: str = ""

    def __str__(self) -> str:
        if self.state == "cleared":
            return f"notice of step {self.step}: {self.notice}: over ({self.text})"
        return f"NOTICE of step {self.step}: {self.notice}: {self.text}. Look at: {self.look_at}"


@dataclass
class _Streak:
    """The number of consecutive rows in which a rule has held, or not held since its alert."""

    rows: int = 0
    said: bool = False
    before: Sequence[Row] = ()  # the rows before the rule held


class Notices:
    """Checks each row of the log against `RULES`, and keeps the alerts in a file.

    Args:
        path: notices.jsonl of the run.
        groups: as in `History`.
        earlier: rows that earlier processes of the run have written.
    """

    def __init__(
        self, path: Path, *, groups: int = 0, earlier: Callable[[], Sequence[Row]] = lambda: ()
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
        """The names of the current alerts."""
        return [name for name, streak in self._streaks.items() if streak.said]

    def check(self, step: int, row: Row) -> list[Notice]:
        """Return the alerts that the row of `step` raises or clears, and write them to the file."""
        if not self._begun:
            self._continue_from(step)
        found = self._take(step, row)
        for notice in found:
            append_json_line(self.path, asdict(notice))
        return found

    def _take(self, step: int, row: Row) -> list[Notice]:
        """Check a row, and keep it for later rows."""
        found = [notice for rule in RULES if (notice := self._check(rule, step, row))]
        # Rows are not compared with the evaluation before training.
        if step > 0:
            self._rows.append(row)
            self._first += [row][: MIN_ROWS - len(self._first)]
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
            return Notice(step, rule.name, "raised", text, rule.look_at.format(step=step))
        return Notice(step, rule.name, "cleared", "it has not been so since")

    def _continue_from(self, step: int) -> None:
        """Continue the file of an earlier process, without its alerts of `step` and later."""
        self._begun = True
        kept = [notice for notice in read_notices(self.path) if notice.step < step]
        if self.path.exists():
            lines = "".join(json.dumps(asdict(notice)) + "\n" for notice in kept)
            write_atomic(self.path, lines.encode())
        rows = [row for row in self._earlier() if 0 < row["step"] < step]
        # Check these rows again, for rules that have begun to hold.
        again = rows[-WINDOW:]
        self._rows.extend(rows[:-WINDOW])
        self._first = rows[:-WINDOW][:MIN_ROWS]
        for notice in kept:
            streak = self._streaks.get(notice.notice)
            if streak is not None and not (again and notice.step >= again[0]["step"]):
                streak.said = notice.state == "raised"
                streak.before = [row for row in rows if row["step"] < notice.step][-WINDOW:]
        for row in again:
            self._take(int(row["step"]), row)


def read_notices(path: Path) -> list[Notice]:
    """Read the alerts of a run, without an incomplete last line."""
    return [Notice(**row) for row in read_json_lines(path)]
