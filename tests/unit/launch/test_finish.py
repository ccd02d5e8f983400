"""The end of a run: what is told to whom, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from rlcore.errors import DataError
from rlcore.launch.attempts import FIRST, RunHasEnded, join_attempt
from rlcore.launch.finish import finish
from rlcore.launch.process import Process
from rlcore.runs.directory import Status
from rlcore.trainer.loop import Trainer
from rlcore.trainer.rank0 import Outcome
from rlcore.trainer.rank_sync import Control


class Desk:
    """What is done at it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.tracker = self
        self.on_close = lambda: None
        self.refuses: Exception | None = None

    def conclude(self, status: Status, *, reason: str = "") -> None:
        self.done.append(f"result: {status}")
        if self.refuses is not None:
            raise self.refuses

    def close(self, status: Status) -> None:
        self.on_close()
        self.done.append(f"closed: {status}")


@pytest.fixture
def desk() -> Desk:
    return Desk()


def end(desk: Desk, store: dist.Store, train: Any) -> Outcome:
    control = Control(dist.PrefixStore(FIRST.prefix, store), 0, 1)
    config = SimpleNamespace(
        run=SimpleNamespace(dir="runs", name="a"), checkpoint=SimpleNamespace(export_hf=False),
        tracking=SimpleNamespace(hub=SimpleNamespace(repo=None)),
    )  # fmt: skip
    trainer = SimpleNamespace(config=config, desk=desk, main=desk, patience=5.0, train=train)
    pulse = SimpleNamespace(alone=lambda: desk.done.append("alone"), leaving=lambda: None)
    process = Process(0, 1, 0, torch.device("cpu"), control, cast(Any, None), pulse=cast(Any, pulse))
    return finish(cast(Trainer, trainer), process)


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("early_stopped", 0), ("interrupted", 130)])
def test_who_is_started_again_once_there_is_a_result_is_told_so(desk: Desk, status: Status, code: int) -> None:
    """An upload takes minutes; a rank that dies meanwhile makes torchrun start them all."""
    store = dist.HashStore()
    join_attempt(store, 0, 1, timeout_s=1)
    told: list[int] = []

    def start_again() -> None:
        with pytest.raises(RunHasEnded) as ended:
            join_attempt(store, 0, 1, timeout_s=1)
        told.append(ended.value.code)

    desk.on_close = start_again
    end(desk, store, lambda: Outcome(status, 3))
    assert desk.done == [f"result: {status}", "alone", f"closed: {status}"]
    assert told == [code]


@pytest.mark.parametrize("second", [OSError("no space left"), DataError("metrics.jsonl:2: not JSON")])
def test_what_failed_first_is_raised_where_no_result_can_be_written(desk: Desk, second: Exception) -> None:
    def fail() -> Outcome:
        raise ArithmeticError("the first")

    store = dist.HashStore()
    join_attempt(store, 0, 1, timeout_s=1)
    desk.refuses = second
    with pytest.raises(ArithmeticError, match="the first"):
        end(desk, store, fail)
    assert desk.done == ["result: failed", "closed: failed"]
    assert join_attempt(store, 0, 1, timeout_s=1).number == 1, "a run that failed may go on"
