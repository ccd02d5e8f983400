"""The shell scripts: clean by shellcheck; those of Slurm and of several nodes tell each node the right thing.

What they call is stubbed: srun, scontrol, ray, and an interpreter that writes down how it was called.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.slurm_stubs import job, write_stubs

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/slurm/*.sbatch"), *ROOT.glob("benchmarks/*.sh")])
KEYS = ("RLCORE_ENGINE_API_KEY", "RLCORE_ENGINE_ADMIN_KEY")

# `python`, as the scripts call it. Engines write their URLs and go on until they are ended; on Ray the run waits for the nodes.
PYTHON = f"""#!{sys.executable} -S
import json, os, signal, sys, time
arguments = sys.argv[1:]
if arguments[0].endswith(".py"):
    os.execv({sys.executable!r}, [{sys.executable!r}, *arguments])
kept = {{name: os.environ.get(name) for name in ("NODE_RANK", "SLURM_PROCID", *{KEYS!r})}}
with open(os.path.join(os.environ["RECORDS"], f"{{time.time_ns()}}-{{os.getpid()}}.json"), "w") as file:
    json.dump({{"arguments": arguments, "environment": kept, "pid": os.getpid()}}, file)
if "engine" in arguments:
    path = arguments[arguments.index("--urls-file") + 1]
    with open(path, "w") as file:
        json.dump([f"http://{{os.path.basename(path)[:-5]}}:30000"], file)
    signal.signal(signal.SIGTERM, lambda *_: (os.unlink(path), sys.exit(0)))
    while True:
        time.sleep(0.1)
if "cluster.launcher=ray" in arguments:
    nodes = os.environ.get("NODES", "1").split()
    said = os.path.join(os.environ["RECORDS"], "ray.txt")
    while open(said).read().count("start --block") < (len(nodes) - 1) * (1 + int(os.environ.get("SLURM_RESTART_COUNT", "0"))):
        time.sleep(0.05)
sys.exit(int(os.environ.get("TRAINER_CODE", "0")))
"""
# One head at a time: there while its file is. What joins it stays as long.
RAY = """#!/usr/bin/env bash
echo "$*" >> "$RECORDS/ray.txt"
case "$1 $2" in
    health-check*) [ -e "$RECORDS/head" ] ;;
    "start --head") touch "$RECORDS/head"; trap 'rm "$RECORDS/head"; exit' TERM; while :; do sleep 0.1; done ;;
    "start --block") [ -z "${REFUSED:-}" ] || exit 7; while [ -e "$RECORDS/head" ]; do sleep 0.1; done; exit 1 ;;
esac
"""


@dataclass
class Stage:
    """A folder of stubs, and what they wrote down."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        write_stubs(self.folder)
        for name, text in {"python": PYTHON, "ray": RAY}.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        self.records = self.folder / "records"
        self.records.mkdir()
        # A checkout of its own: what the jobs write lands there.
        shutil.copytree(ROOT / "scripts", self.folder / "checkout" / "scripts")
        kept = {name: value for name, value in os.environ.items() if name not in KEYS and not name.startswith("SLURM_")}
        self.environment = {
            **kept, "PATH": f"{self.folder}:{os.environ['PATH']}", "PYTHON": str(self.folder / "python"),
            "RECORDS": str(self.records), **self.environment,
        }  # fmt: skip

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.folder / "checkout" / "scripts" / script), *arguments], env={**self.environment, **environment},
            cwd=self.folder / "checkout", capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def sbatch(self, script: str, nodes: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run(f"slurm/{script}", *arguments, **job(nodes), **environment)

    def calls(self, word: str) -> list[dict[str, Any]]:
        """How the interpreter was called with `word` among its arguments, by the node's rank."""
        found = [json.loads(path.read_text()) for path in self.records.glob("*.json")]
        chosen = [call for call in found if word in call["arguments"]]
        ranks = ("SLURM_PROCID", "NODE_RANK")
        return sorted(chosen, key=lambda call: [int(call["environment"][name] or 0) for name in ranks])


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


@pytest.mark.parametrize("script", SCRIPTS, ids=[str(path.relative_to(ROOT)) for path in SCRIPTS])
def test_a_script_is_clean(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists(), "./scripts/install.sh dev"
    done = subprocess.run([shellcheck, "-x", "-P", ROOT, script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- torchrun ---------------------------------------------------------------------------------------------------------


def test_slurm_nodes_are_split_into_trainers_and_engines(stage: Stage) -> None:
    done = stage.sbatch(
        "torchrun.sbatch", 4, "run.yaml", "a.b=1", ENGINE_NODES="2", ENGINES_PER_NODE="4", SERVERS="servers.yaml"
    )
    assert done.returncode == 0, done.stderr
    trainers, engines = stage.calls("torch.distributed.run"), stage.calls("engine")
    assert len(trainers) == len(engines) == 2
    for node, call in enumerate(trainers):
        arguments = call["arguments"]
        flags = {"--nnodes": "2", "--node-rank": str(node), "--nproc-per-node": "8", "--master-addr": "10.0.0.1",
                 "--master-port": "29400", "--max-restarts": "3"}  # fmt: skip
        assert {flag: value_of(arguments, flag) for flag in flags} == flags
        assert arguments[arguments.index("rlcore") :] == [
            "rlcore", "train", "run.yaml", "a.b=1", "cluster.launcher=torchrun", "rollout.engine.kind=sglang",
            'rollout.engine.urls=["http://10.0.0.3:30000", "http://10.0.0.4:30000"]',
        ]  # fmt: skip
    for call, address in zip(engines, ("10.0.0.3", "10.0.0.4"), strict=True):
        assert call["arguments"][:7] == [
            "-m", "rlcore", "engine", "run.yaml", "a.b=1", "servers.yaml", "rollout.engine.count=4",
        ]  # fmt: skip
        assert f"rollout.engine.host={address}" in call["arguments"]


def test_keys_are_made_once_and_stand_in_no_command_line(stage: Stage) -> None:
    assert stage.sbatch("torchrun.sbatch", 2, "run.yaml", ENGINE_NODES="1").returncode == 0
    calls = [*stage.calls("torch.distributed.run"), *stage.calls("engine")]
    pairs = {tuple(call["environment"][key] for key in KEYS) for call in calls}
    [(api, admin)] = pairs
    assert len(calls) == 2
    assert len(api) > 40 < len(admin)
    assert api != admin
    assert not any(key in word for call in calls for word in call["arguments"] for key in (api, admin))


def test_engines_end_with_the_trainer_whose_exit_code_is_the_jobs(stage: Stage) -> None:
    assert stage.sbatch("torchrun.sbatch", 2, "run.yaml", ENGINE_NODES="1", TRAINER_CODE="3").returncode == 3
    [engine] = stage.calls("engine")
    with pytest.raises(ProcessLookupError):
        os.kill(engine["pid"], 0)
    assert list((stage.folder / "checkout" / "runs").rglob("*.json")) == []


@pytest.mark.parametrize(("script", "word"), [("torchrun.sbatch", "torch.distributed.run"), ("ray.sbatch", "train")])
def test_a_job_that_was_put_back_resumes(stage: Stage, script: str, word: str) -> None:
    for restarts in ("0", "1"):
        done = stage.sbatch(script, 2, "run.yaml", ENGINE_NODES="0", SLURM_RESTART_COUNT=restarts)
        assert done.returncode == 0, done.stderr
    assert sorted("--resume" in call["arguments"] for call in stage.calls(word)) in ([False, True], [False, False, True, True])


def test_without_engine_nodes_there_are_no_urls(stage: Stage) -> None:
    assert stage.sbatch("torchrun.sbatch", 2, "run.yaml", ENGINE_NODES="0").returncode == 0
    assert not any("urls" in word for call in stage.calls("torch.distributed.run") for word in call["arguments"])
    assert stage.calls("engine") == []


def test_a_job_without_a_node_to_train_on_is_refused(stage: Stage) -> None:
    done = stage.sbatch("torchrun.sbatch", 2, "run.yaml", ENGINE_NODES="2")
    assert done.returncode == 2
    assert "2 nodes, ENGINE_NODES=2: none is left to train" in done.stderr


NODE = {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1", "GPUS_PER_NODE": "1"}


def test_urls_may_be_named(stage: Stage) -> None:
    assert stage.run("torchrun_multinode.sh", "run.yaml", **NODE, ENGINE_URLS="http://a:1,http://b:2").returncode == 0
    [call] = stage.calls("torch.distributed.run")
    assert call["arguments"][-1] == "rollout.engine.urls=[http://a:1, http://b:2]"


def test_engines_that_do_not_come_are_waited_for_until_a_deadline(stage: Stage) -> None:
    given = dict(zip(KEYS, ("x", "y"), strict=True))
    engines = stage.folder / "engines"
    engines.mkdir()
    (engines / "10.0.0.3.json").write_text('["http://10.0.0.3:1"]')
    done = stage.run(
        "torchrun_multinode.sh", "run.yaml", **NODE, **given, ENGINES=str(engines), ENGINE_NODES="2", ENGINES_TIMEOUT_S="0"
    )
    assert done.returncode == 1
    assert "1 of 2 engine nodes are ready after 0 s (ENGINES_TIMEOUT_S)" in done.stderr
    assert "10.0.0.3.json" in done.stderr
    (engines / "10.0.0.4.json").write_text('["http://10.0.0.4:1"]')
    done = stage.run("torchrun_multinode.sh", "run.yaml", **NODE, **given, ENGINES=str(engines), ENGINE_NODES="1")
    assert done.returncode == 1, "engines of an earlier run, perhaps"
    assert "has 2 files, expected 1: use a new folder" in done.stderr
    assert stage.calls("torch.distributed.run") == []


def test_who_waits_for_engines_ends_with_its_script(stage: Stage) -> None:
    engines = stage.folder / "engines"
    engines.mkdir()
    process = subprocess.Popen(
        [str(stage.folder / "checkout" / "scripts" / "torchrun_multinode.sh"), "run.yaml"],
        env={**stage.environment, **NODE, **dict.fromkeys(KEYS, "x"), "ENGINES": str(engines), "ENGINE_NODES": "1"},
    )
    deadline, waiting = time.monotonic() + 30, []
    while not waiting:
        assert time.monotonic() < deadline
        children = psutil.Process(process.pid).children()
        waiting = [child for child in children if "engine_urls" in " ".join(child.cmdline())]
        time.sleep(0.05)
    process.kill()
    process.wait(20)
    assert psutil.wait_procs(waiting, timeout=20)[1] == []


@pytest.mark.parametrize(("script", "missing", "environment"), [
    ("torchrun_multinode.sh", "RLCORE_ENGINE_API_KEY", {**NODE, "ENGINES": "/none", "ENGINE_NODES": "1"}),
    ("torchrun_multinode.sh", "ENGINE_NODES", {**NODE, "ENGINES": "/none"}),
    ("torchrun_multinode.sh", "MASTER_ADDR", {"NNODES": "1", "NODE_RANK": "0"}),
    ("engines.sh", "RLCORE_ENGINE_ADMIN_KEY", {"ENGINES": "/none", "RLCORE_ENGINE_API_KEY": "x"}),
    ("engines.sh", "ENGINES", {}),
    ("ray_multinode.sh", "NODE_RANK", {"MASTER_ADDR": "10.0.0.1"}),
])  # fmt: skip
def test_what_is_missing_is_named(stage: Stage, script: str, missing: str, environment: dict[str, str]) -> None:
    done = stage.run(script, "run.yaml", **environment)
    assert done.returncode != 0
    assert missing in done.stderr
    assert list(stage.records.glob("*.json")) == []


PPO = "examples/recipes/llama-3.1-8b-ppo"


def test_ppo_on_two_nodes_trains_on_the_first_and_generates_on_the_second(stage: Stage) -> None:
    """Each node is told what the recipe's files are for."""
    node = {"MASTER_ADDR": "10.0.0.1", "HOST_ADDRESS": "10.0.0.2", "ENGINES": str(stage.folder / "engines")}
    node |= dict(zip(KEYS, ("x", "y"), strict=True))
    script = str(stage.folder / "checkout" / "scripts" / "ppo_8b_2nodes.sh")
    engines = subprocess.Popen([script, "model.path=m"], env={**stage.environment, **node, "NODE_RANK": "1"})
    assert stage.run("ppo_8b_2nodes.sh", "model.path=m", **node, NODE_RANK="0").returncode == 0
    engines.terminate()
    assert engines.wait(10) == 0
    root = stage.folder / "checkout"
    [trainer], [served] = stage.calls("torch.distributed.run"), stage.calls("engine")
    told = trainer["arguments"]
    assert [value_of(told, "--nnodes"), value_of(told, "--nproc-per-node")] == ["1", "8"]
    assert told[told.index("train") + 1 :] == [
        f"{root / PPO}.yaml", "model.path=m", "cluster.launcher=torchrun", "rollout.engine.kind=sglang",
        'rollout.engine.urls=["http://10.0.0.2:30000"]',
    ]  # fmt: skip
    assert served["arguments"][3:6] == [f"{root / PPO}.yaml", f"{root / PPO}.servers.yaml", "model.path=m"]
    assert "cluster.launcher=torchrun" in served["arguments"], "or the trainer's layout is held to one local process"


def test_ppo_on_two_nodes_of_ray(stage: Stage) -> None:
    node = {"MASTER_ADDR": "10.0.0.1", "LAUNCHER": "ray", "NODE_RANK": "0"}
    assert stage.run("ppo_8b_2nodes.sh", "model.path=m", **node).returncode == 0
    [call] = stage.calls("train")
    assert [Path(word).name for word in call["arguments"][3:5]] == ["llama-3.1-8b-ppo.yaml", "llama-3.1-8b-ppo.servers.yaml"]
    done = stage.run("ppo_8b_2nodes.sh", **{**node, "NODE_RANK": "2", "LAUNCHER": "torchrun"})
    assert done.returncode == 2
    assert "got torchrun and 2" in done.stderr


# --- Ray --------------------------------------------------------------------------------------------------------------


def test_the_first_node_is_the_head_and_runs_the_driver(stage: Stage) -> None:
    done = stage.sbatch("ray.sbatch", 3, "run.yaml", "servers.yaml", RAY_ARGS="--num-gpus 2")
    assert done.returncode == 0, done.stderr
    [call] = stage.calls("train")
    assert call["environment"]["NODE_RANK"] == "0"
    assert call["arguments"] == [
        "-m", "rlcore", "train", "run.yaml", "servers.yaml", "cluster.launcher=ray", "cluster.ray.address=10.0.0.1:6379",
    ]  # fmt: skip
    said = (stage.records / "ray.txt").read_text().splitlines()
    assert said.count("start --head --block --node-ip-address 10.0.0.1 --port 6379 --num-gpus 2") == 1
    joined = sorted(line for line in said if line.startswith("start --block"))
    assert joined == [
        f"start --block --address 10.0.0.1:6379 --node-ip-address 10.0.0.{node} --num-gpus 2" for node in (1, 2)
    ], "the stub's own addresses"
    assert not (stage.records / "head").exists(), "the head ends with the run"


def test_the_run_s_exit_code_is_the_first_node_s(stage: Stage) -> None:
    assert stage.run("ray_multinode.sh", "run.yaml", NODE_RANK="0", MASTER_ADDR="10.0.0.1", TRAINER_CODE="4").returncode == 4


def test_a_node_that_finds_no_head_gives_up(stage: Stage) -> None:
    done = stage.run("ray_multinode.sh", "run.yaml", NODE_RANK="1", MASTER_ADDR="10.0.0.1", JOIN_TIMEOUT_S="0")
    assert done.returncode == 2
    assert "no Ray head at 10.0.0.1:6379 within 0 s (JOIN_TIMEOUT_S)" in done.stderr


def test_a_node_that_cannot_join_a_head_that_is_there_says_so(stage: Stage) -> None:
    (stage.records / "head").touch()
    node = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "HOST_ADDRESS": "10.0.0.2"}
    assert stage.run("ray_multinode.sh", "run.yaml", **node, REFUSED="1").returncode == 7


def test_a_signal_to_another_node_ends_what_it_lent(stage: Stage) -> None:
    (stage.records / "head").touch()
    process = subprocess.Popen(
        [str(stage.folder / "checkout" / "scripts" / "ray_multinode.sh"), "run.yaml"],
        env={**stage.environment, "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "HOST_ADDRESS": "10.0.0.2"},
    )
    deadline, said = time.monotonic() + 30, stage.records / "ray.txt"
    while not (said.exists() and "start --block" in said.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM, "as the stub ends"


def test_a_signal_to_the_first_node_is_the_run_s_to_answer(stage: Stage) -> None:
    """The cluster is there until the run has ended: it saves meanwhile."""
    script = stage.folder / "python"
    script.write_text(
        f"#!{sys.executable} -S\n"
        "import os, signal, sys, time\n"
        "head = os.path.join(os.environ['RECORDS'], 'head')\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(130 if os.path.exists(head) else 1)))\n"
        "open(os.environ['RECORDS'] + '/running', 'w').close()\n"
        "time.sleep(30)\n"
    )
    process = subprocess.Popen(
        [str(stage.folder / "checkout" / "scripts" / "ray_multinode.sh"), "run.yaml"],
        env={**stage.environment, "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"},
    )
    deadline = time.monotonic() + 30
    while not (stage.records / "running").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 130
    assert not (stage.records / "head").exists()
