"""What becomes of an engine by the answers of the ranks that serve it. No engine runs."""

from __future__ import annotations

import asyncio

from links_kit import ADDRESS, Engine

from rollout.weight_sync.distributed import EngineLink
from rollout.weight_sync.process_group import GroupAddress

NO_GROUP = "it has no group"


def test_an_engine_whose_rank_does_not_reach_it_is_out() -> None:
    engine = Engine()
    link = EngineLink(engine, "gloo", (3,), 60.0)
    why = asyncio.run(link.join({3: {"engine-0": "no route to host"}}))
    assert why == "rank 3 cannot open a group with engine engine-0: no route to host"
    assert engine.joined == []


def test_the_engine_enters_the_group_of_its_rank_behind_it() -> None:
    engine = Engine()
    link = EngineLink(engine, "gloo", (3,), 60.0)
    assert asyncio.run(link.join({3: {"engine-0": ADDRESS}})) is None
    assert engine.joined == [(GroupAddress(**ADDRESS), 1)]  # type: ignore[arg-type]
    assert asyncio.run(link.join({3: {"engine-0": None}})) is None, "the last one is whole"
    assert len(engine.joined) == 1


def test_the_engine_comes_behind_the_ranks_that_help() -> None:
    engine = Engine()
    link = EngineLink(engine, "gloo", (3, 4, 0), 60.0)
    new = {3: {"engine-0": ADDRESS}, 4: {"engine-0": NO_GROUP}, 0: {"engine-0": NO_GROUP}}
    assert asyncio.run(link.join(new)) is None
    assert engine.joined == [(GroupAddress(**ADDRESS), 3)]  # type: ignore[arg-type]
    whole = {rank: {"engine-0": None} for rank in (3, 4, 0)}
    assert asyncio.run(link.join(whole)) is None
    for rank in (4, 0):
        left = asyncio.run(link.join(whole | {rank: {"engine-0": NO_GROUP}}))
        assert left == f"engine engine-0 is in a group that rank {rank} has left"
    assert len(engine.joined) == 1
