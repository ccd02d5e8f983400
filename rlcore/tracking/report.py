"""The table at the end of a run, made from metrics.jsonl."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
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


def phases(row: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of a step."""
    return {
        name.removeprefix("time/"): value
        for name, value in row.items()
        if name.startswith("time/") and name not in NOT_PHASES
    }


def format_report(
    rows: Sequence[Mapping[str, Any]], *, result: Mapping[str, Any] | None = None
) -> str:
    """Format a table of the rows of a metrics file (`rlcore.runs.metrics.read_metrics`).

    Args:
        result: the content of result.json.
    """
    lines: list[tuple[str, str]] = []
    if result is not None:
        reason = f" ({result['reason']})" if result.get("reason") else ""
        lines.append(("status", f"{result['status']}{reason}"))
    lines.append(("steps", str(max((int(row["step"]) for row in rows), default=0))))
    for name in dict.fromkeys(name for row in rows for name in evaluated_sets(row)):
        for metric in ("score", "accuracy"):
            label = " ".join(filter(None, ("eval", name, metric)))
            lines += _change(label, curve(rows, (of_set(name, metric),))[1])
    rewards = curve(rows, REWARD)[1]
    lines += _change("reward", rewards)
    failed = _total(rows, "rollout/reward_errors", "rollout/reward_timeouts")
    scored = _total(rows, "rollout/scored_samples")
    if failed:
        share = ""
        if scored:
            share = f" of {scored} samples ({failed / scored:.2%}), see reward.on_error"
        lines.append(("reward failed", f"{failed}{share}"))
    if not rewards:
        lines += _change("loss", curve(rows, LOSS)[1])
    if speeds := sorted(curve(rows, TOKENS_PER_SECOND)[1]):
        lines.append(("tokens/s, median", number(speeds[len(speeds) // 2])))
    spent: dict[str, float] = defaultdict(float)
    for row in rows:
        for phase, seconds in phases(row).items():
            spent[phase] += seconds
    if whole := sum(spent.values()):
        lines.append(("time", duration(whole)))
        for phase, seconds in sorted(spent.items(), key=lambda item: -item[1]):
            lines.append((f"  {phase}", f"{duration(seconds):>8}  {seconds / whole:4.0%}"))
    width = max(len(name) for name, _ in lines)
    body = [f"{name:<{width}}  {value}" for name, value in lines]
    rule = "-" * max(map(len, body))
    return "\n".join([rule, *body, rule])


def _change(name: str, values: Sequence[float]) -> list[tuple[str, str]]:
    if not values:
        return []
    before = values[0]
    after = values[-1]
    sign = "+" if after >= before else ""
    return [(name, f"{number(before)} -> {number(after)}  ({sign}{number(after - before)})")]


def _total(rows: Sequence[Mapping[str, Any]], *names: str) -> int:
    return int(sum(row.get(name, 0) for row in rows for name in names))
