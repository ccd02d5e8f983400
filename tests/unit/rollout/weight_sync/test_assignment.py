"""Which ranks serve an engine, by itself or together."""

from __future__ import annotations

from itertools import combinations

import pytest

from rlcore.interfaces import RankAddress
from rollout.weight_sync.assignment import SenderAssignment, shares

TWO_NODES = ["a"] * 2 + ["b"] * 2


class Engine:
    """Somewhere."""

    def __init__(self, url: str, gpus: int) -> None:
        self.url = url
        self.group_ranks = gpus


@pytest.mark.parametrize(
    ("world", "count", "expected"),
    [
        (16, 1, [0]),
        (16, 2, [0, 8]),
        (16, 4, [0, 4, 8, 12]),
        (4, 64, [0, 1, 2, 3]),
        (6, 4, [0, 1, 3, 4]),
    ],
)
def test_senders_are_spread_over_the_ranks(world: int, count: int, expected: list[int]) -> None:
    assert [ranks[0] for ranks in shares(world, count)] == expected
    assert [rank for ranks in shares(world, count) for rank in ranks] == [*range(world)]


def assigned(
    hosts: list[str],
    engines: int,
    *,
    on_gpu: bool = False,
    senders: int | None = None,
    rails: int | None = None,
    gpus: int = 1,
    url: str = "http://10.0.0.9:30000",
) -> list[tuple[int, ...]]:
    """The ranks of each engine."""
    assignment = SenderAssignment(senders, rails)
    ranks = [
        RankAddress(host, f"gpu-{rank}" if on_gpu else None) for rank, host in enumerate(hosts)
    ]
    made = [Engine(url, gpus) for _ in range(engines)]
    for engine in made:
        assignment.assign(engine, "gpu-of-an-engine" if on_gpu else None, engines, ranks)
    return [assignment.served[engine] for engine in made]


def senders(served: list[tuple[int, ...]]) -> list[int]:
    assert all(len(one) == 1 for one in served)
    return [one[0] for one in served]


def test_engines_are_assigned_evenly() -> None:
    assert senders(assigned(TWO_NODES, 5, senders=2)) == [0, 2, 0, 2, 0]
    assert senders(assigned(TWO_NODES, 5, on_gpu=True)) == [0, 1, 2, 3, 0]
    assert senders(assigned(TWO_NODES, 5)) == [0] * 5
    assert senders(assigned(["a"], 5, senders=4, on_gpu=True)) == [0] * 5


def test_an_engine_on_loopback_is_served_from_rank_0s_machine() -> None:
    loopback = "http://127.0.0.1:30000"
    assert senders(assigned(["a", "a", "b", "b"], 3, senders=4, url=loopback)) == [0, 1, 0]


def test_an_engine_of_several_gpus_gets_the_ranks_that_have_nothing_else_to_do() -> None:
    """Rank 0, who calls the engines, helps instead of sending; a machine's ranks stay together."""
    nodes = ["a"] * 4 + ["b"] * 4
    by_two = [(1, 0), (2, 3), (4, 5), (6, 7)]
    assert assigned(nodes, 4, on_gpu=True, gpus=8) == by_two
    assert assigned(nodes, 2, on_gpu=True, gpus=8) == [(1, 2, 3, 0), (4, 5, 6, 7)]
    assert assigned(nodes, 1, on_gpu=True, gpus=8) == [(1, 2, 3, 0)]
    assert assigned(nodes, 2, on_gpu=True, gpus=2) == [(1, 0), (4, 5)]
    assert senders(assigned(nodes, 2, on_gpu=True, gpus=1)) == [0, 4]
    assert senders(assigned(nodes, 2, on_gpu=True, gpus=8, rails=1)) == [0, 4]
    assert senders(assigned(nodes, 16, on_gpu=True, gpus=8)) == [*range(8)] * 2


def test_ranks_help_over_gloo_only_where_that_is_asked_for() -> None:
    assert assigned(TWO_NODES, 2, senders=2, gpus=8, rails=2) == [(1, 0), (2, 3)]
    assert senders(assigned(TWO_NODES, 2, senders=2, gpus=8)) == [0, 2]


def test_a_second_engine_of_a_rank_has_no_helpers() -> None:
    """Two ranks in the same two groups could begin their broadcasts in different orders."""
    served = assigned(TWO_NODES, 4, senders=2, rails=2)
    assert served[:2] == [(1, 0), (2, 3)]
    assert served[2:] == [(0,), (2,)]


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("nodes", [1, 2, 3, 7])
def test_engines_that_come_later_share_one_rank_with_another_at_most(nodes: int, gpus: int) -> None:
    """The ranks are cut into more ranges than for the engines before them."""
    ranks = [RankAddress(f"node-{rank // 8}", f"gpu-{rank}") for rank in range(8 * nodes)]
    for first in range(1, len(ranks)):
        assignment = SenderAssignment(None, None)
        for number in range(first + 3):
            engine = Engine(f"http://10.0.0.{number + 1}:30000", gpus)
            assignment.assign(engine, "another", max(first, number + 1), ranks)
        members = [set(one) for one in assignment.served.values()]
        shared = [len(one & other) for one, other in combinations(members, 2)]
        assert max(shared) <= 1, (first, assignment.served.values())


def test_a_rank_on_the_gpu_of_an_engine_does_not_help() -> None:
    assignment = SenderAssignment(1, None)
    ranks = [RankAddress("a", f"gpu-{rank}") for rank in range(4)]
    engine = Engine("http://10.0.0.9:30000", 4)
    assert assignment.assign(engine, "gpu-2", 1, ranks) == (1, 3, 0)
    assert assignment.assign(engine, "another by now", 1, ranks) == (1, 3, 0), "for good"
    assignment.leave_to_rank0(engine)
    assert assignment.assign(engine, "gpu-2", 1, ranks) == (0,)
    # it failed, so the next publication is without it, and it comes back
    assignment.keep_only([])
    assert assignment.served == {}
    assert assignment.assign(engine, "gpu-2", 1, ranks) == (0,)
