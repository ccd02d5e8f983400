"""Real Megatron worlds publish to a real server by every transport, and the tensors agree."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from publication_kit import folder_weights, random_weights
from safetensors.torch import save_file
from server_kit import Served

sys.path.append(str(Path(__file__).parents[1] / "parity"))

from spawn import run_ranks

pytestmark = pytest.mark.timeout(900)
SCRIPT = Path(__file__).with_name("publish_ranks.py")
# `handles` is `tensor` with a handle from each rank, `sender` `distributed` from the last rank
TRANSPORTS = ("distributed", "tensor", "disk", "delta", "handles", "sender")
DEADLINE_S = 400.0  # 20 s on a quiet machine


def other_model(folder: Path, target: Path, seed: int) -> Path:
    """Copy `folder` with other weights."""
    target.mkdir()
    for path in folder.glob("*.json"):
        shutil.copyfile(path, target / path.name)
    assert len(list(folder.glob("*.safetensors"))) == 1
    save_file(random_weights(folder, seed), target / "model.safetensors", metadata={"format": "pt"})
    return target


def publish_from(served: Served, tmp_path: Path, size: int, **layout: int) -> None:
    """Each transport publishes another model than the one before it."""
    models = [other_model(served.model, tmp_path / f"model_{seed}", seed) for seed in range(2)]
    publications = [(transport, str(models[i % 2])) for i, transport in enumerate(TRANSPORTS)]
    payload = {
        "layout": layout, "publications": publications, "runs": str(tmp_path / "runs"),
        "server": {
            "config": served.config.model_dump(), "url": served.url,
            "keys": {"api": served.keys.api, "admin": served.keys.admin},
        },
    }  # fmt: skip
    run_ranks(SCRIPT, size, tmp_path / "world", payload, deadline_s=DEADLINE_S)
    told = json.loads((tmp_path / "world" / "told.json").read_text())
    assert [one["transport"] for one in told] == list(TRANSPORTS)
    for version, one in enumerate(told, 1):
        assert one == one | {"dropped": {}, "logprobs_agree": True, "versions": [version]}
        assert one["buckets"] > 1
    assert folder_weights(models[0]).keys() == folder_weights(served.model).keys()


def test_tp2(served: Served, tmp_path: Path) -> None:
    publish_from(served, tmp_path, 2, tensor=2)


@pytest.mark.full
def test_pp2(served: Served, tmp_path: Path) -> None:
    publish_from(served, tmp_path, 2, pipeline=2)


@pytest.mark.full
def test_tp2_pp2(served: Served, tmp_path: Path) -> None:
    publish_from(served, tmp_path, 4, tensor=2, pipeline=2)


@pytest.mark.full
def test_ep2(served_moe: Served, tmp_path: Path) -> None:
    publish_from(served_moe, tmp_path, 2, expert=2)
