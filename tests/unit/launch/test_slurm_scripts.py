"""scripts/slurm: the calls on each node, the end of a job, and its requeue. Slurm is stubbed."""

from __future__ import annotations

import os

import pytest

from tests.script_stage import KEYS, Stage, value_of
from tests.slurm_stubs import job

pytestmark = pytest.mark.rest


def test_slurm_nodes_are_split_into_trainers_and_engines(stage: Stage) -> None:
    given = {"ENGINE_NODES": "2", "ENGINES_PER_NODE": "4", "SERVERS": "servers.yaml"}
    done = stage.sbatch("torchrun.sbatch", 4, "run.yaml", "a.b=1", **given)
    assert done.returncode == 0, done.stderr
    trainers = stage.calls("rlcore.launch.torchrun")
    engines = stage.calls("engine")
    assert len(trainers) == len(engines) == 2
    for node, call in enumerate(trainers):
        arguments = call["arguments"]
        flags = {
            "--nnodes": "2",
            "--node-rank": str(node),
            "--nproc-per-node": "8",
            "--master-addr": "10.0.0.1",
            "--master-port": "29400",
            "--max-restarts": "3",
        }
        assert {flag: value_of(arguments, flag) for flag in flags} == flags
        assert arguments[arguments.index("rlcore") : -1] == [
            *("rlcore", "train", "run.yaml", "a.b=1"),
            *("cluster.launcher=torchrun", "rollout.engine.kind=sglang"),
        ]
        assert arguments[-1].startswith(f"rollout.engine.urls_file={stage.folder}")
    for call, address in zip(engines, ("10.0.0.3", "10.0.0.4"), strict=True):
        assert call["arguments"][:7] == [
            "-m", "rlcore", "engine", "run.yaml", "a.b=1", "servers.yaml", "rollout.engine.count=4",
        ]  # fmt: skip
        assert f"rollout.engine.host={address}" in call["arguments"]


@pytest.mark.parametrize(
    ("script", "word"), [("torchrun.sbatch", "engine"), ("ray.sbatch", "train")]
)
def test_tasks_run_in_containers_and_after_the_site_s_own_lines(
    stage: Stage, script: str, word: str
) -> None:
    given = {
        "SRUN_ARGS": "--container-image=rl.sqsh --mpi=none",
        "PRELUDE": "export SITE='my site'; test $# = 0 || SITE=arguments; set -- other; cd /",
    }
    done = stage.sbatch(script, 2, "run.yaml", "a.b=1", ENGINE_NODES="1", **given)
    assert done.returncode == 0, done.stderr
    words = [word, *(["rlcore.launch.torchrun"] if word == "engine" else [])]
    calls = [call for name in words for call in stage.calls(name)]
    assert calls
    for call in calls:
        assert call["environment"]["SITE"] == "my site"
        assert call["environment"]["IMAGE"] == "rl.sqsh"


@pytest.mark.parametrize(
    ("script", "word"), [("torchrun.sbatch", "rlcore.launch.torchrun"), ("ray.sbatch", "train")]
)
def test_a_task_ends_with_the_site_s_own_line_that_fails(
    stage: Stage, script: str, word: str
) -> None:
    done = stage.sbatch(script, 2, "run.yaml", ENGINE_NODES="0", PRELUDE="true && (exit 4)")
    assert done.returncode == 4
    assert "PRELUDE ended with exit code 4: true && (exit 4)" in done.stderr
    assert stage.calls(word) == []


def test_keys_are_made_once_and_stand_in_no_command_line(stage: Stage) -> None:
    assert stage.sbatch("torchrun.sbatch", 2, "run.yaml", ENGINE_NODES="1").returncode == 0
    calls = [*stage.calls("rlcore.launch.torchrun"), *stage.calls("engine")]
    pairs = {tuple(call["environment"][key] for key in KEYS) for call in calls}
    [(api, admin)] = pairs
    assert len(calls) == 2
    assert len(api) > 40 < len(admin)
    assert api != admin
    assert not any(
        key in word for call in calls for word in call["arguments"] for key in (api, admin)
    )


def test_engines_end_with_the_trainer_whose_exit_code_is_the_jobs(stage: Stage) -> None:
    done = stage.sbatch("torchrun.sbatch", 2, "run.yaml", ENGINE_NODES="1", TRAINER_CODE="3")
    assert done.returncode == 3
    [engine] = stage.calls("engine")
    with pytest.raises(ProcessLookupError):
        os.kill(engine["pid"], 0)
    assert list((stage.folder / "checkout" / "runs").rglob("*.json")) == []


@pytest.mark.parametrize(
    ("script", "word"), [("torchrun.sbatch", "rlcore.launch.torchrun"), ("ray.sbatch", "train")]
)
@pytest.mark.parametrize(("given", "first", "again"), [
    ([], [], ["--resume"]),
    (["--overwrite"], ["--overwrite"], ["--resume"]),
    (["--resume"], ["--resume"], ["--resume"]),
])  # fmt: skip
def test_a_job_that_was_put_back_resumes(
    stage: Stage, script: str, word: str, given: list[str], first: list[str], again: list[str]
) -> None:
    for restarts in ("0", "1"):
        done = stage.sbatch(
            script, 1, "run.yaml", *given, "a.b=1", ENGINE_NODES="0", SLURM_RESTART_COUNT=restarts
        )
        assert done.returncode == 0, done.stderr
    flags = [
        [text for text in call["arguments"] if text in ("--resume", "--overwrite")]
        for call in stage.calls(word)
    ]
    assert sorted(flags) == sorted([first, again])
    assert all({"run.yaml", "a.b=1"} <= set(call["arguments"]) for call in stage.calls(word))
    assert ("not overwritten again" in done.stderr) == ("--overwrite" in given)


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_engines_ignore_resume_and_overwrite(stage: Stage, flag: str) -> None:
    done = stage.sbatch("torchrun.sbatch", 2, "run.yaml", flag, "a.b=1", ENGINE_NODES="1")
    assert done.returncode == 0, done.stderr
    [trainer] = stage.calls("rlcore.launch.torchrun")
    [engine] = stage.calls("engine")
    assert flag in trainer["arguments"]
    assert flag not in engine["arguments"]
    assert engine["arguments"][3:5] == ["run.yaml", "a.b=1"]


def test_engines_that_cannot_begin_end_the_job(stage: Stage) -> None:
    """The trainer would wait for them, its nodes idle, for ENGINES_TIMEOUT_S."""
    done = stage.sbatch("torchrun.sbatch", 4, "run.yaml", ENGINE_NODES="2", ENGINE_CODE="7")
    assert done.returncode == 7
    assert "no engine is left (exit code 7, see above): the trainer is ended" in done.stderr
    assert stage.calls("rlcore.launch.torchrun") == []


def test_an_engine_node_that_is_lost_later_leaves_the_others(stage: Stage) -> None:
    lost = {"ENGINE_NODES": "2", "LOST": "10.0.0.3", "TRAINER_S": "2"}
    done = stage.sbatch("torchrun.sbatch", 3, "run.yaml", **lost)
    assert done.returncode == 0, done.stderr
    assert "no engine is left" not in done.stderr


def test_the_last_engine_node_that_is_lost_ends_the_job(stage: Stage) -> None:
    lost = {"ENGINE_NODES": "2", "LOST": "10.0.0.2 10.0.0.3", "TRAINER_S": "50"}
    done = stage.sbatch("torchrun.sbatch", 3, "run.yaml", **lost)
    assert done.returncode == 5, done.stderr
    [trainer] = stage.calls("rlcore.launch.torchrun")
    with pytest.raises(ProcessLookupError):
        os.kill(trainer["pid"], 0)


def test_without_engine_nodes_there_are_no_urls(stage: Stage) -> None:
    assert stage.sbatch("torchrun.sbatch", 2, "run.yaml", ENGINE_NODES="0").returncode == 0
    assert not any(
        "urls" in word
        for call in stage.calls("rlcore.launch.torchrun")
        for word in call["arguments"]
    )
    assert stage.calls("engine") == []


def test_a_job_without_a_node_to_train_on_is_refused(stage: Stage) -> None:
    done = stage.sbatch("torchrun.sbatch", 2, "run.yaml", ENGINE_NODES="2")
    assert done.returncode == 2
    assert "2 nodes, ENGINE_NODES=2: none is left to train" in done.stderr


@pytest.mark.parametrize("of_the_user", ["environment", "file", "home", "nobody"])
def test_ray_s_token_is_the_user_s_where_there_is_one(stage: Stage, of_the_user: str) -> None:
    """Else nobody but the job could ask the cluster how its runs are."""
    given = {
        "environment": {"RAY_AUTH_TOKEN": "mine"},
        "file": {"RAY_AUTH_TOKEN_PATH": "/shared/token"},
    }.get(of_the_user, {})
    if of_the_user == "home":
        (stage.folder / ".ray").mkdir()
        (stage.folder / ".ray" / "auth_token").write_text("mine\n")
    done = stage.sbatch("ray.sbatch", 1, "run.yaml", **given)
    assert done.returncode == 0, done.stderr
    [call] = stage.calls("train")
    assert call["environment"]["RAY_AUTH_MODE"] == "token"
    token = call["environment"]["RAY_AUTH_TOKEN"]
    if of_the_user == "nobody":
        assert len(token) > 40
        assert not any(token in word for word in call["arguments"])
    else:
        assert token == (None if of_the_user == "file" else "mine"), "Ray reads the file itself"


def test_sigterm_to_the_job_s_own_script_ends_its_steps(stage: Stage) -> None:
    given = {**job(2), "ENGINE_NODES": "1", "TRAINER_S": "50"}
    process = stage.start("slurm/torchrun.sbatch", "run.yaml", **given)
    stage.wait_for((stage.records / "training").exists, "nobody trains")
    stage.wait_until_it_waits(process)
    process.terminate()
    assert process.wait(20) != 0
    for call in (*stage.calls("rlcore.launch.torchrun"), *stage.calls("engine")):
        with pytest.raises(ProcessLookupError):
            os.kill(call["pid"], 0)
