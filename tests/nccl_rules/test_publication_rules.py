"""The real exporter by NCCL's rules: its group, the bytes, how far senders run ahead, and the order
in which it gives work to the streams of a GPU that has one hardware queue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests import nccl_rules
from tests.checkpoint.hf_folders import write_model
from tests.nccl_rules.publication_streams import HANGS_S, LIMIT_S, publication
from tests.nccl_rules.recording import RankOrder
from tests.nccl_rules.streams import Queues
from tests.parity.spawn import run_ranks

AHEAD = 2  # buckets, of those that rank 0 has taken
# four ranks; sent one by one a tensor goes straight from the parameter, else packed with others
CASES: dict[str, dict[str, Any]] = {
    "two copies of each expert": {
        "model": "qwen3_moe", "parallel": {"expert": 2}, "alone_bytes": 0},
    "experts on two stages": {
        "model": "qwen3_moe", "parallel": {"expert": 2, "pipeline": 2}, "alone_bytes": 0},
    "dense": {
        "model": "qwen3", "parallel": {"tensor": 2, "pipeline": 2}, "alone_bytes": 1 << 20},
    # the second stage has more of it but for the vocabulary, which it does not hold
    "one bucket of two stages": {
        "model": "qwen3_tied", "parallel": {"pipeline": 2}, "alone_bytes": 1 << 20,
        "bucket_bytes": 1 << 30},
}  # fmt: skip
SMALL = 20_000  # bytes of a bucket
GROUPS = {
    "two copies of each expert": [0, 1],  # the second copies send nothing
    "experts on two stages": [0, 1, 2, 3],
    "dense": [0, 1, 2, 3],
    "one bucket of two stages": [0, 2],
}

RANKS = 4
# The ranks in the group of each engine, the one that sends first.
LAYOUTS: list[list[tuple[int, ...]]] = [
    [(1,)],
    [(1, 2, 3, 0)],
    [(2, 3), (1, 0)],
    [(1,), (2,), (3,), (0,)],
    [(2, 3), (1,), (1,)],
]
ROOTS = {  # the first rank of each pipeline stage, or of the experts that a bucket is full of
    "two copies of each expert": [0, 1],
    "experts on two stages": [0, 1, 2, 3],
    "dense": [0, 2],
    "one bucket of two stages": [0],
}


class Published(NamedTuple):
    """The results of a case."""

    told: dict[str, Any]
    weights: dict[str, torch.Tensor]
    shared: list[dict[str, torch.Tensor]]  # of each rank, where all get them
    source: dict[str, torch.Tensor]
    # What each rank did where rank 0 alone gets the buckets, and where all ranks get them.
    alone: list[RankOrder]
    everywhere: list[RankOrder]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Published]:
    root = tmp_path_factory.mktemp("publication_rules")
    payload = []
    for name, case in CASES.items():
        model = root / case["model"]
        if not model.exists():
            write_model(case["model"], model)
        payload.append({"bucket_bytes": SMALL, **case, "name": name, "model": str(model)})
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(nccl_rules.SWITCH, nccl_rules.NAME)
        ranks = Path(__file__).with_name("export_ranks.py")
        run_ranks(ranks, RANKS, root / "ranks", payload, deadline_s=240)
    return {
        name: Published(
            json.loads((root / "ranks" / f"{name}.json").read_text()),
            load_file(root / "ranks" / f"{name}.safetensors"),
            [load_file(root / "ranks" / f"{name}_{rank}.safetensors") for rank in range(RANKS)],
            read_folder(root / case["model"]),
            *read_orders(root / "ranks", name),
        )
        for name, case in CASES.items()
    }


def read_orders(folder: Path, name: str) -> tuple[list[RankOrder], list[RankOrder]]:
    """What each rank recorded."""
    found: list[list[RankOrder]] = []
    for rank in range(RANKS):
        orders = json.loads((folder / f"{name}_{rank}.orders.json").read_text())
        found.append([RankOrder(**order) for order in orders])
    alone, everywhere = (list(orders) for orders in zip(*found))
    return alone, everywhere


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that transformers wrote."""
    weights = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            weights |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return weights


@pytest.mark.parametrize("name", CASES)
def test_every_weight_arrives(name: str, published: dict[str, Published]) -> None:
    """Ranks that send nothing are no part of the group, and all others meet before they send."""
    found = published[name]
    assert found.weights.keys() == found.source.keys()
    for weight, tensor in found.source.items():
        assert torch.equal(found.weights[weight], tensor.float()), weight
    assert found.told["group"] == GROUPS[name]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_every_weight_from_where_most_of_it_is(
    name: str, published: dict[str, Published]
) -> None:
    found = published[name]
    for shared in found.shared:
        assert shared.keys() == found.weights.keys()
        for weight, tensor in found.weights.items():
            assert torch.equal(shared[weight], tensor), weight
    assert found.told["roots"] == ROOTS[name]


@pytest.mark.parametrize("name", [name for name in CASES if "bucket_bytes" not in CASES[name]])
def test_senders_stay_at_most_two_buckets_ahead(name: str, published: dict[str, Published]) -> None:
    """A timeout of NCCL counts from the enqueueing, so nothing may be enqueued long before."""
    told = published[name].told
    assert told["buckets"] > 3 * AHEAD
    assert 0 < max(told["enqueued"]) <= 1 + AHEAD, told
    assert 0 < max(told["begun"]) <= 1 + AHEAD, told


# --- one hardware queue ---------------------------------------------------------------------------


@pytest.mark.parametrize("queues", Queues)
@pytest.mark.parametrize("engines", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_send_wait_for_nobody_in_a_circle(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    engines: Sequence[Sequence[int]],
    queues: Queues,
    published: dict[str, Published],
) -> None:
    orders = published[name].everywhere
    assert all(order.prefetches for order in orders)
    assert publication(monkeypatch, orders, engines, queues=queues).run(LIMIT_S)


@pytest.mark.parametrize("queues", Queues)
@pytest.mark.parametrize("name", CASES)
def test_rank_0_that_sends_alone_waits_for_nobody_in_a_circle(
    monkeypatch: pytest.MonkeyPatch, name: str, queues: Queues, published: dict[str, Published]
) -> None:
    orders = published[name].alone
    assert [order.prefetches for order in orders] == [True, False, False, False]
    assert publication(monkeypatch, orders, [(0,), (0,)], queues=queues).run(LIMIT_S)


def one_by_one(make: Callable[[int], int], items: Sequence[int], device: Any) -> Iterator[int]:
    """Begins a bucket once the last is sent, where other ranks begin it before they send."""
    return map(make, items)


@pytest.mark.parametrize(
    ("queues", "allocates", "ends"),
    [
        (Queues.MANY, False, True),
        (Queues.ONE, False, False),
        # Its peer's buffer for what it passes on would have to wait for the next bucket.
        (Queues.MANY, True, False),
    ],
)
def test_a_rank_with_another_order_would_hold_up_all_of_one_queue(
    monkeypatch: pytest.MonkeyPatch,
    queues: Queues,
    allocates: bool,
    ends: bool,
    published: dict[str, Published],
) -> None:
    """So this shows what it is for."""
    orders = published["dense"].everywhere
    given: dict[str, Any] = {"queues": queues, "allocates": allocates}
    made = publication(monkeypatch, orders, [(1, 3)], prefetched={1: one_by_one}, **given)
    assert made.run(LIMIT_S if ends else HANGS_S) == ends
    made.end()
