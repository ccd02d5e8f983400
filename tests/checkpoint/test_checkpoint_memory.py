"""No rank holds more of the distributed optimizer's state than its own share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hf_folders import write_model

from tests.parity.spawn import run_ranks

RANKS = 2
STATE = 12  # bytes a parameter: masters and two moments
WEIGHT = 2  # bf16, dealt out to the ranks


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data-parallel ranks have saved and loaded a model of half a million parameters."""
    root = tmp_path_factory.mktemp("memory")
    sizes = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 512}
    source = write_model("qwen3_tied", root / "source", **sizes)
    run_ranks(
        Path(__file__).with_name("memory_ranks.py"),
        RANKS,
        root / "world",
        {"root": str(root), "source": str(source)},
        deadline_s=240,
    )
    return root


def numbers(world: Path, rank: int) -> Any:
    return json.loads((world / f"numbers{rank}.json").read_text())


@pytest.mark.parametrize("rank", range(RANKS))
def test_bytes_that_a_rank_holds(world: Path, rank: int) -> None:
    found = numbers(world, rank)
    own = STATE * found["parameters"] / RANKS
    saved = own + WEIGHT * found["parameters"] / RANKS
    peaks = found["peaks"]
    assert peaks["save"] < 0.1 * saved, "tensors are written from where they are"
    assert peaks["start"] < 1.1 * saved, "one copy, which is written meanwhile"
    # the two moments are made, and a saved tensor is read at a time
    assert own * 8 / STATE < peaks["load"] < 1.1 * own, "at least the moments"


def test_every_rank_writes_its_share(world: Path) -> None:
    sizes = [path.stat().st_size for path in sorted((world / "saved/policy").glob("*.distcp"))]
    parameters = numbers(world, 0)["parameters"]
    assert len(sizes) == RANKS
    # a tensor has a kilobyte or two of its own in the file
    assert sizes == pytest.approx([(STATE + WEIGHT) * parameters / RANKS] * RANKS, rel=0.15)
