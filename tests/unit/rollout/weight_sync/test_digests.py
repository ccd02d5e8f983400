"""Digests tell any two buckets apart, for whoever does not know their key in advance."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.weights import Bucket, TensorSpec
from rollout.weight_sync import digests
from rollout.weight_sync.bucket_checks import SentDigests, digest_kind
from rollout.weight_sync.digests import DIGITS, KINDS, PIECE, ROW, digest, new_order

SIZES = (1, 2, 7, ROW - 1, ROW, ROW * 3 + 6, 2 * PIECE + 4321)


def some_bytes(size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


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
    assert module.digest(order, some_bytes(99)) == digest(order, some_bytes(99))


class Engine:
    name = "engine-0"
    digests_buckets = True

    def __init__(self, received: dict[int, str]) -> None:
        self._received = received

    async def bucket_digests(self) -> dict[int, str]:
        return self._received


def test_an_engine_that_received_something_else_is_named() -> None:
    bucket = Bucket(0, (TensorSpec("a", (4,), "float32"),))
    flat = some_bytes(16)

    async def main() -> None:
        sent = SentDigests()
        orders = sent.orders(["xxh3", None, "xxh3"])
        order = orders["xxh3"]
        assert order is not None
        assert orders[None] is None
        await sent.add(bucket, flat, orders)
        right = Engine({0: digest(order, flat)})
        wrong = Engine({0: digest(order, some_bytes(16, seed=1))})
        missing = Engine({})
        failed = await sent.compare({right: "xxh3", wrong: "xxh3", missing: "xxh3"}, 5.0)
        assert set(failed) == {wrong, missing}
        assert "engine-0: 1 of 1 buckets did not arrive as they were sent" in failed[wrong]
        assert "received none" in failed[missing]
        unloaded = Engine({0: f"{digest(order, flat)},not loaded: CUDA out of memory"})
        assert await sent.compare({unloaded: "xxh3"}, 5.0) == {
            unloaded: "engine engine-0: bucket 0 was received, but one of its ranks did not load"
            " it: CUDA out of memory"
        }
        assert await sent.compare({wrong: None}, 5.0) == {}

    asyncio.run(main())


def test_which_kind_of_digest() -> None:
    engine = Engine({})
    assert digest_kind("auto", engine, "gloo") == "xxh3"
    assert digest_kind("auto", engine, "nccl") == "linear"
    assert digest_kind("sha256", engine, "nccl") == "sha256"
    assert digest_kind("none", engine, "gloo") is None
    assert digest_kind("auto", object(), "gloo") is None
