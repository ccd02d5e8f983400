"""The progress display: a line for each step and, on a terminal, a table below.

step  12/40 | reward 0.412 | kl 0.0031 | length 3.21 | 1.23k tok/s | 2.1 s/step | 1m02s left
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlcore.data.sample import Sample
from rlcore.terminal import LastingStream, printable
from rlcore.tracking.base import BaseTracker
from rlcore.tracking.format import (
    KL,
    LENGTH,
    LOSS,
    REWARD,
    STEP_SECONDS,
    TOKENS_PER_SECOND,
    TRAINING,
    duration,
    evaluated_sets,
    first,
    number,
    of_set,
    sample_lines,
)
from rlcore.tracking.report import phases

WINDOW = 20  # steps over which the time left is estimated
# The first step, the last, and steps with an evaluation are always shown; of the others at most one
# in this time, so that quick steps do not flood the terminal.
QUIET_S = 2.0
FIELDS = (("kl {}", KL), ("length {}", LENGTH), ("{} tok/s", TOKENS_PER_SECOND))
# Rows of the table on a terminal: each metric of the last step, as text.
ROWS: Mapping[str, Mapping[str, str]] = {
    "rollouts": {
        "rollout/staleness_mean": "staleness {}",
        "rollout/zero_std_groups": "{:.0f} groups without variance",
        "rollout/reward_errors": "{:.0f} rewards failed",
        "rollout/reward_timeouts": "{:.0f} rewards too late",
        "rollout/buffered_groups": "{:.0f} groups ready",
        "rollout/in_flight_groups": "{:.0f} groups in flight",
    },
    "load": {
        "rollout/engines_serving": "{:.0f} engines serving",
        "perf/trainer_idle_fraction": "trainer idle {:.0%}",
        "perf/engine_idle_fraction": "engine idle {:.0%}",
        "perf/mfu": "mfu {:.0%}",
    },
}
HIGHLIGHTS = {
    r"^step +\d+/\d+": "bold cyan",
    r"\breward [^ ]+": "green",
    r"(?<=\| )eval [^|]+": "bold green",
    r"\bnan\b|\b-?inf\b|FAILED|^NOTICE": "bold red",
    r"^    [<>] .*": "dim",
}
SHOWN_PHASES = 5
ENDINGS = {
    "completed": "completed",
    "early_stopped": "stopped early",
    "failed": "FAILED",
    "interrupted": "interrupted; continue with --resume",
}


class Progress(BaseTracker):
    """Lines flushed one by one; on a terminal, with a table below that stays at the bottom."""

    def __init__(
        self,
        name: str,
        total_steps: int,
        stream: TextIO,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.total_steps = total_steps
        self.stream = cast(TextIO, LastingStream(stream))
        self._clock = clock
        self._began = clock()
        self._last = self._began
        self._intervals: deque[float] = deque(maxlen=WINDOW)
        self._step = 0
        # The time at which a step's line was last written.
        self._shown: float | None = None
        # The line of the last step, until it is written.
        self._pending = ""
        # Whether the display has said that it leaves out steps.
        self._has_explained = False
        self._row: Mapping[str, float] = {}
        self._evaluated: dict[str, str] = {}
        self._notices: Sequence[str] = ()
        self._live: Live | None = None
        if stream.isatty():
            # The display calls `table` from its own thread.
            self._live = Live(
                console=Console(file=self.stream, highlight=False),
                get_renderable=self.table,
                transient=True,
                refresh_per_second=2,
            )

    def start(self, description: Mapping[str, str]) -> None:
        """Show the settings as a table."""
        width = max((len(key) for key in description), default=0)
        self.write(f"run {self.name}")
        for key, value in description.items():
            self.write(f"  {key:<{width}}  " + value.replace("\n", "\n" + " " * (width + 4)))
        self._last = self._clock()
        if self._live is not None:
            self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step, unless another was shown a moment ago."""
        now = self._clock()
        # Step 0 is the evaluation before training; its time says nothing about later steps.
        if step > 0:
            self._intervals.append(now - self._last)
            self._row = metrics
        self._step = step
        self._last = now
        if self._pending and not self._has_explained:
            self.write("(a line for several quick steps; metrics.jsonl has each)")
            self._has_explained = True
        self._pending = " | ".join([self._position(), *self._fields(metrics)])
        evaluated = evaluated_sets(metrics)
        for name in evaluated:
            score = number(metrics[of_set(name, "score")])
            self._evaluated[name] = f"{name} {score} (step {step})".lstrip()
        is_last = step >= self.total_steps
        if evaluated or is_last or self._shown is None or now - self._shown >= QUIET_S:
            self._show_step()
        if self._live is not None:
            self._live.refresh()

    def show_samples(self, step: int, samples: Sequence[Sample], label: str = TRAINING) -> None:
        """Show the samples, indented below their step."""
        self._show_step()
        for sample in samples:
            head, *texts = sample_lines(sample)
            self.write(f"  {label} of step {step}: {head}")
            for text in texts:
                self.write("    " + text.replace("\n", "\n    "))

    def note(self, line: str) -> None:
        """Show the line below the last step."""
        self._show_step()
        self.write(line)

    def show_notices(self, names: Sequence[str]) -> None:
        """Keep the alerts in the table."""
        self._notices = list(names)

    def close(self, status: str) -> None:
        """Show how the run ended."""
        if self._live is not None:
            self._live.stop()
        self._show_step()
        spent = duration(self._clock() - self._began)
        self.write(
            f"run {self.name}: {ENDINGS.get(status, status)} after step"
            f" {self._step}/{self.total_steps}, {spent}"
        )

    @property
    def seconds_left(self) -> float | None:
        """The time left, estimated from the last steps; None before the first step.

        The estimate includes evaluations and checkpoints between the steps.
        """
        if not self._intervals:
            return None
        return sum(self._intervals) / len(self._intervals) * max(self.total_steps - self._step, 0)

    def _show_step(self) -> None:
        """Write the line of the last step, unless it is written; other lines refer to this step."""
        if self._pending:
            self.write(self._pending)
            self._shown = self._last
            self._pending = ""

    def write(self, line: str) -> None:
        """Write a line and flush it. A terminal highlights steps and dims samples."""
        line = printable(line)
        if self._live is None:
            print(line, file=self.stream, flush=True)
            return
        # Generated text stays plain: it is never read as markup.
        text = Text(line)
        for pattern, style in HIGHLIGHTS.items():
            text.highlight_regex(pattern, style)
        self._live.console.print(text, soft_wrap=True)

    def _position(self) -> str:
        width = len(str(self.total_steps))
        return f"step {self._step:>{width}}/{self.total_steps}"

    def _fields(self, metrics: Mapping[str, float]) -> list[str]:
        reward = ("reward {}", REWARD) if first(metrics, REWARD) is not None else ("loss {}", LOSS)
        fields = [
            text.format(number(value))
            for text, names in (reward, *FIELDS)
            if (value := first(metrics, names)) is not None
        ]
        seconds = first(metrics, STEP_SECONDS)
        if seconds is None and self._intervals:
            seconds = self._intervals[-1]
        if seconds is not None:
            fields.append(f"{duration(seconds)}/step")
        if self.seconds_left is not None and self._step < self.total_steps:
            fields.append(f"{duration(self.seconds_left)} left")
        for name in evaluated_sets(metrics):
            field = f"eval {name}".rstrip() + f" {number(metrics[of_set(name, 'score')])}"
            if (accuracy := metrics.get(of_set(name, "accuracy"))) is not None:
                field += f" (accuracy {number(accuracy)})"
            fields.append(field)
        return fields

    def table(self) -> Table:
        """Return the table, with lines cut to the width of the terminal."""
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="bold cyan")
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        row = self._row
        spent = phases(row)
        whole = sum(spent.values())
        largest = sorted(spent, key=lambda name: -spent[name])[:SHOWN_PHASES]
        rows = {
            "run": [self.name, self._position(), duration(self._clock() - self._began)],
            "step": self._fields(row) if row else ["(after the first step)"],
            "evaluation": [*self._evaluated.values()],
            **{
                name: [
                    text.format(number(row[metric]) if "{}" in text else row[metric])
                    for metric, text in texts.items()
                    if metric in row
                ]
                for name, texts in ROWS.items()
            },
            "time": [f"{name} {spent[name] / whole:.0%}" for name in largest if whole],
        }
        for name, parts in rows.items():
            if parts:
                table.add_row(name, Text(printable("  ".join(parts))))
        for notice in self._notices:
            table.add_row(Text("LOOKS WRONG", style="bold red"), Text(printable(notice)))
        return table
