"""Answers the page's requests with values that become JSON."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.errors import DataError
from rlcore.view.comparison import answers_of, sets_of, side_by_side
from rlcore.view.detail import excerpt_of, sample_page
from rlcore.view.run import RunView
from rlcore.view.samples import Filter, Row
from rlcore.view.timeline import timeline_of

SEARCH_S = 0.35  # after this a search answers, with the step to continue from
MAX_OF_A_GROUP = 512
MAX_CURVES = 50  # in an answer; runs.js requests at most as many
NEWEST_STEPS = 400
PROGRESS = (
    *("rollout/reward", "eval/score", "rollout/staleness_mean", "rollout/zero_std_groups"),
    *("val/sequence_lengths", "policy/entropy_avg", "objective/kl", "time/step"),
)
MAX_ROWS = 500  # of a page
_WHOLE = re.compile(r"\d{1,18}")
_PLACE = re.compile(r"(\d{1,12}):(\d{1,12})")


@dataclass(frozen=True)
class Parameters:
    """The query string of an address. All errors are DataErrors."""

    given: Mapping[str, Sequence[str]]

    def text(self, name: str, default: str | None = None) -> str:
        """Return the value of a parameter, which is required without a default."""
        if found := self.given.get(name):
            return found[0]
        if default is None:
            raise DataError(f"the parameter {name} is missing")
        return default

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a non-negative whole number."""
        text = self.text(name, None if default is None else str(default))
        if not _WHOLE.fullmatch(text):
            raise DataError(f"{name} must be a whole number from 0, got {text[:40]!r}")
        return int(text)

    def limit(self, default: int = 100) -> int:
        """Return the requested number of rows."""
        return min(self.whole("limit", default), MAX_ROWS)

    def locations(self) -> list[tuple[int, int]]:
        """Return the step and the row of each `at=STEP:ROW`."""
        given = self.given.get("at", ())
        if len(given) > MAX_ROWS:
            raise DataError(f"at: {len(given)} samples were asked for, of at most {MAX_ROWS}")
        found = map(_PLACE.fullmatch, given)
        return [(int(match[1]), int(match[2])) for match in found if match]

    def filters(self) -> list[Filter]:
        """Return the conditions of `filter`: a JSON list of [column, comparison, value]."""
        text = self.text("filter", "[]")
        try:
            found = [Filter(*one) for one in json.loads(text)]
            if not all(
                isinstance(one.column, str)
                and isinstance(one.comparison, str)
                and not isinstance(one.value, bool)
                and (isinstance(one.value, str) or math.isfinite(one.value))
                for one in found
            ):
                raise ValueError("column and comparison are texts, the value is a number or a text")
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"filter must be a list of [column, comparison, value], got {text[:80]!r} ({error})"
            ) from None
        return found


class Api:
    """Answers the page; it only reads.

    Args:
        follow: whether the page polls by itself.
    """

    def __init__(self, runs: Sequence[RunView], *, follow: bool) -> None:
        self.runs = {run.name: run for run in runs}
        self.follow = follow

    def answer(self, name: str, given: Mapping[str, Sequence[str]]) -> Any:
        """Answer a request.

        Raises:
            DataError: the request or a parameter is wrong.
        """
        find = getattr(self, f"find_{name}", None)
        if find is None:
            raise DataError(f"there is no {name[:40]!r} to ask for")
        return find(Parameters(given))

    def run(self, asked: Parameters, name: str = "run") -> RunView:
        """Return the requested run."""
        wanted = asked.text(name)
        if wanted not in self.runs:
            raise DataError(f"no run {wanted[:80]!r} here; there is {', '.join(self.runs)}")
        return self.runs[wanted]

    # --- runs and metrics -------------------------------------------------------------------------

    def find_runs(self, asked: Parameters) -> Any:
        """Return every run with its state, its newest numbers and its available views."""
        found = []
        for run in self.runs.values():
            steps = run.samples.steps()
            ends = {"first": min(steps, default=0), "last": max(steps, default=0)}
            result = run.result()
            found.append(
                {
                    "name": run.name,
                    "path": str(run.path),
                    "status": result.get("status", "running or killed"),
                    "reason": result.get("reason", ""),
                    "newest": run.metrics.newest(),
                    "evaluated": run.metrics.last("eval/score"),
                    "steps": {"count": len(steps), **ends},
                    "samples": run.samples.count(),
                    "columns": run.samples.columns(),
                    "metrics": run.metrics.names(),
                    "ledger": run.directory.ledger_path.is_file(),
                }
            )
        return {"follow": self.follow, "runs": found}

    def find_curves(self, asked: Parameters) -> Any:
        """Return the curves of the requested metrics, for each run."""
        return {
            name: {run.name: run.metrics.curve(name) for run in self.runs.values()}
            for name in asked.given.get("metric", ())[:MAX_CURVES]
        }

    def find_definitions(self, asked: Parameters) -> Any:
        """Return the definition of each metric that any run has."""
        # This imports torch, which takes seconds.
        from rlcore.algorithms.metric_table import metric_spec

        names = {name for run in self.runs.values() for name in run.metrics.names()}
        specs = {name: metric_spec(name) for name in sorted(names)}
        return {
            name: {"text": spec.definition, "over": spec.denominator, "unit": spec.unit}
            for name, spec in specs.items()
            if spec is not None
        }

    def find_steps(self, asked: Parameters) -> Any:
        """Return the newest steps with their numbers."""
        run = self.run(asked)
        recorded = run.samples.steps()
        steps = sorted({*recorded[-NEWEST_STEPS:], *run.metrics.steps[-NEWEST_STEPS:]})
        rows = run.metrics.rows(steps)
        return [
            {"step": step, "recorded": step in recorded}
            | {name: row[name] for name in PROGRESS if name in row}
            for step, row in zip(steps, rows)
        ][::-1]

    def find_timeline(self, asked: Parameters) -> Any:
        """Return the activities of every process in a step, and their waits."""
        step = asked.whole("step") if "step" in asked.given else None
        return timeline_of(self.run(asked), step)

    # --- samples ----------------------------------------------------------------------------------

    def find_samples(self, asked: Parameters) -> Any:
        """Return a page of the table of samples, with their scalars."""
        run = self.run(asked)
        found = run.samples.select(
            *self._steps(run, asked),
            asked.filters(),
            order=asked.text("sort", ""),
            offset=asked.whole("offset", 0),
            limit=asked.limit(),
        )
        return {"total": found.total, "rows": found.rows}

    def _steps(self, run: RunView, asked: Parameters) -> tuple[int, int]:
        """Return the first and last step of `steps=FIRST-LAST`, `STEP`, `all` or `newest`."""
        given = asked.text("steps", "newest")
        newest = max(run.samples.steps(), default=0)
        if given in ("newest", "all"):
            return newest if given == "newest" else 0, newest
        first, dash, last = given.partition("-")
        ends = [first, last if dash else first]
        if not all(text.isascii() and text.isdigit() and len(text) < 13 for text in ends):
            raise DataError(f"steps: expected newest, all, STEP or FIRST-LAST, got {given[:40]!r}")
        return int(ends[0]), int(ends[1])

    def find_texts(self, asked: Parameters) -> Any:
        """Return the beginnings of samples' texts, by `at=STEP:ROW`."""
        run = self.run(asked)
        by_step: dict[int, list[int]] = {}
        for step, row in asked.locations():
            by_step.setdefault(step, []).append(row)
        found: dict[str, Any] = {}
        for step, rows in by_step.items():
            try:
                records = run.records(step, rows)
            # Recovery: the table shows the scalars, and the reason for the missing text.
            except DataError as error:
                found |= {f"{step}:{row}": {"missing": str(error)} for row in rows}
                continue
            found |= {f"{step}:{row}": excerpt_of(record) for row, record in records.items()}
        return found

    def find_search(self, asked: Parameters) -> Any:
        """Return samples that contain a text, newest step first, of as many steps as time allows.

        `before` is the step with which an earlier answer ended.
        """
        run = self.run(asked)
        text = asked.text("text")
        first, last = self._steps(run, asked)
        last = min(last, asked.whole("before", last + 1) - 1)
        until = time.monotonic() + SEARCH_S
        rows: list[Row] = []
        missing = 0
        for step in reversed(run.samples.steps()):
            if not first <= step <= last:
                continue
            if time.monotonic() > until or len(rows) >= asked.limit():
                return {"rows": rows, "before": step + 1, "missing": missing}
            try:
                rows += run.samples.search(step, run.recording(step), text, asked.filters())
            except DataError:
                # The page shows how many steps were not searched.
                missing += 1
        return {"rows": rows, "before": 0, "missing": missing}

    def _sample(self, run: RunView, asked: Parameters) -> Row:
        """Return the scalars of the sample `index` of `draw` in `step`."""
        step = asked.whole("step")
        filters = [Filter(name, "=", asked.whole(name)) for name in ("draw", "index")]
        found = run.samples.select(step, step, filters, limit=1).rows
        if not found:
            raise DataError(
                f"step {step} of {run.name} has no sample {asked.whole('index')} of draw"
                f" {asked.whole('draw')}: it was rewound"
            )
        return found[0]

    def find_sample(self, asked: Parameters) -> Any:
        """Return a sample with all its data."""
        run = self.run(asked)
        row = self._sample(run, asked)
        record = run.records(row["step"], [row["row"]])[row["row"]]
        group = self._group(run, row["step"], row["draw"])
        return sample_page(run, record) | {
            "scalars": row,
            "group": [other["index"] for other in group],
        }

    def _group(self, run: RunView, step: int, draw: int) -> list[Row]:
        filters = [Filter("draw", "=", draw)]
        return run.samples.select(step, step, filters, limit=MAX_OF_A_GROUP).rows

    def find_group(self, asked: Parameters) -> Any:
        """Return all samples of a draw."""
        run = self.run(asked)
        step = asked.whole("step")
        rows = self._group(run, step, asked.whole("draw"))
        records = run.records(step, [row["row"] for row in rows])
        return {"rows": rows, "samples": [sample_page(run, records[row["row"]]) for row in rows]}

    def find_prompt(self, asked: Parameters) -> Any:
        """Return the samples of a prompt over all steps, newest first."""
        run = self.run(asked)
        prompt_id = self._sample(run, asked)["prompt_id"]
        filters = [Filter("prompt_id", "=", prompt_id), *asked.filters()]
        last = run.samples.steps()[-1]
        found = run.samples.select(0, last, filters, limit=asked.limit(200))
        return {"prompt_id": prompt_id, "total": found.total, "rows": found.rows}

    # --- evaluations, and two steps side by side --------------------------------------------------

    def find_evaluations(self, asked: Parameters) -> Any:
        """Return the sets of every evaluation, and the number of flipped answers in each."""
        return sets_of(self.run(asked))

    def find_evaluation(self, asked: Parameters) -> Any:
        """Return the answers of a set at two steps."""
        run = self.run(asked)
        return answers_of(run, asked.text("set", ""), asked.whole("step"), asked.whole("before"))

    def find_compare(self, asked: Parameters) -> Any:
        """Return metrics, rewards and prompts of two steps, of one run or of two."""
        return side_by_side(*((self.run(asked, s), asked.whole(f"{s}_step")) for s in "ab"))
