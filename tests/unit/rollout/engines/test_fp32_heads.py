"""Engines of every kind get `policy.logprobs.fp32_head` from the configuration of the run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from rlcore.config import Config
from rollout.engines.embedded.factory import EmbeddedFactory
from rollout.engines.embedded.server import ServerConfig
from rollout.engines.factories import EngineSite, Keys
from rollout.engines.sglang.factory import SGLangFactory

KEYS = Keys("the-api-key", "the-admin-key")
FLAG = "--enable-fp32-lm-head"


def config_of(folder: Path, fp32_head: bool, engine: dict[str, Any], **model: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "heads"},
            "model": {"path": str(folder), **model},
            "data": {"paths": ["unused"]},
            "policy": {"logprobs": {"fp32_head": fp32_head}},
            "rollout": {"engine": {"device": "cpu", **engine}, "service": "in_process"},
            "training": {"steps": 1},
        }
    )


@pytest.mark.parametrize("fp32_head", [True, False])
def test_a_server_that_the_run_starts(folder: Path, tmp_path: Path, fp32_head: bool) -> None:
    # Any Python: the server is not started.
    config = config_of(folder, fp32_head, {"kind": "sglang", "python": sys.executable})
    server = SGLangFactory.build_server(config, 0, logs=tmp_path, gpus=(), keys=KEYS)
    assert (FLAG in server.command_line(1, 2)) is fp32_head


@pytest.mark.parametrize(
    ("fp32_head", "trainer", "engine", "expected"),
    [
        (True, "bf16", None, True),
        (False, "bf16", None, False),
        (True, "fp32", "bf16", True),
        # The trainer's logits are in fp32, or the server's are anyway.
        (False, "fp32", "bf16", None),
        (True, "bf16", "fp32", None),
        (True, "fp32", None, None),
    ],
)
def test_a_server_that_the_user_runs(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    fp32_head: bool,
    trainer: str,
    engine: str | None,
    expected: bool | None,
) -> None:
    for name in ("API", "ADMIN"):
        monkeypatch.setenv(f"RLCORE_ENGINE_{name}_KEY", f"the-key-of-the-{name.lower()}")
    given = {"kind": "sglang", "urls": ["http://x:1"], "dtype": engine}
    config = config_of(folder, fp32_head, given, dtype=trainer)
    external: Any = SGLangFactory.build_external(config, "engine-0", "http://x:1")
    assert external.server.fp32_head is expected


@pytest.mark.parametrize("fp32_head", [True, False])
def test_the_embedded_engine(folder: Path, tmp_path: Path, fp32_head: bool) -> None:
    config = config_of(folder, fp32_head, {"kind": "embedded"})
    site = EngineSite(config, 1, tmp_path, assign_gpus=lambda: [[]])
    [engine] = EmbeddedFactory.build(site)
    assert engine.fp32_head is fp32_head  # type: ignore[attr-defined]
    server = EmbeddedFactory.build_server(config, 0, logs=tmp_path, gpus=(), keys=KEYS)
    read = TypeAdapter(ServerConfig).validate_json(server.config.to_json())
    assert read.fp32_head is fp32_head
