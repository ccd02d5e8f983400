"""What an SGLang server on GPUs is given in its environment."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.sections.rollout import EngineConfig
from rlcore.interpreters import ask as interpreters
from rlcore.interpreters.ask import cuda_toolkit
from rollout.engines.sglang.server_process import gpu_environment

TOOLKIT = {"CUDA_HOME": "/opt/cuda", "PATH": "/usr/bin"}
GRAPHS = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
BALANCE = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
COMPILING = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"


@pytest.mark.parametrize(
    ("engine", "added"),
    [
        ({}, {}),
        ({"colocated": True}, {GRAPHS: "1", BALANCE: "0"}),
        ({"quantization": "fp8"}, {COMPILING: "0"}),
    ],
)
def test_a_server_on_gpus_is_told_what_its_run_needs(
    engine: dict[str, Any], added: dict[str, str]
) -> None:
    config = EngineConfig(kind="sglang", **engine)
    assert gpu_environment(config, TOOLKIT) == added
    users = dict.fromkeys(added, "mine")
    assert gpu_environment(config, TOOLKIT | users) == {}, "the user's own stay"


@pytest.fixture
def no_usual_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "USUAL_TOOLKIT", str(tmp_path / "cuda"))


@pytest.mark.usefixtures("no_usual_toolkit")
def test_where_a_toolkit_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepGEMM does: what is given, the compiler on PATH, the usual place."""
    compiler = tmp_path / "pip" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("")
    compiler.chmod(0o755)
    on_path = {"PATH": f"/nowhere:{compiler.parent}"}
    assert cuda_toolkit({"CUDA_HOME": "/a", "CUDA_PATH": "/b", **on_path}) == "/a"
    assert cuda_toolkit({"CUDA_PATH": "/b", **on_path}) == "/b"
    assert cuda_toolkit(on_path) == str(tmp_path / "pip")
    assert cuda_toolkit({"PATH": "/nowhere"}) is None
    (tmp_path / "cuda").mkdir()
    assert cuda_toolkit({"PATH": "/nowhere"}) == str(tmp_path / "cuda")


@pytest.mark.usefixtures("no_usual_toolkit")
def test_a_server_without_a_compiler_is_started_without_deep_gemm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        added = gpu_environment(EngineConfig(kind="sglang"), {"PATH": "/nowhere"})
    assert added == {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
    assert "no CUDA toolkit is found" in caplog.text
