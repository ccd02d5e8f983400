"""The threads of a rank, and the variables that libraries read when a CUDA context is made."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.errors import ConfigError, RunFailed
from rlcore.launch import environment, local, process
from rlcore.launch.environment import RESOLVED, SUPERVISED, resolved_by_launcher
from rlcore.launch.process import cuda_environment, pick_device
from rollout.weight_sync.process_group import SHARED_GPU
from tests.configs import small_config

ROOT = Path(__file__).parents[3]
NEW = "2.14.1"
OLD = "2.11.0+cu130"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


# --- threads --------------------------------------------------------------------------------------

# torchrun changes its own environment before it starts the ranks
AGENT = """
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
subprocess.run([sys.executable, "-c", "from rlcore.launch import environment as e\\n"
                "e.cores = lambda: 96\\nprint(e.threads_at_most())"], check=True)
"""


@pytest.mark.parametrize(("given", "ranks", "expected"), [
    (None, "8", "12"), (None, "2", "16"), (None, "128", "1"), ("1", "8", "None"),
    ("3", "8", "None"),
])  # fmt: skip
def test_ranks_of_torchrun_share_the_cores_unless_the_user_decides(
    given: str | None, ranks: str, expected: str
) -> None:
    variables = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    variables |= {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": ranks}
    variables |= {"TORCHELASTIC_RUN_ID": "x", "PYTHONPATH": str(ROOT)}
    if given is not None:
        variables["OMP_NUM_THREADS"] = given
    done = subprocess.run(
        [sys.executable, "-S", "-c", AGENT],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("one", "several", "chosen"), [(1.0, 0.5, 4), (1.0, 0.9, 1), (1.0, 9.0, 1)]
)
def test_a_run_computes_with_several_threads_where_they_are_faster(
    one: float,
    several: float,
    chosen: int,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(
        process, "_seconds_of_a_layer", lambda _: one if torch.get_num_threads() == 1 else several
    )
    try:
        torch.set_num_threads(4)
        with caplog.at_level("INFO"):
            process.choose_threads(small_config(model={"path": str(tiny_model)}))
        assert torch.get_num_threads() == chosen
        assert f"threads: {chosen} (a layer of width 32" in caplog.text
        torch.set_num_threads(4)
        for kept in ({"deterministic": True}, {"threads": 2}):
            run = {"name": "a", **kept}
            process.choose_threads(small_config(model={"path": str(tiny_model)}, run=run))
            assert torch.get_num_threads() == 4
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        process.choose_threads(small_config(model={"path": str(tiny_model)}))
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_the_layer_that_threads_are_tried_on_is_computed() -> None:
    assert process._seconds_of_a_layer(32) > 0


def test_a_run_of_one_process_takes_its_share_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "cores", lambda: 8)
    assert environment.threads_at_most() == 8


@pytest.mark.parametrize(
    ("threads", "given", "expected"), [(None, "1", "1"), (None, None, "4"), (3, "1", "3")]
)
def test_local_ranks_share_the_cores_unless_the_user_decides(
    threads: int | None, given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: started.append(env))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    local._start(0, 2, Path(), small_config(run={"name": "a", "threads": threads}), [])
    assert started[0]["OMP_NUM_THREADS"] == expected


# --- CUDA -----------------------------------------------------------------------------------------


def test_megatrons_overlap_of_tensor_parallelism_gets_one_connection() -> None:
    assert CONNECTIONS not in cuda_environment(small_config(), NEW)
    split = small_config(policy={"parallel": {"tensor": 2, "sequence": True}})
    assert cuda_environment(split, NEW)[CONNECTIONS] == "1"


@pytest.mark.parametrize(
    ("engine", "chosen"),
    [
        ({"kind": "sglang"}, "0"),
        ({"kind": "sglang", "transport": "distributed"}, "0"),
        ({"kind": "sglang", "server": {"enable-symm-mem": True}}, "1"),
        ({"kind": "sglang", "server": {"enable_symm_mem": False}}, "0"),
        ({"kind": "sglang", "environment": {"NCCL_CUMEM_ENABLE": "1"}}, "1"),
        ({"kind": "sglang", "server": {"enable_kv_cache_sharding": True}}, "1"),
        ({"kind": "sglang", "urls": ["http://127.0.0.1:1", "http://192.0.2.1:1"]}, "0"),
        ({"kind": "sglang", "urls": ["http://192.0.2.1:1"]}, None),
        ({"kind": "sglang", "transport": "disk"}, None),
        ({"kind": "sglang", "colocated": True}, None),
        ({"kind": "embedded"}, None),
    ],
)
def test_the_trainers_nccl_hands_memory_over_as_sglangs_does(
    engine: dict[str, Any], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the allocator is left to the user."""
    for allocator in (None, "max_split_size_mb:512"):
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        if allocator is not None:
            monkeypatch.setenv("PYTORCH_ALLOC_CONF", allocator)
        found = cuda_environment(small_config(rollout={"engine": engine}), NEW)
        assert found.get("NCCL_CUMEM_ENABLE") == chosen


def test_the_allocator_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    segments = "expandable_segments:True"
    threads = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    pinned = f"{threads},pinned_max_round_threshold_mb:1"
    assert cuda_environment(small_config(), NEW) == {ALLOCATOR: f"{segments},{pinned}"}
    # torch 2.11 refuses a setting that it does not know
    assert cuda_environment(small_config(), OLD) == {ALLOCATOR: f"{segments},{threads}"}
    for engine in ({"colocated": True}, {"transport": "tensor"}):
        by_handle = small_config(rollout={"engine": engine})
        connect = {"NCCL_RUNTIME_CONNECT": "0"} if "colocated" in engine else {}
        assert cuda_environment(by_handle, NEW) == {ALLOCATOR: pinned} | connect
        assert cuda_environment(by_handle, OLD) == {ALLOCATOR: threads} | connect
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    assert cuda_environment(small_config(), NEW) == {}


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_they_are_set_before_anything_else_where_torch_has_cuda(
    cuda: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (CONNECTIONS, "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", {**os.environ, ALLOCATOR: "mine"})
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(process, "seed_rng", lambda seed: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    process.set_up_torch(small_config(policy={"parallel": {"tensor": 2}}))
    assert os.environ.get(CONNECTIONS) == (None if cuda is None else "1")
    assert os.environ[ALLOCATOR] == "mine"


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((1024, 1 << 20), (1024 + 2048, 1 << 20)),
        ((1024, resource.RLIM_INFINITY), (1024 + 2048, resource.RLIM_INFINITY)),
        ((4096, 4096), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_a_rank_may_open_a_connection_to_each_other_one(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: tuple[int, int] | None
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: given.append(new))
    environment.allow_connections(2048)
    assert given == ([] if raised is None else [raised])


def test_a_node_that_allows_too_few_connections_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 2048))
    with pytest.raises(RunFailed, match=r"needs 3072 open files, for 2048 conn.* may have 2048"):
        environment.allow_connections(2048)


def test_a_machine_with_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv(SHARED_GPU, raising=False)
    assert pick_device(1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="LOCAL_RANK: got 2, but torch sees 2 GPUs on"):
        pick_device(2)
    monkeypatch.setenv(SHARED_GPU, "1")
    assert pick_device(3) == torch.device("cuda", 1)
    assert chosen == [1, 1]


def test_the_checked_configuration_is_for_the_launchers_own_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that a rank starts, such as `rlcore validate`, reads its own."""
    assert resolved_by_launcher() is None
    monkeypatch.setenv(RESOLVED, "/store/resolved")
    monkeypatch.setenv(SUPERVISED, str(os.getppid()))
    assert resolved_by_launcher() == Path("/store/resolved")
    monkeypatch.setenv(SUPERVISED, str(os.getppid() + 1))
    assert resolved_by_launcher() is None
