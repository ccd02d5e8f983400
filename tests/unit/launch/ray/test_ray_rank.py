"""A rank under Ray: torchrun's environment, its device and threads, and when its loss counts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import RayActorError
from torch.distributed import HashStore

import rlcore.launch.rank
from rlcore.launch.environment import rank_environment
from rlcore.launch.ray import ranks as ranks_module
from rlcore.launch.ray.ranks import RankActor, Ranks
from rlcore.launch.torchrun_attempts import mark_ended
from tests.configs import small_config

ENVIRONMENT = rank_environment(7, 8, local_rank=3, local_world_size=4)


def found_by_the_rank(
    monkeypatch: pytest.MonkeyPatch,
    *,
    rank_gpus: float = 0.0,
    visible: str | None = None,
    **given: str,
) -> dict[str, str]:
    """The environment in which the rank trains."""
    found: dict[str, str] = {}

    def train_rank(loaded: Any, *, resume: bool, overwrite: bool, is_checked: bool) -> int:
        assert (resume, overwrite, is_checked) == (True, False, True)
        found.update(os.environ)
        return 5

    before = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    before["OMP_NUM_THREADS"] = "1"  # as Ray sets it
    monkeypatch.setattr(
        os, "environ", before | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    )
    monkeypatch.setattr(rlcore.launch.rank, "train_rank", train_rank)
    monkeypatch.setattr(
        ranks_module.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node")
    )
    loaded: Any = SimpleNamespace(
        config=SimpleNamespace(cluster=SimpleNamespace(ray=SimpleNamespace(rank_gpus=rank_gpus)))
    )
    actor = RankActor(os.getcwd())
    assert actor.run(ENVIRONMENT | given, loaded, resume=True, overwrite=False) == 5
    return found


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_of_the_two_settings_of_threads_the_users_counts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    assert found_by_the_rank(monkeypatch, **given).get("OMP_NUM_THREADS") == expected


@pytest.mark.parametrize(("rank_gpus", "visible", "local_rank"), [
    (1.0, "6", "0"), (0.5, "6", "0"),       # it sees one GPU, which is its 0
    # it has none of its own: it shares what its node has, as under torchrun
    (0.0, None, "3"), (1.0, "", "3"),
    (0.0, "0,1,2,3", "3"),                  # not Ray's doing
])  # fmt: skip
def test_a_rank_takes_the_gpu_that_is_its_own(
    monkeypatch: pytest.MonkeyPatch, rank_gpus: float, visible: str | None, local_rank: str
) -> None:
    assert (
        found_by_the_rank(monkeypatch, rank_gpus=rank_gpus, visible=visible)["LOCAL_RANK"]
        == local_rank
    )


def test_the_rest_is_what_torchrun_would_set(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_by_the_rank(monkeypatch, rank_gpus=1.0, visible="6")
    assert found.items() >= {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items()


@pytest.mark.parametrize(
    ("rank", "has_ended", "counts"),
    [(0, False, True), (1, False, True), (0, True, True), (1, True, False)],
)
def test_after_the_end_of_the_run_only_rank_0_is_missed(
    monkeypatch: pytest.MonkeyPatch, rank: int, has_ended: bool, counts: bool
) -> None:
    """Rank 0 may be uploading, and the loss of another rank must not end it."""

    def gone(ref: object) -> int:
        raise RayActorError

    ranks = object.__new__(Ranks)
    ranks.store = HashStore()
    ranks.codes = {}
    ranks._lost = {}
    ranks._runs = {"call": rank}
    ranks.where = [("a", 1, []), ("b", 2, [])]
    if has_ended:
        mark_ended(ranks.store, 0)
    monkeypatch.setattr(ranks_module.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ranks_module.ray, "get", gone)
    ranks._collect()
    assert ranks._runs == {}
    assert (ranks._first_lost() is not None) == counts


def test_the_store_of_the_ranks_listens_on_the_drivers_address_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever reaches it can end the run."""
    config = small_config(run={"dir": str(tmp_path)})
    monkeypatch.setattr(ranks_module, "store_prefix", lambda: "rlcore/0")
    cluster: Any = SimpleNamespace(address="127.0.0.1")
    loaded: Any = SimpleNamespace(config=config)
    group: Any = None
    ranks = Ranks(cluster, group, loaded, lambda: None)
    found = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
    assert [address.ip for address in found if address.port == ranks._host.port] == ["127.0.0.1"]
