"""A range of the elements of a tensor is a few boxes of it."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.checkpoint.optimizer_state import boxes


@settings(deadline=None)  # a busy machine is no error
@given(st.data())
def test_boxes_are_the_range_in_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    start = data.draw(st.integers(0, math.prod(shape)))
    end = data.draw(st.integers(start, math.prod(shape)))
    elements = torch.arange(math.prod(shape)).view(shape)
    found: list[int] = []
    count = 0
    for offset, size in boxes(shape, start, end):
        box = elements[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))]
        found += box.flatten().tolist()
        count += 1
    assert found == list(range(start, end))
    assert count <= max(2 * len(shape) - 1, 1)


def test_by_hand() -> None:
    assert list(boxes((4, 5), 3, 17)) == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    assert list(boxes((4, 5), 6, 9)) == [((1, 1), (1, 3))]
    assert list(boxes((4, 5), 7, 7)) == []
    assert list(boxes((), 0, 1)) == [((), ())]
