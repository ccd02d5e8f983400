"""The end of a run: result, trackers, and what a restarted rank finds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from rlcore.errors import DataError
from rlcore.launch import process
from rlcore.launch.process import Process, _signals
from rlcore.launch.rank import finish
from rlcore.launch.torchrun_attempts import FIRST, RunHasEnded, join_attempt
from rlcore.runs.directory import Status
from rlcore.trainer.loop import Trainer
from rlcore.trainer.rank0 import Outcome
from rlcore.trainer.rank_sync import RankSync
from tests.ports import free_port


class RankZero:
    """Records the calls."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.tracker = self
        self.on_close = lambda: None
        self.heartbeat = SimpleNamespace(ignores_peers=False, cleaning_up=False)
        self.refuses: Exception | None = None

    def conclude(self, status: Status, *, reason: str = "") -> None:
        self.done.append(f"result: {status}")
        if self.refuses is not None:
            raise self.refuses

    def close(self, status: Status) -> None:
        self.on_close()
        if self.heartbeat.ignores_peers:
            self.done.append("ignores peers")
        self.done.append(f"closed: {status}")


@pytest.fixture
def rank0() -> RankZero:
    return RankZero()


def end(rank0: RankZero, store: dist.Store, train: Any) -> Outcome:
    sync = RankSync(dist.PrefixStore(FIRST.prefix, store), 0, 1, timeout_s=5.0)
    config = SimpleNamespace(
        run=SimpleNamespace(dir="runs", name="a"), checkpoint=SimpleNamespace(export_hf=False),
        tracking=SimpleNamespace(hub=SimpleNamespace(repo=None)),
    )  # fmt: skip
    trainer = SimpleNamespace(config=config, rank0=rank0, train=train)
    heartbeat = cast(Any, rank0.heartbeat)
    process = Process(torch.device("cpu"), sync, cast(Any, None), heartbeat=heartbeat)
    return finish(cast(Trainer, trainer), process)


@pytest.mark.parametrize(
    ("status", "code"), [("completed", 0), ("early_stopped", 0), ("interrupted", 130)]
)
def test_a_rank_that_is_restarted_after_the_result_finds_it(
    rank0: RankZero, status: Status, code: int
) -> None:
    """An upload takes minutes; a rank that dies meanwhile makes torchrun start them all."""
    store = dist.HashStore()
    join_attempt(store, 0, 1, timeout_s=1)
    told: list[int] = []

    def start_again() -> None:
        with pytest.raises(RunHasEnded) as ended:
            join_attempt(store, 0, 1, timeout_s=1)
        told.append(ended.value.code)

    rank0.on_close = start_again
    end(rank0, store, lambda: Outcome(status, 3))
    assert rank0.done == [f"result: {status}", "ignores peers", f"closed: {status}"]
    assert told == [code]


@pytest.mark.parametrize(
    "second", [OSError("no space left"), DataError("metrics.jsonl:2: not JSON")]
)
def test_the_first_error_is_raised_where_no_result_can_be_written(
    rank0: RankZero, second: Exception
) -> None:
    def fail() -> Outcome:
        raise ArithmeticError("the first")

    store = dist.HashStore()
    join_attempt(store, 0, 1, timeout_s=1)
    rank0.refuses = second
    with pytest.raises(ArithmeticError, match="the first"):
        end(rank0, store, fail)
    assert rank0.done == ["result: failed", "closed: failed"]
    assert join_attempt(store, 0, 1, timeout_s=1).number == 1, "a run that failed may go on"


def test_a_signal_is_answered_at_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step goes on for minutes; without a word people send a second signal.

    The first may come twice, to the ranks and from their launcher, as where a service is stopped.
    """
    sync = RankSync(dist.PrefixStore(FIRST.prefix, dist.HashStore()), 0, 1, timeout_s=5.0)
    monkeypatch.setattr(process, "SAME_SIGNAL_S", 600.0)
    with _signals(sync, has_steps=True):
        os.kill(os.getpid(), signal.SIGTERM)
        assert sync.interrupt_requested
        assert capfd.readouterr().err == (
            "rlcore: stopping after this step, which may take a while; a second signal ends it\n"
        )
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(process, "SAME_SIGNAL_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_interrupts_at_once_what_has_no_steps(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation would go on to its end, and be killed or end as if nobody had asked."""
    sync = RankSync(dist.PrefixStore(FIRST.prefix, dist.HashStore()), 0, 1, timeout_s=5.0)
    monkeypatch.setattr(process, "SAME_SIGNAL_S", 600.0)
    with _signals(sync, has_steps=False):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # the same, from the launcher: the end goes on
    assert capfd.readouterr().err == ""


LATE_RANK = """
import sys
import time
from rlcore.config.load import load_config
from rlcore.launch.process import join

config = load_config([], sys.argv[1:]).config
with join(config) as process:
    if process.sync.rank:
        time.sleep(2)
    process.sync.run_on_rank0("the end", lambda: None)
"""


def test_the_rank_that_holds_the_store_leaves_last(tiny_model: Path) -> None:
    """Ranks without a launcher: a busy machine may not let one look before the others are gone."""
    given = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    arguments = [
        "run.name=late",
        f"model.path={tiny_model}",
        "data.paths=none",
        "algorithm.loss.name=sft",
        "training.steps=1",
        "training.batch_size=1",
    ]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LATE_RANK, *arguments],
            env={**os.environ, **given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
