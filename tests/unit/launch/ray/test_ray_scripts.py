"""scripts/ray_multinode.sh and slurm/ray.sbatch: Ray nodes and signals, with Ray stubbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.script_stage import Stage


def test_the_first_node_is_the_head_and_runs_the_driver(stage: Stage) -> None:
    done = stage.sbatch("ray.sbatch", 3, "run.yaml", "servers.yaml", RAY_ARGS="--num-gpus 2")
    assert done.returncode == 0, done.stderr
    [call] = stage.calls("train")
    assert call["environment"]["NODE_RANK"] == "0"
    assert call["arguments"] == [
        "-m",
        "rlcore",
        "train",
        "run.yaml",
        "servers.yaml",
        "cluster.launcher=ray",
        "cluster.ray.address=10.0.0.1:6379",
    ]
    said = (stage.records / "ray.txt").read_text().splitlines()
    assert (
        said.count("start --head --block --node-ip-address 10.0.0.1 --port 6379 --num-gpus 2") == 1
    )
    joined = sorted(line for line in said if line.startswith("start --block"))
    assert joined == [
        f"start --block --address 10.0.0.1:6379 --node-ip-address 10.0.0.{node} --num-gpus 2"
        for node in (1, 2)
    ], "the stub's own addresses"
    assert not (stage.records / "head").exists(), "the head ends with the run"


def test_the_run_s_exit_code_is_the_first_node_s(stage: Stage) -> None:
    assert (
        stage.run(
            "ray_multinode.sh", "run.yaml", NODE_RANK="0", MASTER_ADDR="10.0.0.1", TRAINER_CODE="4"
        ).returncode
        == 4
    )


def test_a_node_that_finds_no_head_gives_up(stage: Stage) -> None:
    done = stage.run(
        "ray_multinode.sh", "run.yaml", NODE_RANK="1", MASTER_ADDR="10.0.0.1", JOIN_TIMEOUT_S="0"
    )
    assert done.returncode == 2
    assert "no Ray head at 10.0.0.1:6379 within 0 s (JOIN_TIMEOUT_S)" in done.stderr


def test_a_node_that_cannot_join_a_head_that_is_there_says_so(stage: Stage) -> None:
    (stage.records / "head").touch()
    node = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "HOST_ADDRESS": "10.0.0.2"}
    assert stage.run("ray_multinode.sh", "run.yaml", **node, REFUSED="1").returncode == 7


NODE = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "HOST_ADDRESS": "10.0.0.2"}


def send(process: subprocess.Popen[bytes], how: str) -> None:
    """Signal one process, as Slurm and `kill` do, or all of a terminal, as Ctrl-C does."""
    if how == "SIGTERM":
        process.terminate()
    else:
        os.killpg(process.pid, signal.SIGINT)


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
def test_a_signal_to_another_node_ends_what_it_lent(stage: Stage, how: str) -> None:
    (stage.records / "head").touch()
    process = stage.start("ray_multinode.sh", "run.yaml", **NODE)
    said = stage.records / "ray.txt"
    stage.wait_for(
        lambda: said.exists() and "start --block" in said.read_text(), "the node has not joined"
    )
    stage.wait_until_it_waits(process)
    send(process, how)
    assert process.wait(20) == 128 + signal.SIGTERM, "as the stub ends"


def test_ctrl_c_ends_the_wait_for_a_head(stage: Stage) -> None:
    process = stage.start("ray_multinode.sh", "run.yaml", **NODE, SLOW="1")
    stage.wait_for((stage.records / "checking").exists, "the head was not looked for")
    send(process, "Ctrl-C")
    assert process.wait(20) == 128 + signal.SIGINT


# As `rlcore train`: the first signal saves, if the cluster is there; a second one ends it at once.
DRIVER = f"""#!{sys.executable} -S
import os, signal, sys, time
records, heard = os.environ["RECORDS"], []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: heard.append(number))
open(os.path.join(records, "running"), "w").close()
while not heard:
    time.sleep(0.05)
until = time.monotonic() + 1
while time.monotonic() < until:
    time.sleep(0.05)
sys.exit(130 if len(heard) == 1 and os.path.exists(os.path.join(records, "head")) else 1)
"""


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
def test_a_signal_to_the_first_node_is_the_run_s_to_answer(stage: Stage, how: str) -> None:
    """Once; and the cluster is there until the run has ended: it saves meanwhile."""
    (stage.folder / "python").write_text(DRIVER)
    process = stage.start("ray_multinode.sh", "run.yaml", NODE_RANK="0", MASTER_ADDR="10.0.0.1")
    stage.wait_for((stage.records / "running").exists, "the run has not begun")
    stage.wait_until_it_waits(process)
    send(process, how)
    assert process.wait(20) == 130
    assert not (stage.records / "head").exists()
