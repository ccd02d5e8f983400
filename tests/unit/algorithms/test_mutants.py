"""Defects of tests/mutant_table.py turn tests red: a dozen here, all of them with --full."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlcore.algorithms.registry import _ESTIMATORS, _POLICY_LOSSES

ROOT = Path(__file__).parents[3]
RUNNER = ROOT / "tests" / "mutants.py"
TABLE = ROOT / "tests" / "mutant_table.py"

DOZEN = [
    "reward on the first token",
    "KL scaled in place",
    "the value behind the last token is that of the next sequence",
    "the critic's targets leave out the KL",
    "n in place of n - 1 in the std",
    "groups by position",
    "one-pass whitening",
    "clip bounds swapped",
    "clamp after exp",
    "token-mean by sequences",
    "a mean of micro-batch means",
    "staleness off by one",
]

# Each would be a hole in the runner, but for the last: a harmless change, a stale row, tests of
# other code, a crash.
HOLES = r"""
KL, KL_TEST = "rlcore/algorithms/kl.py", "test_kl.py::test_table"
MUTANTS = [
    ("harmless", KL, "Estimates of KL(policy || reference)", "Estimations of KL(policy)", KL_TEST),
    ("stale", KL, "this text is nowhere", "", KL_TEST),
    ("no such file", "rlcore/algorithms/kll.py", "x", "y", KL_TEST),
    ("not imported", "rlcore/cli.py", "from __future__", "from  __future__", KL_TEST),
    ("no Python", KL, "def approx_kl(", "def approx_kl((", KL_TEST),
    ("real", KL, "return 0.5 * d.square()", "return 0.6 * d.square()", KL_TEST),
]
"""


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", RUNNER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # its data classes look themselves up there
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: this one has threads, and our modules loaded."""
    return subprocess.run(
        [sys.executable, str(RUNNER), *arguments],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


@pytest.mark.rest
def test_a_dozen_defects_are_caught() -> None:
    done = run(*DOZEN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "12 of 12 defects caught"


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_defect_is_caught() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_row_is_stale(mutants: ModuleType) -> None:
    stale = [
        f"{mutant.name}: {why}"
        for mutant in mutants.read_table(TABLE)
        if (why := mutants.stale(mutant, ROOT))
    ]
    assert not stale, "\n".join(stale)


def test_every_algorithm_has_a_defect(mutants: ModuleType) -> None:
    folder = ROOT / "rlcore" / "algorithms"
    formulas = {*folder.glob("estimators/*.py"), *folder.glob("losses/*.py")} - set(
        folder.glob("*/__init__.py")
    )
    formulas |= {
        folder / f"{name}.py"
        for name in (
            "aggregation",
            "corrections",
            "plugin_guard",
            "kl",
            "rollout_metrics",
            "normalization",
            "moments",
            "ragged",
            "scan",
            "reward_shaping",
            "rollouts",
            "token_hash",
        )
    }
    rows = mutants.read_table(TABLE)
    assert not formulas - {ROOT / row.file for row in rows}, "no row in tests/mutant_table.py"
    for registry in (_ESTIMATORS, _POLICY_LOSSES):
        for name in registry.names():
            source = inspect.getsource(registry.resolve(name).factory)
            assert any(row.old in source for row in rows), f"{name}: no row in mutant_table.py"


@pytest.mark.rest
def test_the_runner_tells_a_caught_defect_from_one_that_was_not_tried(tmp_path: Path) -> None:
    table = tmp_path / "table.py"
    table.write_text(HOLES)
    done = run("--table", str(table))
    assert done.returncode == 1
    found = dict(re.findall(r"^(.+?)  +([A-Za-z]+) +\d+\.\d s  ", done.stdout, re.MULTILINE))
    assert found == {
        "harmless": "SURVIVED",
        "stale": "STALE",
        "no such file": "STALE",
        "not imported": "UNTRIED",
        "no Python": "BROKEN",
        "real": "caught",
    }
    assert (
        "rlcore/algorithms/kl.py has its text 0 times, expected once: 'this text is nowhere'"
        in done.stdout
    )
    assert done.stdout.splitlines()[-1] == "1 of 6 defects caught"


@pytest.mark.rest
def test_tests_that_fail_by_themselves_prove_nothing(tmp_path: Path) -> None:
    table = tmp_path / "table.py"
    table.write_text(
        'MUTANTS = [("a", "rlcore/algorithms/kl.py", "0.5", "0.6",'
        ' "test_kl.py::test_that_is_not_there")]'
    )
    done = run("--table", str(table))
    assert done.returncode == 1
    assert "the tests do not pass without a defect" in done.stdout


def test_an_unknown_name_is_refused() -> None:
    done = run("no such defect")
    assert done.returncode == 2
    assert "no such defect: no such defect" in done.stderr
