"""The table at the end of a run, made from metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.tracking.format import (
    LOSS,
    REWARD,
    TOKENS_PER_SECOND,
    curve,
    duration,
    evaluated_sets,
    number,
    of_set,
)

# Totals, a part of generation, and work outside training are not phases of a step.
NOT_PHASES = frozenset(
    {"time/start", "time/step", "time/from_scratch", "time/engine", "time/checkpoint_write"}
)


@dataclass(frozen=True)
class RunSummary:
    """A summary of a run's metrics; None for a metric that the run does not have."""

    steps: int
    reward_first: float | None = None
    reward_last: float | None = None
    accuracy_before: float | None = None  # the first and the last evaluation
    accuracy_after: float | None = None
    # The training samples that were scored, and those whose reward failed.
    scored: int = 0
    reward_failures: int = 0
    # Score and accuracy of each evaluation set, as "aime24 score": before and after.
    evaluations: dict[str, tuple[float, float]] = field(default_factory=dict)
    loss_first: float | None = None
    loss_last: float | None = None
    tokens_per_second: float | None = None  # median over steps
    seconds: float = 0.0  # of all phases
    seconds_by_phase: dict[str, float] = field(default_factory=dict)  # largest first


def summarize(rows: Sequence[Mapping[str, Any]]) -> RunSummary:
    """Sum up the rows of a metrics file (`rlcore.runs.metrics.read_metrics`)."""
    phases: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("time/") and name not in NOT_PHASES:
                phase = name.removeprefix("time/")
                phases[phase] = phases.get(phase, 0.0) + value
    speeds = sorted(curve(rows, TOKENS_PER_SECOND)[1])
    rewards = curve(rows, REWARD)[1]
    losses = curve(rows, LOSS)[1]
    accuracies = curve(rows, ("eval/accuracy",))[1]
    return RunSummary(
        steps=max((int(row["step"]) for row in rows), default=0),
        reward_first=_at(rewards, 0),
        reward_last=_at(rewards, -1),
        accuracy_before=_at(accuracies, 0),
        accuracy_after=_at(accuracies, -1),
        scored=_total(rows, "rollout/scored_samples"),
        reward_failures=_total(rows, "rollout/reward_errors", "rollout/reward_timeouts"),
        evaluations=_evaluations(rows),
        loss_first=_at(losses, 0),
        loss_last=_at(losses, -1),
        tokens_per_second=_at(speeds, len(speeds) // 2),
        seconds=sum(phases.values()),
        seconds_by_phase=dict(sorted(phases.items(), key=lambda item: -item[1])),
    )


def format_report(
    summary: RunSummary, *, title: str = "", result: Mapping[str, Any] | None = None
) -> str:
    """Format the summary as a table; `result` is the content of result.json."""
    rows: list[tuple[str, str]] = []
    if result is not None:
        reason = f" ({result['reason']})" if result.get("reason") else ""
        rows.append(("status", f"{result['status']}{reason}"))
    rows.append(("steps", str(summary.steps)))
    for name, (before, after) in summary.evaluations.items():
        rows += _change(f"eval {name}", before, after)
    rows += _change("reward", summary.reward_first, summary.reward_last)
    if summary.reward_failures:
        failed = f"{summary.reward_failures}"
        if summary.scored:
            share = summary.reward_failures / summary.scored
            failed += f" of {summary.scored} samples ({share:.2%}), see reward.on_error"
        rows.append(("reward failed", failed))
    if summary.reward_last is None:
        rows += _change("loss", summary.loss_first, summary.loss_last)
    if summary.tokens_per_second is not None:
        rows.append(("tokens/s, median", number(summary.tokens_per_second)))
    if summary.seconds:
        rows.append(("time", duration(summary.seconds)))
        for phase, seconds in summary.seconds_by_phase.items():
            rows.append((f"  {phase}", f"{duration(seconds):>8}  {seconds / summary.seconds:4.0%}"))
    width = max(len(name) for name, _ in rows)
    body = [f"{name:<{width}}  {value}" for name, value in rows]
    rule = "-" * max(len(line) for line in [*body, title])
    return "\n".join([*([title] if title else []), rule, *body, rule])


def _change(name: str, before: float | None, after: float | None) -> list[tuple[str, str]]:
    if before is None or after is None:
        return []
    sign = "+" if after >= before else ""
    return [(name, f"{number(before)} -> {number(after)}  ({sign}{number(after - before)})")]


def _total(rows: Sequence[Mapping[str, Any]], *names: str) -> int:
    return int(sum(row.get(name, 0) for row in rows for name in names))


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    names = dict.fromkeys(name for row in rows for name in evaluated_sets(row))
    found: dict[str, tuple[float, float]] = {}
    for name in names:
        for metric in ("score", "accuracy"):
            values = curve(rows, (of_set(name, metric),))[1]
            if values:
                found[f"{name} {metric}".strip()] = (values[0], values[-1])
    return found


def _at(values: Sequence[float], index: int) -> float | None:
    return values[index] if values else None
