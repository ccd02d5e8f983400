"""The screen of a run: what a person reads at a glance while it goes on, as lines of text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from rlcore.tracking.format import (
    KL,
    LENGTH,
    LOSS,
    REWARD,
    STEP_SECONDS,
    TOKENS_PER_SECOND,
    duration,
    evaluated_sets,
    first,
    number,
    of_set,
)
from rlcore.tracking.report import NOT_PHASES

TREND = 40  # steps of the curve
BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-=+*%#"  # for a terminal that cannot show the others
MOST_PHASES = 5
Line = tuple[str, str]


class Screen:
    """Keeps what the screen shows, and formats it.

    Args:
        bars: eight characters, from low to high.
    """

    def __init__(
        self,
        name: str,
        total_steps: int,
        *,
        bars: str = BARS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.total_steps = total_steps
        self.seconds_left: float | None = None
        self.notices: Sequence[str] = ()
        self._bars = bars
        self._clock = clock
        self._began = clock()
        self._step = 0
        self._row: Mapping[str, float] = {}
        self._curve: deque[float] = deque(maxlen=TREND)
        # of each evaluation set: step and score of the newest, of the best, and of the first
        self._evaluated: dict[str, list[tuple[int, float]]] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the row of a step."""
        self._step = step
        for name in evaluated_sets(metrics):
            score = metrics[of_set(name, "score")]
            kept = self._evaluated.get(name, [])
            best = max([*kept[1:2], (step, score)], key=lambda found: found[1])
            self._evaluated[name] = [(step, score), best]
        if step > 0:
            self._row = metrics
            if (value := first(metrics, REWARD if self._has_reward else LOSS)) is not None:
                self._curve.append(value)

    def lines(self) -> list[Line]:
        """Return name and text of each line."""
        found = [
            ("run", self._position()),
            ("reward" if self._has_reward or not self._row else "loss", self._learning()),
            ("evaluation", self._evaluation()),
            ("rollouts", self._joined(self._rollouts())),
            ("speed", self._joined(self._speed())),
            ("time", self._times()),
            *(("LOOKS WRONG", notice) for notice in self.notices),
        ]
        return [(name, text) for name, text in found if text]

    @property
    def _has_reward(self) -> bool:
        return first(self._row, REWARD) is not None or not self._row

    def _position(self) -> str:
        share = self._step / self.total_steps if self.total_steps else 0.0
        parts = [
            f"{self.name}  step {self._step}/{self.total_steps} ({share:.0%})",
            duration(self._clock() - self._began),
        ]
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        return self._joined(parts)

    def _learning(self) -> str:
        if not self._curve:
            return "(after the first step)"
        parts = [f"{number(self._curve[-1]):<6} {sparkline(self._curve, self._bars)}"]
        if (change := trend(self._curve)) is not None:
            parts.append(f"{'+' if change >= 0 else ''}{number(change)} over {len(self._curve)}")
        for text, names in (
            ("kl {}", KL),
            ("length {}", LENGTH),
            ("entropy {}", ("policy/entropy_avg",)),
        ):
            if (value := first(self._row, names)) is not None:
                parts.append(text.format(number(value)))
        return self._joined(parts)

    def _evaluation(self) -> str:
        parts = []
        for name, ((step, score), (best_step, best)) in self._evaluated.items():
            text = f"{name} {number(score)} (step {step}".lstrip()
            parts.append(
                text + (")" if best_step == step else f"; best {number(best)}, step {best_step})")
            )
        return self._joined(parts)

    def _rollouts(self) -> Iterator[str]:
        row = self._row
        if "rollout/staleness_mean" in row:
            text = f"staleness {number(row['rollout/staleness_mean'])}"
            most = row.get("rollout/staleness_max")
            yield text if most is None else f"{text} (most {most:.0f})"
        if "rollout/zero_std_groups" in row:
            yield f"{row['rollout/zero_std_groups']:.0f} groups without variance"
        failed = row.get("rollout/reward_errors", 0.0) + row.get("rollout/reward_timeouts", 0.0)
        if failed:
            yield f"{failed:.0f} rewards failed"
        for name, text in (("buffered", "ready"), ("in_flight", "in flight")):
            if (value := row.get(f"rollout/{name}_groups")) is not None:
                yield f"{value:.0f} groups {text}"

    def _speed(self) -> Iterator[str]:
        row = self._row
        if (speed := first(row, TOKENS_PER_SECOND)) is not None:
            yield f"{number(speed)} tok/s"
        if (seconds := first(row, STEP_SECONDS)) is not None:
            yield f"{duration(seconds)}/step"
        if (serving := row.get("rollout/engines_serving")) is not None:
            yield f"{serving:.0f} engine{'' if serving == 1 else 's'}"
        for who in ("trainer", "engine"):
            if (idle := row.get(f"perf/{who}_idle_fraction")) is not None:
                yield f"{who} idle {idle:.0%}"
        if (used := row.get("perf/mfu")) is not None:
            yield f"mfu {used:.0%}"

    def _times(self) -> str:
        phases = {
            name.removeprefix("time/"): value
            for name, value in self._row.items()
            if name.startswith("time/") and name not in NOT_PHASES
        }
        whole = sum(phases.values())
        if not whole:
            return ""
        largest = sorted(phases.items(), key=lambda item: -item[1])
        shown = [f"{name} {value / whole:.0%}" for name, value in largest[:MOST_PHASES]]
        if rest := sum(value for _, value in largest[MOST_PHASES:]):
            shown.append(f"other {rest / whole:.0%}")
        return self._joined(shown)

    @staticmethod
    def _joined(parts: Sequence[str] | Iterator[str]) -> str:
        return "  ".join(parts)


def sparkline(values: Sequence[float], bars: str) -> str:
    """Draw values as a row of bars, the lowest as the lowest; what is not finite as "?"."""
    finite = [value for value in values if value - value == 0]
    if not finite:
        return "?" * len(values)
    low = min(finite)
    spread = max(finite) - low
    top = len(bars) - 1
    return "".join(
        "?" if value - value != 0 else bars[round((value - low) / spread * top) if spread else 0]
        for value in values
    )


def trend(values: Sequence[float]) -> float | None:
    """Return by how much a straight line through the values rises; None for fewer than three."""
    count = len(values)
    if count < 3 or any(value - value != 0 for value in values):
        return None
    middle = (count - 1) / 2
    mean = sum(values) / count
    moment = sum((at - middle) * (value - mean) for at, value in enumerate(values))
    return moment / sum((at - middle) ** 2 for at in range(count)) * (count - 1)
