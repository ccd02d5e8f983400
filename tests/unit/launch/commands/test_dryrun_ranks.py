"""Which ranks a dry run shows, and how many micro-batches show a stage's peak."""

from __future__ import annotations

import pytest

from rlcore.errors import UserError
from rlcore.launch.commands.dryrun import _ranks
from rlcore.planning.activations import micro_batches_in_flight
from rlcore.planning.memory import Layout


@pytest.mark.parametrize(
    ("layout", "world", "ranks"),
    [
        (Layout(), 1, [0]),
        (Layout(data=8), 8, [0]),
        (Layout(context=2, data=4), 8, [0, 7]),
        (Layout(pipeline=2, data=4), 8, [0, 7]),
        (Layout(pipeline=4, data=2), 8, [0, 4, 7]),
    ],
)
def test_by_default_a_rank_of_the_first_the_middle_and_the_last_stage(
    layout: Layout, world: int, ranks: list[int]
) -> None:
    assert _ranks(layout, world, None) == ranks


def test_a_rank_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match="--rank: got 8, expected 0 to 7"):
        _ranks(Layout(data=8), 8, [8])


def test_a_stage_shows_its_peak_once_its_schedule_has_run_ahead() -> None:
    plain = Layout(pipeline=4)
    assert [micro_batches_in_flight(plain, 16, stage) for stage in range(4)] == [4, 3, 2, 1]
    # of two stages with two chunks each, the first runs 5 chunks ahead: of 4 micro-batches
    virtual = Layout(pipeline=2, virtual_pipeline=2)
    assert [micro_batches_in_flight(virtual, 16, stage) for stage in range(2)] == [4, 2]
    assert micro_batches_in_flight(plain, 2, 0) == micro_batches_in_flight(virtual, 2, 0) == 2
