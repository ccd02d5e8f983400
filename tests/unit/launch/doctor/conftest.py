"""Machines and environments that are not there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.interpreters.ask import ask as ask_interpreter
from rlcore.launch.doctor import checks

GIVEN = ["run.name=x", "model.path=m", "data.paths=d.jsonl", "training.steps=1"]
TOLD: dict[str, Any] = {
    "python": "3.11.7",
    "packages": {},
    "torch": "2.13.0",
    "cuda": "13.0",
    "gpus": 0,
    "nccl": "2.30.7",
}


@pytest.fixture
def stub(tmp_path: Path) -> Callable[..., Path]:
    """`stub("engine", nccl="2.29.7")`: an interpreter that tells this, whatever it is asked."""

    def make(name: str, **told: Any) -> Path:
        path = tmp_path / name
        answer = tmp_path / f"{name}.json"
        answer.write_text(json.dumps(TOLD | told))
        path.write_text(f"#!/bin/sh\ncat '{answer}'\n")
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def examined(
    stub: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[..., tuple[int, dict[str, str]]]:
    """`examined("rollout.engine.kind=sglang", nccl="2.30.7")`: run the command in a trainer's
    environment that tells this, for a run with these settings, or none; the exit code, and each
    line of the report by its name.
    """
    from rlcore import cli

    def examine(*settings: str, **trainer: Any) -> tuple[int, dict[str, str]]:
        python = stub("trainer", **{"te": False} | trainer)
        monkeypatch.setattr(
            checks,
            "ask",
            lambda asked, *given, **how: ask_interpreter(
                python if asked == sys.executable else asked, *given, **how
            ),
        )
        monkeypatch.setattr(checks, "requirements", lambda extras: {})
        given = [*GIVEN, f"run.dir={tmp_path / 'runs'}", *settings] if settings else []
        code = cli.main(["doctor", *given])
        lines = capsys.readouterr().out.splitlines()
        return code, {line[6:].partition(": ")[0]: line for line in lines}

    return examine


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`nvidia_smi("H100, 81559, 81000, 580.65")`: what it prints, and its exit code."""

    def install(text: str, code: int = 0) -> None:
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\nprintf '%s\\n' '{text}'\nexit {code}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(path.parent), prepend=":")

    return install
