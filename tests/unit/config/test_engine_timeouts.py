"""The time that engines may take, and the time that other ranks wait for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlcore.config.load import Loaded
from rlcore.launch.compose import all_engines_timeout_s

TWO = ("policy.parallel.tensor=2", "cluster.processes_per_node=2")


@pytest.mark.parametrize(
    ("overrides", "remarks"),
    [
        (TWO, 0),
        ([*TWO, "rollout.engine.update_timeout_s=555"], 0),
        ([*TWO, "rollout.engine.update_timeout_s=556"], 1),
        ([*TWO, "cluster.collective_timeout_s=300"], 1),
        (["rollout.engine.update_timeout_s=900"], 0),  # nobody waits for the only rank
    ],
)
def test_an_engine_may_not_hold_up_a_collective(
    load: Callable[..., Loaded], overrides: list[str], remarks: int
) -> None:
    notes = [note for note in load(*overrides).notes if "rollout.engine.update_timeout_s" in note]
    assert len(notes) == remarks
    assert all("cluster.collective_timeout_s" in note for note in notes)


def test_the_other_ranks_wait_for_every_answer_of_a_publication(
    load: Callable[..., Loaded],
) -> None:
    config = load("rollout.engine.update_timeout_s=100").config
    engine = config.rollout.engine
    without = engine.start_timeout_s + engine.restart.max_backoff_s + engine.request_timeout_s
    assert all_engines_timeout_s(config) >= without + 6 * 100
