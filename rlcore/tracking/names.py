"""The metrics that people watch first. Each may have several names; the first present counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

REWARD = ("rollout/reward", "objective/scores")
KL = ("objective/kl",)
LOSS = ("loss/policy_avg", "objective/loss")
LENGTH = ("val/sequence_lengths",)
TOKENS_PER_SECOND = ("perf/tokens_per_second",)
STEP_SECONDS = ("time/step",)
ACCURACY = ("eval/accuracy", "eval/score")


def first(metrics: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Return the value of the first of `names` that `metrics` holds."""
    return next((metrics[name] for name in names if name in metrics), None)


def curve(
    rows: Sequence[Mapping[str, float]], names: Sequence[str]
) -> tuple[list[int], list[float]]:
    """Return steps and values of the rows that hold one of `names`."""
    points = [(int(row["step"]), value) for row in rows if (value := first(row, names)) is not None]
    return [step for step, _ in points], [value for _, value in points]
