"""Ranks that pass buckets on to an engine hold up nobody, with many hardware queues or with one.

The trainer's part is one broadcast a bucket; test_publication_rules.py has the real one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.weight_sync.sender import GroupSender
from tests.nccl_rules.publication_streams import HANGS_S, LIMIT_S, publication
from tests.nccl_rules.recording import broadcasts_of
from tests.nccl_rules.streams import Queues

BUCKETS = 8


class Ahead(GroupSender):
    """A rank that helps, and does not wait for what it passes on."""

    def send(self, bucket: Any, flat: torch.Tensor, stopped: Any) -> None:
        if self._orders[0].rank:
            self._start(self._orders[0], bucket, flat)
        else:
            super().send(bucket, flat, stopped)


@pytest.mark.parametrize("queues", Queues)
@pytest.mark.parametrize(
    ("world", "members"),
    [(3, (1,)), (3, (1, 2)), (2, (1, 0)), (3, (1, 2, 0)), (8, (1, 2, 3, 0)), (8, (4, 5, 6, 7))],
)
def test_ranks_that_help_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch, world: int, members: tuple[int, ...], queues: Queues
) -> None:
    orders = broadcasts_of(world, BUCKETS)
    assert publication(monkeypatch, orders, [members], queues=queues).run(LIMIT_S)


def test_one_that_does_not_wait_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """So this shows what it is for."""
    made = publication(monkeypatch, broadcasts_of(3, BUCKETS), [(1, 2)], sender=Ahead)
    assert not made.run(HANGS_S)
    made.end()
