"""The environment that a rank finds under Ray: torchrun's, and its own device's number."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

import rlcore.launch
from rlcore.launch.ray import rank as rank_module
from rlcore.launch.ray.rank import RankActor, Seat
from rlcore.launch.ray.workplace import Workplace

SEAT = Seat(rank=7, world_size=8, local_rank=3, local_world_size=4, host="10.0.0.1", port=2345)


class Here(Workplace):
    def __init__(self) -> None:
        pass

    def enter(self) -> None:
        pass


def found_by_the_rank(monkeypatch: pytest.MonkeyPatch, *, rank_gpus: float, visible: str | None) -> dict[str, str]:
    found: dict[str, str] = {}

    def train_rank(loaded: Any, *, resume: bool, overwrite: bool, service: Any) -> int:
        assert (resume, overwrite, service) == (True, False, None)
        found.update(os.environ)
        return 5

    before = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    monkeypatch.setattr(os, "environ", before | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    monkeypatch.setattr(rlcore.launch, "train_rank", train_rank)
    monkeypatch.setattr(rank_module.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    loaded: Any = SimpleNamespace(config=SimpleNamespace(cluster=SimpleNamespace(ray=SimpleNamespace(rank_gpus=rank_gpus))))
    assert RankActor(Here()).run(SEAT, loaded, resume=True, overwrite=False, service="service of rank 0") == 5
    return found


@pytest.mark.parametrize(("rank_gpus", "visible", "local_rank"), [
    (1.0, "6", "0"), (0.5, "6", "0"),       # it sees one GPU, which is its 0
    (0.0, None, "3"), (1.0, "", "3"),       # it has none of its own: it shares what its node has, as under torchrun
    (0.0, "0,1,2,3", "3"),                  # not Ray's doing
])  # fmt: skip
def test_a_rank_takes_the_gpu_that_is_its_own(
    monkeypatch: pytest.MonkeyPatch, rank_gpus: float, visible: str | None, local_rank: str
) -> None:
    assert found_by_the_rank(monkeypatch, rank_gpus=rank_gpus, visible=visible)["LOCAL_RANK"] == local_rank


def test_the_rest_is_what_torchrun_would_set(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_by_the_rank(monkeypatch, rank_gpus=1.0, visible="6")
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")} == {
        "RANK": "7", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2345",
    }  # fmt: skip
