"""Times that the loop counts, and checkpoints that end while it trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.trainer.loop import Trainer


class Background:
    """A checkpoint that is written in the background: the slowest rank took 2.5 s."""

    is_writing = True
    ended = False

    def poll(self) -> float | None:
        if not self.ended:
            return None
        self.is_writing = False
        return 2.5


@pytest.fixture
def loop() -> Any:
    loop: Any = object.__new__(Trainer)
    loop.seconds = {}
    loop.sync = SimpleNamespace(doing="", track="rank 0")
    loop.checkpointer = Background()
    return loop


def test_a_checkpoint_in_the_background_counts_once_every_rank_has_finished(loop: Any) -> None:
    """It does not wait for the next one: a run that is killed meanwhile would not have it."""
    loop.poll_checkpoint()
    assert "checkpoint_write" not in loop.seconds
    loop.checkpointer.ended = True
    loop.poll_checkpoint()
    assert not loop.checkpointer.is_writing
    assert loop.seconds["checkpoint_write"] == 2.5
    loop.poll_checkpoint()
    assert loop.seconds["checkpoint_write"] == 2.5


def test_the_times_of_a_phase_add_up(loop: Any) -> None:
    with loop.clock("training"):
        pass
    first = loop.seconds["training"]
    with loop.clock("training"):
        assert loop.sync.doing == "training"
    assert loop.seconds["training"] > first > 0
