"""Digests tell any two publications apart, for whoever does not know their key in advance."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.interfaces import RankAddress
from rlcore.weights import TensorSpec, cut_buckets
from rollout.weight_sync import digests
from rollout.weight_sync.digests import DIGITS, KINDS, PIECE, ROW, Digest, new_order
from rollout.weight_sync.distributed import DistributedTransport, difference
from rollout.weight_sync.sender import GroupSender

CPU = torch.device("cpu")
SIZES = (1, 2, 7, ROW - 1, ROW, ROW * 3 + 6, 2 * PIECE + 4321)


def some_bytes(size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def digest(order: str, *buckets: Tensor) -> str:
    made = Digest(order)
    for flat in buckets:
        made.add(flat)
    return made.read()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_every_byte_and_the_key_count(kind: str, size: int) -> None:
    flat = some_bytes(size)
    order = new_order(kind)
    whole = digest(order, flat)
    assert digest(order, flat.clone()) == whole
    assert digest(new_order(kind), flat) != whole
    assert digest(order, torch.cat([flat, flat.new_zeros(1)])) != whole
    for at in {0, size // 2, size - 1, *range(0, size, max(1, size // 50))}:
        for bit in (1, 128):
            flat[at] ^= bit
            assert digest(order, flat) != whole, (at, bit)
            flat[at] ^= bit
    assert digest(order, flat) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_bucket_has_a_digest(kind: str) -> None:
    order = new_order(kind)
    assert digest(order, some_bytes(0)) == digest(order, some_bytes(0))


def test_the_sums_are_those_of_their_definition() -> None:
    """Each row's bytes, as signed numbers, times the keys, modulo 2**64."""
    key = bytes(range(32))
    flat = some_bytes(ROW * 2 + 10)
    padded = np.zeros(ROW * 3, dtype=np.uint8)
    padded[: len(flat)] = flat.numpy()
    drawn = np.frombuffer(hashlib.shake_256(key).digest(ROW * 2 * DIGITS), dtype=np.int8)
    keys = [
        [sum(int(digit) * 256**place for place, digit in enumerate(one)) for one in row]
        for row in drawn.reshape(ROW, 2, DIGITS)
    ]
    expected = hashlib.sha256(key + len(flat).to_bytes(8, "little"))
    for row in padded.view(np.int8).reshape(3, ROW):
        for which in range(2):
            total = sum(int(byte) * both[which] for byte, both in zip(row, keys)) % 2**64
            expected.update(total.to_bytes(8, "little"))
    assert digest(f"linear:{key.hex()}", flat) == expected.hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_signs_that_are_flipped_in_pairs_are_seen(kind: str) -> None:
    """A sum modulo 2**64 of 64-bit words times odd keys would see none of these."""
    flat = some_bytes(8 * 64)
    for _ in range(20):
        order = new_order(kind)
        whole = digest(order, flat)
        for other in range(15, len(flat), 8):
            changed = flat.clone()
            changed[7] ^= 128
            changed[other] ^= 128
            assert digest(order, changed) != whole


@pytest.mark.parametrize("order", ["xxh3", "xxh3:abc", "md5:" + "0" * 64, "xxh3:" + "0" * 62, ""])
def test_an_order_that_is_none_is_refused(order: str) -> None:
    with pytest.raises(ValueError):
        digest(order, some_bytes(8))


def test_the_module_imports_nothing_of_ours() -> None:
    """The engines' environment does not have rlcore."""
    spec = importlib.util.spec_from_file_location("alone", digests.__file__)
    assert spec is not None
    assert spec.loader is not None
    before = {name for name in sys.modules if name.startswith(("rlcore", "rollout", "backends"))}
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    after = {name for name in sys.modules if name.startswith(("rlcore", "rollout", "backends"))}
    assert before == after
    order = new_order("xxh3")
    alone = module.Digest(order)
    alone.add(some_bytes(99))
    assert alone.read() == digest(order, some_bytes(99))


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_count_in_their_order_and_with_their_borders(kind: str) -> None:
    one, two = some_bytes(3 * ROW, 1), some_bytes(3 * ROW, 2)
    order = new_order(kind)
    whole = digest(order, one, two)
    assert digest(order, one.clone(), two.clone()) == whole
    assert len({whole, digest(order, two, one), digest(order, one), digest(order, one, one)}) == 4
    assert digest(order, torch.cat([one, two])) != whole
    assert digest(order, one, two, some_bytes(0)) != whole


def test_a_digest_may_be_waited_for_or_read_between_buckets() -> None:
    order = new_order("linear")
    buckets = [some_bytes(ROW + index, index) for index in range(4)]
    made = Digest(order)
    for count, flat in enumerate(buckets, 1):
        made.add(flat)
        if count == 2:
            made.wait()
        assert count < 3 or made.read() == digest(order, *buckets[:count])


def test_a_rank_that_received_something_else_is_named() -> None:
    assert difference("a" * 64, ["a" * 64] * 2, 2) is None
    said = difference("a" * 64, ["a" * 64, "b" * 64], 2)
    assert said is not None
    assert said.startswith("its rank 1 did not receive the weights as they were sent")
    assert "(digest sent aaaaaaaaaaaa, received bbbbbbbbbbbb)" in said
    assert "received none" in str(difference("a" * 64, [""], 1))
    assert difference("a", ["a"], 2) == "digests of 1 ranks, expected 2"
    loaded = "its rank 0 received the weights, but did not load them: not loaded: out of memory"
    assert difference("a", ["not loaded: out of memory"], 1) == loaded


class Engine:
    """Digests what is sent but for `changes`."""

    name = "engine-0"
    url = "http://10.0.0.9:1"
    group_ranks = 2
    in_group = "weights"

    def __init__(self, *, digests: bool = True, changes: bool = False) -> None:
        self.digests_weights = digests
        self.changes = changes
        self.made: Digest | None = None

    async def health(self) -> dict[str, None]:
        return {"gpu": None}

    async def received_digests(self) -> list[str]:
        assert self.made is not None
        return [self.made.read()] * 2

    async def receive_bucket(self, index: int, flat: None, order: str | None = None) -> None:
        if order is not None:
            self.made = self.made or Digest(order)
            sent = some_bytes(16, index)
            self.made.add(sent ^ 1 if self.changes else sent)


def test_a_publication_ends_with_the_digests_of_all_engines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank 0 digests what the ranks send, by the order that it shares with the engines."""
    right, wrong, silent = Engine(), Engine(changes=True), Engine(digests=False)
    buckets = cut_buckets([TensorSpec(f"w{i}", (4,), "float32") for i in range(3)], 16)
    sender = GroupSender(CPU, 5.0)

    async def publish() -> dict[Engine, str]:
        transport = DistributedTransport(timeout_s=5.0, probe_s=5.0)
        transport.ranks = [RankAddress("here")]
        assert await transport.open([right, wrong, silent], buckets) == {}
        orders = transport.orders().ranks[0]
        assert [order.partition(":")[0] for order in orders["digests"]] == ["xxh3"]
        sender.open(orders | {"engines": []}, buckets)
        for bucket in buckets:
            assert await transport.send(bucket.index, {}) == {}
            sender.send(bucket, some_bytes(16, bucket.index), lambda: None)
        return await transport.complete(sender.finish())

    failed = asyncio.run(publish())
    assert [*failed] == [wrong]
    assert "engine engine-0: its rank 0 did not receive the weights as they were" in failed[wrong]
    assert silent.made is None
    [warning] = [record.getMessage() for record in caplog.records]
    assert "engine engine-0 receives are not verified: it computes no digests" in warning
