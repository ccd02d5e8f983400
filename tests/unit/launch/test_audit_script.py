"""scripts/locks/audit.py: what it asks for, and that no answer is no good answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "locks" / "audit.py"


def run(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a pip-audit of these lines of shell."""
    program = folder / "pip-audit"
    program.write_text("\n".join(["#!/bin/sh", *lines]))
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [sys.executable, str(SCRIPT)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=60, check=False
    )


def test_every_package_of_the_locks_is_asked_for_once_at_a_time(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    done = run(tmp_path, f'echo "$*" >> {asked}.options', f"for f; do :; done; cat $f >> {asked}")
    assert done.returncode == 0, done.stderr
    pins = asked.read_text().split()
    assert {
        "torch==2.13.0",
        "torch==2.14.1",
        "sglang==0.5.23",
        "ray==2.60.0",
        "verifiers==0.4.0",
    } <= set(pins)
    assert not any("+" in pin or "--hash" in pin for pin in pins)
    # else what the service does not know is passed over
    assert all("--strict" in line for line in Path(f"{asked}.options").read_text().splitlines())


@pytest.mark.parametrize("said", ["Found 1 known vulnerability", "Failed to resolve 'pypi.org'"])
def test_vulnerabilities_and_a_service_that_does_not_answer_fail(tmp_path: Path, said: str) -> None:
    done = run(tmp_path, f'echo "{said}" >&2', "exit 1")
    assert done.returncode == 1
    assert f"trainer-cpu: {said}" in done.stderr
    assert (
        "trainer-cpu, trainer-gpu, engine-cpu, engine-gpu, verifiers: vulnerable, or pypi"
        in done.stderr
    )


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT)]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "pip install pip-audit" in done.stderr
