"""benchmarks/gpu.sh on the CPU, from a machine that has torch and nothing of ours.

With --full each section runs; in every run of the tests sections that fail, and the bundle's limit.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.utils import canonicalize_name

from tests.bare_machine import make_environment, with_requirements, write_wheel
from tests.integration.failing_sections import NAMES

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
FAILING = Path(__file__).with_name("failing_sections.py")
SECTIONS = [
    "attention", "head", "step", "experts", "memory", "ceilings", "training toy", "sharing",
    "kernels", "head alone", "engine", "handles", "runs", "groups", "ranks",
]  # fmt: skip
WHOLE_RUNS = {
    "runs": [
        "runs: again differs from the first",
        "runs: colocated differs from the first",
        "runs: killed differs from the first",
        "runs: mean log-prob gap of the worst step",
    ],
    "ranks": [
        "ranks: weights of 'again' differ from the first",
        "ranks: weights of 'one sender' differ from the first",
        "ranks: weights of 'killed' differ from the first",
        "ranks: weights of 'an engine killed' differ from the first",
        "ranks: mean log-prob gap of 'tensor'",
        "ranks: mean log-prob gap of 'pipeline'",
        "ranks: mean log-prob gap of 'data'",
        "ranks: engines that were not started again",
    ],
}
ENDS_S = 1500.0  # on a quiet machine it takes less than two minutes
MOST_BYTES = 64 << 20

pytestmark = pytest.mark.timeout(1800)


def wheels_of_the_script() -> set[str]:
    listed = re.search(r"^wheels=\((.*)\)$", SCRIPT.read_text(), re.MULTILINE)
    assert listed
    return set(listed[1].split())


# a package of the list may be missing there although another one needs it
THERE = with_requirements(["torch", "transformers", "pip"]) - wheels_of_the_script()


def environment(**variables: str) -> dict[str, str]:
    """The shell's own, with nothing that would find this checkout's packages."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that --prepare makes, with wheels of the packages that are installed here."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "wheels").mkdir()
    for name in wheels_of_the_script():
        write_wheel(name, folder / "wheels")
    command = [sys.executable, ROOT / "benchmarks/gpu.py", "--toy", "--write-references", folder]
    subprocess.run(command, check=True, timeout=ENDS_S, env=environment(PYTHONPATH=str(ROOT)))
    return folder


@pytest.fixture(scope="module")
def report(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of all sections."""
    folder = tmp_path_factory.mktemp("bare")
    python = make_environment(folder / "environment", THERE)
    result = folder / "gpu.json"
    done = subprocess.run(
        [SCRIPT, "--bundle", bundle, "--toy", "--json", result],
        env=environment(PYTHON=str(python)),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=ENDS_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.mark.full
def test_every_section_ends_and_its_checks_hold(report: dict[str, Any]) -> None:
    assert list(report["sections"]) == SECTIONS
    for name, section in report["sections"].items():
        assert "error" not in section, name
        assert section["checks"] or section["numbers"], name
        assert all(check["ok"] for check in section["checks"]), name
    for name in ("step", "experts"):
        carried = report["sections"][name]["numbers"]["the CPU's results"]
        assert carried == "computed beforehand", name


@pytest.mark.full
def test_a_machine_that_lacks_packages_of_whole_runs_makes_none(report: dict[str, Any]) -> None:
    for name in ("runs", "ranks"):
        missing = report["sections"][name]["numbers"]["not made, for want of"]
        assert "aiohttp" in missing
        assert "xxhash" not in missing


@pytest.mark.full
@pytest.mark.parametrize("section", WHOLE_RUNS)
def test_whole_runs_with_all_packages(section: str, tmp_path: Path) -> None:
    result = tmp_path / "gpu.json"
    command = [SCRIPT, "--toy", "--only", section, "--json", result]
    done = subprocess.run(
        command, env=environment(PYTHON=sys.executable), cwd=tmp_path, capture_output=True,
        text=True, timeout=ENDS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    checks = json.loads(result.read_text())["sections"][section]["checks"]
    assert [check["name"] for check in checks if check["ok"]] == WHOLE_RUNS[section]


@pytest.mark.full
def test_a_late_reader_meets_the_race_only_in_shared_buffers(report: dict[str, Any]) -> None:
    numbers = report["sections"]["handles"]["numbers"]
    assert numbers["late reader, memory of its own"] == 0
    assert numbers["late reader, the buffers"] > 0


@pytest.mark.full
def test_the_wheels_are_what_the_sections_import(report: dict[str, Any]) -> None:
    modules = {name for section in report["sections"].values() for name in section["modules"]}
    packages = packages_distributions()
    imported = {canonicalize_name(each) for name in modules for each in packages.get(name, ())}
    assert imported - THERE == wheels_of_the_script()


@pytest.mark.full
def test_the_wheels_are_small(bundle: Path) -> None:
    assert sum(wheel.stat().st_size for wheel in (bundle / "wheels").iterdir()) < MOST_BYTES


def test_a_bundle_that_is_too_large_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/usr/bin/env bash\ncase "$*" in\n*download*)'
        f' truncate -s {MOST_BYTES + 1} "$BUNDLE/wheels/large.whl" ;;\n*) echo 1.0 ;;\nesac\n'
    )
    python.chmod(0o755)
    target = tmp_path / "bundle"
    done = subprocess.run(
        [SCRIPT, "--prepare", target],
        env=environment(PYTHON=str(python), BUNDLE=str(target)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"expected at most {MOST_BYTES}: take packages out" in done.stderr


def test_a_section_ends_with_the_program(tmp_path: Path) -> None:
    number = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, FAILING, "--toy", "--only", "hangs"],
        env=environment(PYTHONPATH=str(ROOT), HANGS_S="3600", PID_FILE=str(number)),
    )
    try:
        wait_for(number)
        process.terminate()
        assert process.wait(60.0) == 128 + signal.SIGTERM
        assert not psutil.pid_exists(int(number.read_text()))
    finally:
        process.kill()
        process.wait()


def wait_for(path: Path) -> None:
    ends = time.monotonic() + 300.0
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < ends, f"{path} was not written"
        time.sleep(0.05)


def test_a_section_that_fails_leaves_the_others(tmp_path: Path) -> None:
    result = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, FAILING, "--toy", "--json", result],
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=ENDS_S,
    )
    assert done.returncode == 1, done.stderr[-4000:]
    assert "not finished: raises, hangs, is killed" in done.stdout
    assert "ValueError: on purpose" in done.stderr
    sections = json.loads(result.read_text())["sections"]
    errors = {name: section.get("error") for name, section in sections.items()}
    assert list(errors) == list(NAMES)
    assert errors == {
        "works": None,
        "raises": "exit code 1, see above",
        "hangs": "no end within 3 s",
        "is killed": "exit code -9, see above",
        "looks back": None,
    }
    assert sections["works"]["numbers"] == {"a number": 7.0}
    # while a section ran, the file held all before it
    assert sections["looks back"]["numbers"]["before"] == list(NAMES[:-1])
    assert sections["looks back"]["numbers"]["written"] == {"a number": 7.0}
