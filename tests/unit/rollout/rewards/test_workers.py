"""Reward workers: a function that misbehaves costs its sample, and leaks and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.config.sections.reward import RewardConfig
from rollout.asyncio_utils import within
from rollout.rewards.base import RewardFailure, Score, Verdict
from rollout.rewards.pool import RewardPool, Worker

TIMEOUT_S = 30.0
OOM_SCORE = Path("/proc/self/oom_score_adj")


def scores(
    function: str,
    *samples: Any,
    timeout_s: float = TIMEOUT_S,
    args: dict[str, Any] | None = None,
    **limits: Any,
) -> list[Score]:
    """Score samples one after the other in one worker; nothing may be left running."""

    async def scenario() -> list[Score]:
        functions = {"f": (f"hostile_rewards:{function}", args or {})}
        pool = RewardPool(functions, 1, timeout_s, **limits)
        try:
            return [await asyncio.wait_for(pool.score("f", sample), 60) for sample in samples]
        finally:
            await asyncio.wait_for(pool.close(), 30)

    found = asyncio.run(scenario())
    assert psutil.Process().children() == []
    return found


def verdict(score: Score) -> Verdict:
    assert isinstance(score, Verdict), score
    return score


def failure(score: Score) -> RewardFailure:
    assert isinstance(score, RewardFailure), score
    return score


def test_a_worker_gets_no_keys(sample, monkeypatch):
    for name in ("RLCORE_ENGINE_ADMIN_KEY", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("JUDGE_KEY", "asked for")
    (found,) = scores("environment", sample("x"), environment=("JUDGE_KEY",))
    names = set(verdict(found).info["names"])
    assert {"PATH", "PYTHONPATH", "OMP_NUM_THREADS", "JUDGE_KEY"} <= names
    assert not [name for name in names if name.startswith(("RLCORE", "WANDB", "HF_T", "AWS"))]


def test_a_variable_that_is_not_set_is_said(sample, caplog):
    scores("environment", sample("x"), environment=("NO_SUCH_NAME",))
    assert "reward.environment names NO_SUCH_NAME, which is not set" in caplog.text


def test_environment_takes_names_alone():
    with pytest.raises(ValueError, match=r"names of variables alone, got 'KEY'"):
        RewardConfig.model_validate({"environment": ["KEY=value"]})


def test_standard_input_is_empty(sample):
    """Also where ours has something to read."""
    read, write = os.pipe()
    os.write(write, b"not for a reward")
    os.close(write)
    ours = os.dup(0)
    os.dup2(read, 0)
    try:
        (found,) = scores("reads_stdin", sample("x"))
    finally:
        os.dup2(ours, 0)
        os.close(ours)
        os.close(read)
    assert verdict(found).info == {"read": "", "lowest": "/dev/null"}


def test_what_a_call_leaves_ends_with_it(sample, tmp_path):
    first, second = (sample("x", folder=str(tmp_path / name)) for name in "ab")
    for name in "ab":
        (tmp_path / name).mkdir()
    found = scores("leaves_processes", first, second)
    for score in found:
        assert not [pid for pid in verdict(score).info["pids"] if psutil.pid_exists(pid)]


def test_a_timeout_ends_the_whole_tree(sample, tmp_path, monkeypatch):
    pids_file = tmp_path / "pids"

    async def once_it_hangs(seconds, work, describe):
        """Its time is up when it has told what it started."""
        task = asyncio.ensure_future(work)
        while not task.done() and not (pids_file.exists() and pids_file.read_text().endswith("]")):
            await asyncio.sleep(0.01)
        return await within(0.0, task, describe)

    monkeypatch.setattr("rollout.rewards.pool.within", once_it_hangs)
    monkeypatch.setattr("rollout.asyncio_utils.STRAYS_S", 60.0)
    (found,) = scores("hangs_with_children", sample("x", folder=str(tmp_path)), timeout_s=5)
    assert failure(found).kind == "timeout"
    pids = json.loads(pids_file.read_text())
    deadline = time.monotonic() + 60
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)  # init takes the orphan away
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_call_that_was_given_up_answers_no_other(sample, tmp_path):
    """Its answer comes when the next call waits: that would be one behind for ever after."""

    async def scenario() -> list[Score]:
        functions = {"f": ("hostile_rewards:waits_for_a_file", {})}
        pool = RewardPool(functions, 1, TIMEOUT_S)
        texts = [sample("x" * size, folder=str(tmp_path)) for size in (1, 2, 3)]
        try:
            given_up = asyncio.create_task(pool.score("f", texts[0]))
            async with asyncio.timeout(60):
                while not (tmp_path / "begun").exists():
                    await asyncio.sleep(0.01)
                given_up.cancel()
                (tmp_path / "go").touch()
                return [await pool.score("f", text) for text in texts[1:]]
        finally:
            await asyncio.wait_for(pool.close(), 30)

    assert [verdict(score).score for score in asyncio.run(scenario())] == [2.0, 3.0]


def test_children_do_not_inherit_the_socket(sample):
    (found,) = scores("child_sees", sample("x"))
    info = verdict(found).info
    assert info["forked"] == []
    assert "socket" not in info["executed"]


@pytest.mark.parametrize("text", ["forged", "rubbish", "list", "huge"])
def test_a_write_to_descriptors_costs_its_sample_alone(sample, text):
    bad, good = scores("writes_to_every_descriptor", sample(text), sample("good"))
    assert "its worker process answered nonsense" in failure(bad).reason
    assert verdict(good).score == 0.5


def test_memory_beyond_the_limit_costs_its_sample_alone(sample):
    bad, good = scores("eats_memory", sample("eat"), sample("x"), memory_gb=0.75)
    assert "raised MemoryError" in failure(bad).reason
    assert "hostile_rewards.py" in failure(bad).place
    assert failure(bad).reason.endswith("(reward.memory_gb is 0.75)")
    assert verdict(good).score == 1.0


@pytest.mark.skipif(not OOM_SCORE.exists(), reason="the kernel is not Linux")
def test_where_the_machine_has_no_memory_left_a_worker_ends_before_the_trainer(sample):
    (found,) = scores("oom_score", sample("x"))
    assert verdict(found).score == 1000.0 > float(OOM_SCORE.read_text())


def test_an_exit_is_an_error_of_its_sample(sample):
    first, second = scores("exits", sample("x"), sample("x"))
    assert failure(first).reason == "raised SystemExit: I give up"
    assert first == second


def test_prints_go_to_the_log(sample, capfd):
    (found,) = scores("prints", sample("x"))
    assert verdict(found).score == 1.0
    written = capfd.readouterr()
    assert len(written.err) >= 50_000_000
    assert written.out == ""


def test_a_reason_is_text_that_can_be_recorded(sample):
    (found,) = scores("unprintable", sample("x"))
    assert failure(found).reason == "raised ValueError: half a character: ?"


def test_one_object_serves_all_calls_and_its_process_is_no_stray(sample):
    found = scores("Counter", *[sample("x")] * 3, args={"start": 4})
    assert [verdict(score).score for score in found] == [5.0, 6.0, 7.0]


def test_a_socket_that_outlives_the_worker_is_no_wait(sample, tmp_path: Path):
    """A child made below Python keeps the socket; the death of the worker counts all the same."""
    start = time.monotonic()
    (found,) = scores("dies_but_a_child_keeps_the_socket", sample("x"))
    assert failure(found).reason == "its worker process died with exit code 9"
    assert time.monotonic() - start < TIMEOUT_S


def test_what_a_dying_worker_leaves_ends_with_it(sample, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("rollout.rewards.pool.WORKER_ENDS_S", 60.0)
    (found,) = scores("dies_and_leaves_a_child", sample("x", folder=str(tmp_path)))
    assert failure(found).reason == "its worker process died with exit code 9"
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 30
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it sleeps on"
        time.sleep(0.05)


SCORES = """
import asyncio, pickle, sys
from rollout.rewards.pool import RewardPool
pool = RewardPool({"f": ("hostile_rewards:waits_for_a_file", {})}, 1, 600.0)
asyncio.run(pool.score("f", pickle.load(open(sys.argv[1], "rb"))))
"""


def test_a_worker_in_a_call_ends_with_the_service(sample, tmp_path: Path):
    (tmp_path / "sample").write_bytes(pickle.dumps(sample("x", folder=str(tmp_path))))
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    service = subprocess.Popen(
        [sys.executable, "-c", SCORES, tmp_path / "sample"], env={**os.environ, **paths}
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "begun").exists():
            assert service.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        workers = psutil.Process(service.pid).children(recursive=True)
    finally:
        service.kill()
        service.wait()
    assert workers
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_worker_that_does_not_end_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that hangs in the kernel, on a dead file server."""

    class Stuck:
        pid = 2**22 + 1  # beyond the largest: no such process
        returncode = None

        async def wait(self) -> int:
            await asyncio.Event().wait()
            return 0

    class Closed:
        def close(self) -> None:
            pass

        async def wait_closed(self) -> None:
            pass

    monkeypatch.setattr("rollout.asyncio_utils.REAP_S", 0.05)
    monkeypatch.setattr("rollout.asyncio_utils.kill_tree", lambda *_, **__: None)
    stuck: Any = Stuck()
    closed: Any = Closed()

    async def scenario() -> int | None:
        return await asyncio.wait_for(Worker(stuck, closed, closed).kill(), TIMEOUT_S)

    assert asyncio.run(scenario()) is None
    assert f"the reward worker {Stuck.pid} cannot be ended" in caplog.text
