"""`rlcore compare A B`: differences of two runs, and the step where their metrics diverge."""

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

Pairs = dict[str, tuple[Any, Any]]
Rows = Mapping[int, Mapping[str, Any]]


def compare_runs(a: Path, b: Path, *, tolerance: float) -> int:
    """Print the differences of two runs, which may be running; return 1 if there are any.

    Raises:
        DataError: a folder is not a run.
    """
    runs = (RunDirectory(a), RunDirectory(b))
    for run in runs:
        if not run.config_path.is_file():
            raise DataError(
                f"{run.path} is not a run: it has no config.yaml; give folders, as runs/NAME"
            )
    rows, others = ({row["step"]: row for row in read_metrics(run.metrics_path)} for run in runs)
    steps = (max(rows, default=0), max(others, default=0))
    differs = steps[0] != steps[1] or _divergence(rows, others, 0.0) is not None
    lines = [f"{name}  {run.name}: {last} steps" for name, run, last in zip("AB", (a, b), steps)]
    sections = {"configuration": _different_settings(a, b)}
    starts = [read_json_lines(run.environment_path) for run in runs]
    lacking = [str(run.path) for run, found in zip(runs, starts) if not found]
    if lacking:
        lines.append(f"no record of packages and data: {', '.join(lacking)}")
    else:
        newest, other = (found[-1] for found in starts)
        sections["environment"] = _different(_environment(newest), _environment(other))
        sections["data"] = _different(newest["data"], other["data"])
    for title, pairs in sections.items():
        differs |= bool(pairs)
        lines.append(f"{title}: {f'{len(pairs)} differ' if pairs else 'the same'}")
        for name, (mine, theirs) in pairs.items():
            lines += [f"  {name}", f"    A  {mine}", f"    B  {theirs}"]
    for line in (*lines, *_described_metrics(rows, others, tolerance)):
        print(printable(line))
    return int(differs)


def _environment(start: Mapping[str, Any]) -> dict[str, Any]:
    packages = {f"packages.{name}": version for name, version in start["packages"].items()}
    return {key: start[key] for key in START if key in start} | packages


def _different_settings(a: Path, b: Path) -> Pairs:
    """Return the keys whose values differ, each value followed by its origin."""
    values: tuple[dict[str, str], dict[str, str]] = ({}, {})
    shown: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for run, own, with_origin in zip((a, b), values, shown):
        path = RunDirectory(run).config_path
        lines = path.read_text(encoding="utf-8").splitlines()
        for keys, setting in settings(read_file(path)):
            name = ".".join(keys)
            own[name] = json.dumps(setting.value)
            _, mark, origin = lines[int(setting.origin.rpartition(":")[2]) - 1].rpartition("  # ")
            with_origin[name] = f"{own[name]}  ({origin})" if mark else own[name]
    names = _different(*values).keys() - {"run.name"}
    return {name: pair for name, pair in _different(*shown).items() if name in names}


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    pairs = {key: (a.get(key, ABSENT), b.get(key, ABSENT)) for key in dict.fromkeys([*a, *b])}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _divergence(a: Rows, b: Rows, tolerance: float) -> tuple[int, Pairs] | None:
    """Return the first step at which metrics differ, and these metrics, largest gap first."""
    for step in sorted(a.keys() & b.keys()):
        different = _different(a[step], b[step])
        gaps = {name: _gap(*pair) for name, pair in different.items() if not _is_time(name)}
        apart = sorted((name for name in gaps if gaps[name] > tolerance), key=lambda n: -gaps[n])
        if apart:
            return step, {name: different[name] for name in apart}
    return None


def _is_time(name: str) -> bool:
    spec = METRICS.get(name)
    is_seconds = name.endswith("_s") or (spec is not None and spec.unit == "s")
    return name.startswith(("time/", "perf/")) or is_seconds


def _gap(a: Any, b: Any) -> float:
    """Return the difference relative to the larger value; infinite if a value is absent."""
    if ABSENT in (a, b):
        return math.inf
    if math.isnan(a) and math.isnan(b):
        return 0.0
    gap = abs(a - b) / max(abs(a), abs(b))
    return math.inf if math.isnan(gap) else gap


def _described_metrics(a: Rows, b: Rows, tolerance: float) -> Iterator[str]:
    common = len(a.keys() & b.keys())
    if not common:
        yield "metrics: no step is in both"
        return
    for limit, title in ((0.0, "exactly"), (tolerance, f"beyond {tolerance:g} of their size")):
        found = _divergence(a, b, limit)
        if found is None:
            yield f"metrics, {title}: the same in all {common} steps of both (times aside)"
            continue
        step, metrics = found
        yield f"metrics, {title}: they diverge at step {step}, {len(metrics)} of them"
        shown = [*metrics.items()][:MAX_SHOWN]
        width = max(len(name) for name, _ in shown)
        for name, pair in shown:
            yield f"  {name:<{width}}  " + "  ".join(_short(*pair))
        if len(metrics) > MAX_SHOWN:
            yield f"  and {len(metrics) - MAX_SHOWN} more"


def _short(a: Any, b: Any) -> tuple[str, str]:
    """Return both values with the fewest digits that distinguish them."""
    if isinstance(a, str) or isinstance(b, str):
        return str(a), str(b)
    short = (number(a), number(b))
    return short if short[0] != short[1] else (repr(a), repr(b))
