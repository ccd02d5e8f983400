"""The defects of tests/backend_mutants.py are found: three of them, or all with --full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parents[1] / "backend_mutants.py"
FEW = [
    "divided by the micro-batches",
    "gradients of norms not reduced under SP",
    "the backward of CP's gather summed",
]


def run(*names: str) -> str:
    """In a process of its own: it forks, and has our modules loaded from a copy."""
    done = subprocess.run(
        [sys.executable, str(RUNNER), *names],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.full
def test_a_few_defects_are_caught() -> None:
    assert run(*FEW) == "3 of 3 defects caught"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_defect_is_caught() -> None:
    assert run().endswith("defects caught")
