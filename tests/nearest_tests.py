"""Which files of tests run a line: recorded, and chosen by their distance from the source."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from mutations import Mutation

ROOT = Path(__file__).resolve().parents[1]
RECORDING = ROOT / "build" / "mutate.json"
FOLDERS = ("unit", "nccl_rules", "parity", "checkpoint", "integration")
ABOUT_SOURCES = ("test_mutants.py", "test_mutate.py", "test_backend_mutants.py", "test_house.py")


@cache
def digest(file: str) -> str:
    """Return a short hash of a file of the checkout."""
    path = ROOT / file
    return hashlib.sha1(path.read_bytes()).hexdigest()[:8] if path.is_file() else ""


def read_lines(path: Path) -> dict[str, set[int]]:
    """Return the recorded lines of each file."""
    covered: dict[str, set[int]] = {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        file, _, number = line.rpartition(":")
        covered.setdefault(file, set()).add(int(number))
    return covered


@cache
def files_of_tests() -> list[str]:
    """Return every file of tests that may be chosen."""
    return [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))
        if path.name not in ABOUT_SOURCES
    ]


def nearness(source: str, test: str) -> int:
    """Return how many words the paths of a file and of its tests have in common."""
    own = set(Path(source).with_suffix("").parts)
    words = {*Path(test).parent.parts, Path(test).stem.removeprefix("test_")}
    return 2 * len(own & words) + test.startswith("tests/unit")


@cache
def near(source: str) -> list[str]:
    """Return the files of unit tests in the folder that mirrors that of a source file."""
    tests = [test for test in files_of_tests() if test.startswith("tests/unit")]
    folder = str(Path(source).parent / "_.py")
    most = max(nearness(folder, str(Path(test).parent / "_.py")) for test in tests)
    stem = Path(source).stem
    return [
        test
        for test in tests
        if nearness(folder, str(Path(test).parent / "_.py")) == most or stem in Path(test).stem
    ]


def read_recording() -> dict[str, Any]:
    """Return what is recorded of the files of tests that are as they were."""
    lines = RECORDING.read_text().splitlines() if RECORDING.exists() else []
    entries = {entry["test"]: entry for entry in map(json.loads, lines)}
    return {test: entry for test, entry in entries.items() if entry["hash"] == digest(test)}


def covering(mutation: Mutation, recording: dict[str, Any]) -> list[str]:
    """Return the files of tests that run a mutation's lines, nearest and quickest first.

    Of a source file that has changed since, every file of tests counts that ran any line of it.
    """
    first, last = mutation.lines
    found = []
    for test, entry in recording.items():
        known, *lines = entry["lines"].get(mutation.file, ["never"])
        moved = known not in ("never", digest(mutation.file))
        if entry["ended"] and (moved or any(first <= line <= last for line in lines)):
            found.append((-nearness(mutation.file, test), entry["cpu"], test))
    return [test for *_, test in sorted(found)]
