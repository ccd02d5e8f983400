"""The shell scripts pass shellcheck, and tell each node the right thing.

What they call is stubbed: `tests/script_stage.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.config import Config
from rlcore.config.engine_registry import KINDS
from rlcore.config.load import load_config, split_arguments
from rlcore.config.sections.policy import ParallelConfig
from rlcore.config.sections.rollout import EngineConfig
from tests.script_stage import KEYS, ROOT, Stage, value_of

SCRIPTS = sorted([
    *ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/slurm/*.s*"), *ROOT.glob("benchmarks/*.sh")
])  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=[str(path.relative_to(ROOT)) for path in SCRIPTS])
def test_a_script_is_clean(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists(), "./scripts/install.sh dev"
    done = subprocess.run(
        [shellcheck, "-x", "-P", ROOT, script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


NODE = {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1", "GPUS_PER_NODE": "1"}
GIVEN_KEYS = dict.fromkeys(KEYS, "x")
URLS = '["http://10.0.0.3:1"]'


@pytest.fixture
def engines(stage: Stage) -> Path:
    """A folder in which one engine node has written its URL."""
    folder = stage.folder / "engines"
    folder.mkdir()
    (folder / "10.0.0.3.json").write_text(URLS)
    return folder


def test_urls_may_be_named(stage: Stage) -> None:
    urls = "http://a:1,http://b:2"
    assert stage.run("torchrun_multinode.sh", "r.yaml", **NODE, ENGINE_URLS=urls).returncode == 0
    [call] = stage.calls("rlcore.launch.torchrun")
    assert call["arguments"][-1] == "rollout.engine.urls=[http://a:1, http://b:2]"


def test_engines_that_do_not_come_are_waited_for_until_a_deadline(
    stage: Stage, engines: Path
) -> None:
    given = {**NODE, **GIVEN_KEYS, "ENGINES": str(engines), "ENGINES_TIMEOUT_S": "0"}
    done = stage.run("torchrun_multinode.sh", "run.yaml", **given, ENGINE_NODES="2")
    assert done.returncode == 2
    assert "1 of 2 engine nodes are ready after 0 s (ENGINES_TIMEOUT_S)" in done.stderr
    assert "10.0.0.3.json" in done.stderr
    assert stage.calls("rlcore.launch.torchrun") == []


def test_more_engines_than_the_run_waits_for_are_taken_too(stage: Stage, engines: Path) -> None:
    (engines / "10.0.0.4.json").write_text(URLS)
    given = {**NODE, **GIVEN_KEYS, "ENGINES": str(engines), "ENGINE_NODES": "1"}
    assert stage.run("torchrun_multinode.sh", "run.yaml", **given).returncode == 0
    [call] = stage.calls("rlcore.launch.torchrun")
    assert call["arguments"][-1] == f"rollout.engine.urls_file={engines}"


def test_nodes_of_one_engine_meet_at_the_first(stage: Stage) -> None:
    """Four engine nodes, two for each engine; the last come first."""
    engines = stage.folder / "engines"
    shared = {**GIVEN_KEYS, "ENGINES": str(engines)}
    shared |= {"NODES_PER_ENGINE": "2", "ENGINES_PER_NODE": "8"}
    nodes = []
    for node in (3, 2, 1, 0):
        own = {"SLURM_PROCID": str(node), "HOST_ADDRESS": f"10.0.0.{node}"}
        nodes.append(stage.start("engines.sh", "run.yaml", **shared, **own))
    stage.wait_for(lambda: len(stage.calls("engine")) == 4, "not every node has begun")
    told = [call["arguments"] for call in stage.calls("engine")]
    for process in nodes:
        process.terminate()
        assert process.wait(10) == 0
    assert sorted(
        [value_of(one, "--urls-file"), value_of(one, "--node-rank"), value_of(one, "--head")]
        for one in told
    ) == [
        [str(engines / "10.0.0.0.json"), "0", "10.0.0.0:29500"],
        [str(engines / "10.0.0.1.json"), "1", "10.0.0.0:29500"],
        [str(engines / "10.0.0.2.json"), "0", "10.0.0.2:29500"],
        [str(engines / "10.0.0.3.json"), "1", "10.0.0.2:29500"],
    ]
    assert all(value_of(one, "--nodes") == "2" for one in told)
    assert all("rollout.engine.count=1" in one for one in told)


@pytest.mark.parametrize(
    ("script", "missing", "environment"),
    [
        ("torchrun_multinode.sh", KEYS[0], {**NODE, "ENGINES": "/none", "ENGINE_NODES": "1"}),
        ("torchrun_multinode.sh", "ENGINE_NODES", {**NODE, "ENGINES": "/none"}),
        ("torchrun_multinode.sh", "MASTER_ADDR", {"NNODES": "1", "NODE_RANK": "0"}),
        ("engines.sh", KEYS[1], {"ENGINES": "/none", KEYS[0]: "x"}),
        ("engines.sh", "ENGINES", {}),
        ("engines.sh", "ENGINE_NODE", {**GIVEN_KEYS, "ENGINES": "a", "NODES_PER_ENGINE": "2"}),
        ("ray_multinode.sh", "NODE_RANK", {"MASTER_ADDR": "10.0.0.1"}),
    ],
)
def test_missing_variables_are_named(
    stage: Stage, script: str, missing: str, environment: dict[str, str]
) -> None:
    done = stage.run(script, "run.yaml", **environment)
    assert done.returncode != 0
    assert missing in done.stderr
    assert list(stage.records.glob("*.json")) == []


def test_a_cluster_of_ray_asks_for_a_token_which_is_for_its_owner_alone(stage: Stage) -> None:
    """Ray writes it for everybody to read, into a home that nodes may share."""
    token = stage.folder / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    done = stage.run("ray_multinode.sh", "run.yaml", NODE_RANK="0", MASTER_ADDR="10.0.0.1")
    assert done.returncode == 0, done.stderr
    assert token.stat().st_mode & 0o777 == 0o600
    (call,) = stage.calls("train")
    assert call["environment"]["RAY_AUTH_MODE"] == "token"


PPO = "examples/recipes/llama-3.1-8b-ppo"


def test_ppo_on_two_nodes_trains_on_the_first_and_generates_on_the_second(stage: Stage) -> None:
    """Each node is told what the recipe's files are for."""
    node = {"MASTER_ADDR": "10.0.0.1", "HOST_ADDRESS": "10.0.0.2", **GIVEN_KEYS}
    node["ENGINES"] = str(stage.folder / "engines")
    engines = stage.start("ppo_8b_2nodes.sh", "model.path=m", **node, NODE_RANK="1")
    assert stage.run("ppo_8b_2nodes.sh", "model.path=m", **node, NODE_RANK="0").returncode == 0
    engines.terminate()
    assert engines.wait(10) == 0
    root = stage.folder / "checkout"
    [trainer] = stage.calls("rlcore.launch.torchrun")
    [served] = stage.calls("engine")
    told = trainer["arguments"]
    assert [value_of(told, "--nnodes"), value_of(told, "--nproc-per-node")] == ["1", "8"]
    assert told[told.index("train") + 1 :] == [
        f"{root / PPO}.yaml",
        "model.path=m",
        "cluster.launcher=torchrun",
        "rollout.engine.kind=sglang",
        f"rollout.engine.urls_file={stage.folder / 'engines'}",
    ]
    assert served["arguments"][3:6] == [
        f"{root / PPO}.yaml",
        f"{root / PPO}.servers.yaml",
        "model.path=m",
    ]
    assert "cluster.launcher=torchrun" in served["arguments"], (
        "or the trainer's layout is held to one local process"
    )


def test_ppo_on_two_nodes_of_ray(stage: Stage) -> None:
    node = {"MASTER_ADDR": "10.0.0.1", "LAUNCHER": "ray", "NODE_RANK": "0"}
    assert stage.run("ppo_8b_2nodes.sh", "model.path=m", **node).returncode == 0
    [call] = stage.calls("train")
    assert [Path(word).name for word in call["arguments"][3:5]] == [
        "llama-3.1-8b-ppo.yaml",
        "llama-3.1-8b-ppo.servers.yaml",
    ]
    done = stage.run("ppo_8b_2nodes.sh", **{**node, "NODE_RANK": "2", "LAUNCHER": "torchrun"})
    assert done.returncode == 2
    assert "got torchrun and 2" in done.stderr


def test_ppo_on_two_nodes_without_ray_needs_engines(stage: Stage) -> None:
    """Else 8 ranks start, several times, to hear that there is no GPU left for an engine."""
    done = stage.run("ppo_8b_2nodes.sh", "model.path=m", MASTER_ADDR="10.0.0.1", NODE_RANK="0")
    assert done.returncode == 2
    assert "set ENGINES to a new one that both share" in done.stderr
    assert stage.calls("rlcore.launch.torchrun") == []


# --- which Python ---------------------------------------------------------------------------------


def test_python_may_be_a_name_or_a_path(stage: Stage) -> None:
    (stage.folder / "python3.77").symlink_to(stage.folder / "python")
    for given in ("python3.77", "../python", str(stage.folder / "python")):
        assert stage.run("torchrun_multinode.sh", "run.yaml", **NODE, PYTHON=given).returncode == 0
    assert len(stage.calls("rlcore.launch.torchrun")) == 3


@pytest.mark.parametrize("given", ["python3.99", "/no/such/python", "/tmp"])
def test_a_python_that_is_not_there_is_named(stage: Stage, given: str) -> None:
    done = stage.run("torchrun_multinode.sh", "run.yaml", **NODE, PYTHON=given)
    assert done.returncode == 2
    assert f"PYTHON={given}: no such program" in done.stderr


def test_without_any_python_there_is_a_sentence(stage: Stage, tmp_path: Path) -> None:
    only = tmp_path / "only"
    only.mkdir()
    for name in ("bash", "env", "dirname", "basename"):
        (only / name).symlink_to(str(shutil.which(name)))
    done = stage.run("torchrun_multinode.sh", "run.yaml", **NODE, PYTHON="", PATH=str(only))
    assert done.returncode == 2
    assert "no Python: neither" in done.stderr


# --- debug.sh -------------------------------------------------------------------------------------


SERVERS = {
    "python": "/envs/sglang/bin/python",
    "urls": ["http://10.0.0.9:1"],
    "urls_file": "/shared/engines",
    "tensor_parallel": 2,
    "gpus": [4, 5, 6, 7],
    "host": "10.0.0.9",
    "server": {"mem_fraction_static": 0.8},
    "router_url": "http://10.0.0.9:2",
    "transport": "disk",
    "weights_dir": "/shared/weights",
    "max_in_flight": 8,
    "environment": {"NCCL_DEBUG": "INFO"},
}


def debugged(stage: Stage, *given: str) -> Config:
    """The configuration that `debug.sh` would run."""
    done = stage.run("debug.sh", *given)
    assert done.returncode == 0, done.stderr
    [call] = stage.calls("train")
    assert call["arguments"][:3] == ["-m", "rlcore", "train"]
    assert call["arguments"][-1] == "--overwrite"
    return load_config(*split_arguments(call["arguments"][3:-1])).config


@pytest.mark.parametrize("name", ["mine.yaml", "MINE.yml"])
def test_any_file_becomes_one_process(stage: Stage, name: str) -> None:
    """Whatever it says of servers, GPUs and layout; and its own run is left alone."""
    assert set(SERVERS) == set(KINDS["sglang"].own_keys)
    engine = {"kind": "sglang", "count": 2, "device": "cuda", **SERVERS}
    layout = dict.fromkeys(("tensor", "pipeline", "context", "expert"), 2)
    layout |= {"sequence": True, "first_stage_layers": 3}
    file = stage.folder / "checkout" / name
    given = {
        "run": {"name": "mine"},
        "model": {"path": "m"},
        "data": {"paths": "d.jsonl"},
        "training": {"steps": 1},
        "reward": {"parts": {"right": {"function": "math"}}},
        "policy": {"parallel": layout},
        "rollout": {"engine": engine, "max_staleness": 2},
        "cluster": {"launcher": "ray", "nodes": 2, "processes_per_node": 8},
    }
    file.write_text(json.dumps(given))
    config = debugged(stage, str(file))
    assert config.run.name == "debug"
    assert config.rollout.service == "in_process"
    assert config.rollout.engine == EngineConfig()
    assert config.policy.parallel == ParallelConfig()


def test_arguments_of_debug_sh_come_last(stage: Stage) -> None:
    example = [str(ROOT / "examples" / "addition" / name) for name in ("base.yaml", "grpo.yaml")]
    config = debugged(stage, *example, "run.name=other", "rollout.max_staleness=1")
    assert (config.run.name, config.rollout.max_staleness) == ("other", 1)
