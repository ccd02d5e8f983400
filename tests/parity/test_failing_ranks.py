"""A rank that cannot read or round weights is an error of every rank, and a hang of none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from spawn import run_ranks

from tests.checkpoint.hf_folders import write_model

pytestmark = pytest.mark.rest
RANKS = Path(__file__).with_name("failing_ranks.py")
PIPELINE = {"parallel": {"pipeline": 2}}
# the rank that fails; "model" and "reference" are folders, of which the failing rank's is damaged
CASES: dict[str, dict[str, Any]] = {
    "weights, the first": {"failing": 0, "model": "damaged0"},
    "weights, the second": {"failing": 1, "model": "damaged1", "parallel": {"tensor": 2}},
    "another model": {"failing": 0, "model": "good", "reference": "gone0"},
    "the plan of a checkpoint": {"failing": 1, "model": "good", "saves": True},
    "FP8, the first alone": {
        "failing": 0, "model": "good", "parameter": "mlp.linear_fc2.weight", "everywhere": False,
        **PIPELINE},
    "FP8, the first for all": {
        "failing": 0, "model": "good", "parameter": "mlp.linear_fc2.weight", "everywhere": True,
        **PIPELINE},
    "FP8, the second for all": {
        "failing": 1, "model": "good", "parameter": "mlp.linear_fc2.weight", "everywhere": True,
        **PIPELINE},
}  # fmt: skip
WHAT = {"model": "reading the weights of", "reference": "reading reference.path"}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank raised, by the case."""
    root = tmp_path_factory.mktemp("failing")
    good = write_model("qwen3", root / "good")
    for rank in (0, 1):
        there = root / "models" / str(rank)
        for name in ("good", "damaged0", "damaged1", "gone0"):
            shutil.copytree(good, there / name)
        shards = sorted((there / f"damaged{rank}").glob("*.safetensors"))
        shards[-1].write_bytes(shards[-1].read_bytes()[:200])
    shutil.rmtree(root / "models" / "0" / "gone0")
    payload = [{**case, "name": name} for name, case in CASES.items()]
    # a hang would last as long as the group's timeout, 240 s, in each case
    run_ranks(RANKS, 2, root / "ranks", payload, deadline_s=240)
    return {
        name: [json.loads((root / "ranks" / f"{name} {rank}.json").read_text()) for rank in (0, 1)]
        for name in CASES
    }


@pytest.mark.parametrize("name", CASES)
def test_every_rank_raises(said: dict[str, list[dict[str, Any]]], name: str) -> None:
    case = CASES[name]
    own, other = (said[name][rank]["said"] for rank in (case["failing"], 1 - case["failing"]))
    assert own[0] == ("RunFailed" if "saves" in case else "ModelError")
    assert other[0] == "FailedElsewhere"
    if "parameter" in case:
        assert "got an infinity or NaN in its block" in own[1]
        assert other[1].startswith("rounding the weights to FP8 failed on rank")
    elif "saves" in case:
        assert own[1].endswith("No space left on device")
        assert other[1].startswith("writing the checkpoint")
    else:
        assert WHAT["reference" if "reference" in case else "model"] in other[1]
    assert f"failed on rank {case['failing']}" in other[1]
