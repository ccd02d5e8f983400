"""NCCL of both environments is compared before an engine starts.

The interpreters here are stand-ins that tell a version.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import ConfigError, RunFailed
from rlcore.interpreters import ask as interpreters
from rlcore.interpreters import probe as interpreter_probe
from rollout.engines.factories import Keys
from rollout.engines.sglang import server_process
from rollout.engines.sglang.server_process import ManagedServer, check_nccl


def interpreter(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def telling(path: Path, nccl: str, cuda: str = "13.0") -> str:
    told = json.dumps({"nccl": nccl, "cuda": cuda})
    return interpreter(path, f"echo a line of an import; echo '{told}'")


def test_the_same_version_is_taken(tmp_path: Path) -> None:
    ours = telling(tmp_path / "ours", "2.30.7")
    asyncio.run(check_nccl(telling(tmp_path / "theirs", "2.30.7"), ours))


@pytest.mark.parametrize(
    ("theirs", "ours", "cuda", "message"),
    [
        ("2.30.7", "2.29.7", "13.0", r"theirs has NCCL 2\.30\.7, the trainer's \S+ours has"
         r" 2\.29\.7, .*run \S+ours -m pip install --no-deps nvidia-nccl-cu13==2\.30\.7, or"),
        ("2.30.7", "2.27.5", "12.8", "nvidia-nccl-cu12==2"),
        ("2.30.7", "", "", r"ours has none, .*nvidia-nccl-cu13==2\.30\.7"),
        ("", "2.29.7", "13.0", r"NCCL of no version, .*scripts/install_sglang\.sh --gpu"),
        ("", "", "", r"NCCL of no version, the trainer's \S+ours has none"),
    ],
)  # fmt: skip
def test_another_version_is_refused_with_both_and_what_to_do(
    tmp_path: Path, theirs: str, ours: str, cuda: str, message: str
) -> None:
    trainer = telling(tmp_path / "ours", ours, cuda)
    with pytest.raises(ConfigError, match=rf"^rollout\.engine\.python: .*{message}"):
        asyncio.run(check_nccl(telling(tmp_path / "theirs", theirs), trainer))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo no torch here >&2; exit 1", "does not report .*: exit code 1: no torch here"),
        ("echo 7", "does not report .*: exit code 0: it said nothing"),
        ("exec sleep 60", "does not report .*: it did not answer within 5 s"),
    ],
)
def test_an_interpreter_that_does_not_tell_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.setattr(interpreters, "INTERPRETER_S", 5 if "sleep" in body else 30)
    with pytest.raises(ConfigError, match=f"rollout.engine.python: .*theirs {message}"):
        asyncio.run(check_nccl(interpreter(tmp_path / "theirs", body), sys.executable))


def test_the_question_is_for_the_library_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the one that torch was compiled with, which a replaced package does not change."""

    def tell(number: Any) -> None:
        number._obj.value = 23007

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(ncclGetVersion=tell))
    assert interpreter_probe.answer([])["nccl"] == "2.30.7"


def test_a_torch_for_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(torch.version, "cuda", None)
    told = interpreter_probe.answer([])
    assert (told["nccl"], told["cuda"]) == ("", "")


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, True),
        ({"transport": "distributed"}, True),
        ({"transport": "disk"}, False),
        ({"colocated": True}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_it_is_compared_before_a_server_that_takes_weights_over_nccl_starts(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    asked: bool,
) -> None:
    compared: list[str] = []

    async def compare(engine: str) -> None:
        compared.append(engine)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(server_process, "check_nccl", compare)
    python = telling(tmp_path / "python", "2.30.7")
    one = ManagedServer(
        "e",
        str(folder),
        config=EngineConfig(**{"kind": "sglang", "device": "cuda", "python": python} | settings),
        dtype="fp32",
        tokenizer=None,
        log=tmp_path / "log",
        keys=Keys("a", "b"),
    )
    for _ in range(2):
        with pytest.raises(RunFailed, match="engine e ended before"):
            asyncio.run(one.start())
    assert compared == [python] * asked  # once: a restart does not ask again
