"""The difference of two tensors, encoded and applied."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollout.weight_sync import delta_codec
from rollout.weight_sync.delta_codec import DeltaError, apply, encode


@st.composite
def versions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Two tensors of up to 60 elements, which differ in none, some or all of them; and their item
    size.
    """
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    old = draw(arrays.arrays(np.uint8, st.integers(0, 60).map(lambda n: n * itemsize)))
    new = old.copy()
    for at in draw(st.lists(st.integers(0, max(0, len(old) - 1)))) if len(old) else ():
        new[at] ^= draw(st.integers(0, 255))
    return old, new, itemsize


@settings(max_examples=200, deadline=None)
@given(versions(), st.sampled_from([1, 7, 1 << 22]))
def test_applied_to_the_old_it_makes_the_new(pair, block) -> None:
    old, new, itemsize = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_codec, "BLOCK", block)
        delta = encode(old, new, itemsize)
        assert (delta == b"") == bool((old == new).all())
        target = old.copy()
        apply(delta, target, itemsize)
        assert (target == new).all()
        apply(delta, target, itemsize)  # undoes itself
        assert (target == old).all()


@settings(max_examples=200, deadline=None)
@given(versions(), st.data())
def test_damaged_bytes_are_refused_or_make_another_tensor_but_nothing_else_happens(
    pair, data
) -> None:
    old, new, itemsize = pair
    delta = bytearray(encode(old, new, itemsize))
    if not delta:
        return
    at = data.draw(st.integers(0, len(delta) - 1))
    delta[at] ^= data.draw(st.integers(1, 255))
    target = old.copy()
    with contextlib.suppress(DeltaError):
        apply(bytes(delta), target, itemsize)
    assert target.shape == old.shape


@pytest.mark.parametrize(
    ("at", "change"), [(3, 0xFF), (12, 0xD1)], ids=["count", "a header with a size of eight bytes"]
)
def test_no_memory_is_taken_for_what_damaged_bytes_claim(at: int, change: int) -> None:
    delta = bytearray(encode(np.zeros(1, np.uint8), np.ones(1, np.uint8), 1))
    delta[at] ^= change
    with pytest.raises(DeltaError):
        apply(bytes(delta), np.zeros(1, np.uint8), 1)


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_bytes_that_end_early_are_refused(cut: int) -> None:
    old = np.zeros(400, np.uint8)
    delta = encode(old, np.arange(400).astype(np.uint8), 2)
    with pytest.raises(DeltaError):
        apply(delta[:-cut], old, 2)
    with pytest.raises(DeltaError, match=r"bytes of changes, expected"):
        apply(delta + b"\0" * cut, np.zeros(400, np.uint8), 2)


def test_a_small_step_in_bf16_takes_a_small_part() -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(1_000_000, generator=generator) * 0.02
    moved = master + 1e-6 * torch.randn(1_000_000, generator=generator)
    old, new = (weights.bfloat16().view(torch.uint8).numpy() for weights in (master, moved))
    assert 0 < len(encode(old, new, 2)) < 0.05 * len(old)
