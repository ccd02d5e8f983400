"""A rank's actor drops Ray's own number of threads, and takes the user's."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.config import Config
from rlcore.launch import rank
from rlcore.launch.ray.rank_actor import RankActor


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_of_the_two_settings_the_users_counts(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def train(*_: Any, **__: Any) -> int:
        seen.append(os.environ.get("OMP_NUM_THREADS"))
        return 0

    monkeypatch.setattr(os, "environ", {**os.environ, "OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(rank, "train_rank", train)
    config = Config.model_validate(
        {
            "run": {"name": "a"},
            "model": {"path": "model"},
            "data": {"paths": "train.jsonl"},
            "training": {"steps": 1},
            "cluster": {"ray": {"rank_gpus": 0}},
        }
    )
    actor_env: Any = SimpleNamespace(enter=lambda: None)
    loaded: Any = SimpleNamespace(config=config)
    actor = RankActor(actor_env)
    actor.run({"RANK": "1", **given}, loaded, resume=False, overwrite=False)
    assert seen == [expected]
