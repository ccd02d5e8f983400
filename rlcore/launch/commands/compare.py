"""`rlcore compare A B`: what differs between two runs, and the step where their metrics part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlcore.algorithms.metric_table import METRICS
from rlcore.config.yaml_settings import Setting, Tree, read_file
from rlcore.errors import DataError
from rlcore.runs.directory import RunDirectory
from rlcore.runs.environment import read_starts
from rlcore.runs.metrics import read_metrics
from rlcore.terminal import printable
from rlcore.tracking.format import number

SAME = 0
DIFFERENT = 1
TOLERANCE = 1e-3
MOST = 12  # metrics or packages that are printed
ABSENT = "(absent)"
# Of no two runs alike.
TIMES = ("time/", "perf/")
SECONDS = "_s"  # the end of a measured time's name
OWN = ("run.name",)
START = ("rlcore", "commit", "python", "platform", "gpus")

Pair = tuple[Any, Any]


@dataclass
class Parting:
    """The first step at which two runs' metrics differ, with those that do, the farthest first."""

    step: int
    metrics: dict[str, Pair] = field(default_factory=dict)


@dataclass
class Comparison:
    """What differs between two runs; empty where nothing does.

    Attributes:
        config: value and origin in each run, by key.
        environment: of the newest start, by what differs; `packages.NAME` for versions.
        common_steps: steps that both have in their metrics.
        exact: where the metrics part at all.
        beyond: where one parts by more than the tolerance.
    """

    config: dict[str, Pair] = field(default_factory=dict)
    environment: dict[str, Pair] = field(default_factory=dict)
    data: dict[str, Pair] = field(default_factory=dict)
    steps: Pair = (0, 0)
    common_steps: int = 0
    exact: Parting | None = None
    beyond: Parting | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """Whether anything does."""
        return bool(
            self.config
            or self.environment
            or self.data
            or self.exact
            or self.steps[0] != self.steps[1]
        )


def compare_runs(a: Path, b: Path, *, tolerance: float, as_json: bool) -> int:
    """Print what differs; return 0 if nothing does, else 1.

    Raises:
        DataError: one of them is no run.
    """
    found = compare(a, b, tolerance=tolerance)
    if as_json:
        whole = {**asdict(found), "differs": found.differs}
        print(json.dumps(_in_json(whole), indent=2, allow_nan=False))
    else:
        for line in describe(found, a.name, b.name, tolerance=tolerance):
            print(printable(line))
    return DIFFERENT if found.differs else SAME


def compare(a: Path, b: Path, *, tolerance: float = TOLERANCE) -> Comparison:
    """Compare two runs, which may be going on."""
    for path in (a, b):
        if not RunDirectory(path).config_path.is_file():
            raise DataError(f"{path} is no run: it has no config.yaml; give folders, as runs/NAME")
    runs = (RunDirectory(a), RunDirectory(b))
    found = Comparison()
    settings = (_settings(runs[0].config_path), _settings(runs[1].config_path))
    found.config = {key: (str(a), str(b)) for key, (a, b) in _different(*settings).items()}
    _compare_starts(found, runs)
    rows = [{row["step"]: row for row in read_metrics(run.metrics_path)} for run in runs]
    found.steps = (max(rows[0], default=0), max(rows[1], default=0))
    common = sorted(rows[0].keys() & rows[1].keys())
    found.common_steps = len(common)
    found.exact = _parting(rows[0], rows[1], common, 0.0)
    found.beyond = _parting(rows[0], rows[1], common, tolerance)
    return found


# --- configuration, packages, data ----------------------------------------------------------------


@dataclass(frozen=True)
class _Told:
    """A value as text, and where it comes from, which does not count in a comparison."""

    value: str
    origin: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.value}  ({self.origin})" if self.origin else self.value


def _settings(path: Path) -> dict[str, _Told]:
    """Return each key but the run's own with its value, whose origin stands behind it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = {}
    for key, setting in _leaves(read_file(path), ""):
        line = lines[int(setting.origin.rpartition(":")[2]) - 1]
        _, mark, origin = line.rpartition("  # ")
        if key not in OWN:
            found[key] = _Told(json.dumps(setting.value), origin if mark else "")
    return found


def _leaves(tree: Tree, path: str) -> Iterator[tuple[str, Setting]]:
    for key, value in tree.items():
        if isinstance(value, Setting):
            yield f"{path}{key}", value
        else:
            yield from _leaves(value, f"{path}{key}.")


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    pairs = {key: (a.get(key, ABSENT), b.get(key, ABSENT)) for key in dict.fromkeys([*a, *b])}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _compare_starts(found: Comparison, runs: Sequence[RunDirectory]) -> None:
    starts = [read_starts(run.environment_path) for run in runs]
    if not all(starts):
        lacking = ", ".join(str(run.path) for run, its in zip(runs, starts) if not its)
        found.notes.append(f"no record of packages and data: {lacking}")
        return
    a, b = (its[-1] for its in starts)
    whole = [{key: its[key] for key in START if key in its} for its in (a, b)]
    found.environment = _different(*whole)
    for key, pair in _different(a.get("packages", {}), b.get("packages", {})).items():
        found.environment[f"packages.{key}"] = pair
    found.data = _different(a["data"], b["data"])


# --- metrics --------------------------------------------------------------------------------------


def _parting(
    a: Mapping[int, Mapping[str, Any]],
    b: Mapping[int, Mapping[str, Any]],
    steps: Sequence[int],
    tolerance: float,
) -> Parting | None:
    for step in steps:
        apart = {
            name: gap
            for name in dict.fromkeys([*a[step], *b[step]])
            if not _is_time(name)
            and (gap := _gap(a[step].get(name), b[step].get(name))) > tolerance
        }
        if apart:
            names = sorted(apart, key=lambda name: -apart[name])
            return Parting(
                step,
                {name: (a[step].get(name, ABSENT), b[step].get(name, ABSENT)) for name in names},
            )
    return None


def _is_time(name: str) -> bool:
    spec = METRICS.get(name)
    is_seconds = name.endswith(SECONDS) or (spec is not None and spec.unit == "s")
    return name.startswith(TIMES) or is_seconds


def _gap(a: float | None, b: float | None) -> float:
    """Return the difference of two values by the larger of them; infinite if one is absent."""
    if a is None or b is None:
        return math.inf
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    gap = abs(a - b) / max(abs(a), abs(b))
    return math.inf if math.isnan(gap) else gap


# --- as text --------------------------------------------------------------------------------------


def describe(found: Comparison, a: str, b: str, *, tolerance: float) -> Iterator[str]:
    """Yield what a person reads."""
    yield f"A  {a}: {found.steps[0]} steps"
    yield f"B  {b}: {found.steps[1]} steps"
    yield from found.notes
    for title, pairs in (
        ("configuration", found.config),
        ("environment", found.environment),
        ("data", found.data),
    ):
        yield f"{title}: {'the same' if not pairs else f'{len(pairs)} differ'}"
        for name, (one, other) in pairs.items():
            yield f"  {name}"
            yield f"    A  {one}"
            yield f"    B  {other}"
    if not found.common_steps:
        yield "metrics: no step is in both"
        return
    for title, parting in (
        ("metrics, exactly", found.exact),
        (f"metrics, beyond {tolerance:g} of their size", found.beyond),
    ):
        if parting is None:
            yield f"{title}: the same in all {found.common_steps} steps of both (times aside)"
            continue
        yield f"{title}: they part at step {parting.step}, {len(parting.metrics)} of them"
        width = max(map(len, [*parting.metrics][:MOST]))
        for name, pair in [*parting.metrics.items()][:MOST]:
            yield f"  {name:<{width}}  " + "  ".join(_shown(*pair))
        if len(parting.metrics) > MOST:
            yield f"  and {len(parting.metrics) - MOST} more"


def _in_json(value: Any) -> Any:
    """Return a value without numbers that JSON does not have: they become text."""
    if isinstance(value, dict):
        return {key: _in_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _shown(a: Any, b: Any) -> tuple[str, str]:
    """Return both values as short as they can be told apart."""
    if isinstance(a, str) or isinstance(b, str):
        return str(a), str(b)
    short = (number(a), number(b))
    return short if short[0] != short[1] else (repr(a), repr(b))
