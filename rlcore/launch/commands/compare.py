"""`rlcore compare A B`: what differs between two runs, and the step where their metrics part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.algorithms.metric_table import METRICS
from rlcore.config.yaml_settings import read_file, settings
from rlcore.errors import DataError
from rlcore.runs.directory import RunDirectory
from rlcore.runs.files import read_json_lines
from rlcore.runs.metrics import read_metrics
from rlcore.terminal import printable
from rlcore.tracking.format import number

MAX_SHOWN = 12  # metrics that are printed
ABSENT = "(absent)"
START = ("rlcore", "commit", "python", "platform", "gpus")

Pair = tuple[Any, Any]
Rows = Mapping[int, Mapping[str, Any]]


def compare_runs(a: Path, b: Path, *, tolerance: float, as_json: bool) -> int:
    """Print what differs; return 0 if nothing does, else 1.

    Raises:
        DataError: one of them is no run.
    """
    found = compare(RunDirectory(a), RunDirectory(b), tolerance)
    if as_json:
        print(json.dumps(_in_json(found), indent=2, allow_nan=False))
    else:
        for line in _described(found, a.name, b.name, tolerance):
            print(printable(line))
    return int(found["differs"])


def compare(a: RunDirectory, b: RunDirectory, tolerance: float) -> dict[str, Any]:
    """Compare two runs, which may be going on.

    Returns:
        Pairs of values by name for `config`, `environment` and `data`; the last `steps`; and the
        first steps at which metrics part at all (`exact`) and by more than the tolerance
        (`beyond`), None where they do not.
    """
    for run in (a, b):
        if not run.config_path.is_file():
            raise DataError(
                f"{run.path} is no run: it has no config.yaml; give folders, as runs/NAME"
            )
    notes: list[str] = []
    environment: dict[str, Pair] = {}
    data: dict[str, Pair] = {}
    starts = [read_json_lines(run.environment_path) for run in (a, b)]
    if all(starts):
        one, other = (its[-1] for its in starts)
        environment = _different(
            {key: one[key] for key in START if key in one},
            {key: other[key] for key in START if key in other},
        )
        packages = _different(one.get("packages", {}), other.get("packages", {}))
        environment |= {f"packages.{key}": pair for key, pair in packages.items()}
        data = _different(one["data"], other["data"])
    else:
        lacking = ", ".join(str(run.path) for run, its in zip((a, b), starts) if not its)
        notes.append(f"no record of packages and data: {lacking}")
    config = _different_settings(a.config_path, b.config_path)
    rows, others = ({row["step"]: row for row in read_metrics(run.metrics_path)} for run in (a, b))
    steps = (max(rows, default=0), max(others, default=0))
    exact = _divergence(rows, others, 0.0)
    return {
        "config": config,
        "environment": environment,
        "data": data,
        "steps": steps,
        "common_steps": len(rows.keys() & others.keys()),
        "exact": exact,
        "beyond": _divergence(rows, others, tolerance),
        "notes": notes,
        "differs": bool(config or environment or data or exact or steps[0] != steps[1]),
    }


def _different_settings(a: Path, b: Path) -> dict[str, Pair]:
    """Return the keys whose values differ, each value with the origin that stands behind it."""
    values: list[dict[str, str]] = []
    shown: list[dict[str, str]] = []
    for path in (a, b):
        lines = path.read_text(encoding="utf-8").splitlines()
        values.append({})
        shown.append({})
        for keys, setting in settings(read_file(path)):
            name = ".".join(keys)
            value = json.dumps(setting.value)
            line = lines[int(setting.origin.rpartition(":")[2]) - 1]
            _, mark, origin = line.rpartition("  # ")
            values[-1][name] = value
            shown[-1][name] = f"{value}  ({origin})" if mark else value
    return {
        name: (shown[0].get(name, ABSENT), shown[1].get(name, ABSENT))
        for name in _different(*values)
        if name != "run.name"
    }


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    pairs = {key: (a.get(key, ABSENT), b.get(key, ABSENT)) for key in dict.fromkeys([*a, *b])}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _divergence(a: Rows, b: Rows, tolerance: float) -> dict[str, Any] | None:
    """Return the first step at which metrics differ, with those that do, the farthest first."""
    for step in sorted(a.keys() & b.keys()):
        pairs = {
            name: (a[step].get(name, ABSENT), b[step].get(name, ABSENT))
            for name in dict.fromkeys([*a[step], *b[step]])
            if not _is_time(name)
        }
        apart = {name: gap for name, pair in pairs.items() if (gap := _gap(*pair)) > tolerance}
        if apart:
            names = sorted(apart, key=lambda name: -apart[name])
            return {"step": step, "metrics": {name: pairs[name] for name in names}}
    return None


def _is_time(name: str) -> bool:
    spec = METRICS.get(name)
    is_seconds = name.endswith("_s") or (spec is not None and spec.unit == "s")
    return name.startswith(("time/", "perf/")) or is_seconds


def _gap(a: Any, b: Any) -> float:
    """Return the difference of two values by the larger of them; infinite if one is absent."""
    if ABSENT in (a, b):
        return math.inf
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    gap = abs(a - b) / max(abs(a), abs(b))
    return math.inf if math.isnan(gap) else gap


def _described(found: Mapping[str, Any], a: str, b: str, tolerance: float) -> Iterator[str]:
    """Yield what a person reads."""
    yield f"A  {a}: {found['steps'][0]} steps"
    yield f"B  {b}: {found['steps'][1]} steps"
    yield from found["notes"]
    for key in ("config", "environment", "data"):
        pairs = found[key]
        title = "configuration" if key == "config" else key
        yield f"{title}: {f'{len(pairs)} differ' if pairs else 'the same'}"
        for name, (one, other) in pairs.items():
            yield from (f"  {name}", f"    A  {one}", f"    B  {other}")
    if not found["common_steps"]:
        yield "metrics: no step is in both"
        return
    titles = {"exact": "metrics, exactly", "beyond": f"metrics, beyond {tolerance:g} of their size"}
    for key, title in titles.items():
        parted = found[key]
        if parted is None:
            yield f"{title}: the same in all {found['common_steps']} steps of both (times aside)"
            continue
        metrics = parted["metrics"]
        yield f"{title}: they part at step {parted['step']}, {len(metrics)} of them"
        shown = [*metrics.items()][:MAX_SHOWN]
        width = max(len(name) for name, _ in shown)
        for name, pair in shown:
            yield f"  {name:<{width}}  " + "  ".join(_short(*pair))
        if len(metrics) > MAX_SHOWN:
            yield f"  and {len(metrics) - MAX_SHOWN} more"


def _in_json(value: Any) -> Any:
    """Return a value without numbers that JSON does not have: they become text."""
    if isinstance(value, dict):
        return {key: _in_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short(a: Any, b: Any) -> tuple[str, str]:
    """Return both values as short as they can be distinguished."""
    if isinstance(a, str) or isinstance(b, str):
        return str(a), str(b)
    short = (number(a), number(b))
    return short if short[0] != short[1] else (repr(a), repr(b))
