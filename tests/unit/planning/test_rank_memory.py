"""Bytes of a rank and the layouts that a plan looks at, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlcore.planning.devices import GPUS
from rlcore.planning.fit import Trained
from rlcore.planning.host import checkpoint_bytes
from rlcore.planning.memory import (
    Layout,
    Load,
    Weights,
    head_peak_bytes,
    optimizer_bytes,
    rank_weights,
    scoring_bytes,
)
from rlcore.planning.search import Job, options
from rlcore.planning.shape import ModelShape

DENSE = ModelShape(layers=8, hidden=64, heads=4, groups=4, head_dim=16, ffn=96, vocab=256)
MOE = ModelShape(
    layers=8, hidden=64, heads=4, groups=4, head_dim=16, ffn=96, vocab=256, experts=4, topk=2,
    expert_ffn=32, moe_layers=8,
)  # fmt: skip


def load_of(tokens: int, dtype_bytes: int = 2, trainable: int = 1) -> Load:
    return Load(tokens=tokens, micro_batches=1, trainable=trainable, dtype_bytes=dtype_bytes)


@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_a_pass_without_gradients_holds_the_mlp_and_three_rows_of_the_stream(
    dtype_bytes: int,
) -> None:
    """The first of two stages has no head."""
    found = scoring_bytes(DENSE, Layout(pipeline=2), load_of(100, dtype_bytes), 0)
    assert found == dtype_bytes * 100 * (3 * 96 + 3 * 64)


def test_the_optimizer_keeps_12_bytes_for_each_bf16_weight() -> None:
    weights = Weights(dense=1000, expert=200)
    assert optimizer_bytes(weights, Layout(data=4), dtype_bytes=2) == 12 * 1200
    assert optimizer_bytes(weights, Layout(data=4), dtype_bytes=4) == 8 * 1200
    cut = Layout(data=4, expert=2, distributed=True)
    assert optimizer_bytes(weights, cut, dtype_bytes=2) == 12 * (1000 // 4 + 200 // 2)


def test_the_head_of_a_pack_with_one_target_has_one_row() -> None:
    """Two fp32 tiles of [1, 256], the weight's gradient, and fp32 rows of 64 for all of these."""
    found = head_peak_bytes(DENSE, Layout(), load_of(50, dtype_bytes=4))
    assert found == 2 * 4 * 256 + 4 * 256 * 64 + 4 * 64 * (1 + 256)


def layouts(shape: ModelShape, gpus: int) -> list[Layout]:
    """Every layout that a plan looks at."""
    job = Job(
        trained=(Trained("policy", shape),), frozen=(), sequences=64, length=8, trainable=2,
        scoring_passes=0, pack_tokens=16, dtype_bytes=2, vocab_multiple=1, chunk_elements=1 << 20,
    )  # fmt: skip
    seen: list[Layout] = []
    options(job, gpus, GPUS["H100"], lambda layout: bool(seen.append(layout)))
    return seen


def test_experts_are_cut_by_tensor_parallelism_unless_they_are_spread() -> None:
    """Expert-parallel ranks have whole experts; alone, a rank's experts are cut as its layers."""
    seen = layouts(MOE, 8)
    assert {layout.expert for layout in seen} == {1, 2, 4}
    assert {layout.tensor for layout in seen} == {1, 2, 4, 8}
    for layout in seen:
        assert layout.expert_tensor == (layout.tensor if layout.expert == 1 else 1)
    assert {layout.expert for layout in layouts(DENSE, 8)} == {1}


TIED = replace(DENSE, tied=True)
PADDED = 288  # 256 entries of the vocabulary in multiples of 48


@pytest.mark.parametrize(
    ("shape", "value_head", "more"),
    [
        (DENSE, False, 2 * (PADDED - 256) * 64),
        (TIED, False, (PADDED - 256) * 64),
        (TIED, True, (PADDED - 256) * 64 + 64),
        # a critic has a row in place of a head
        (DENSE, True, (PADDED - 256) * 64 + 64 - 256 * 64),
    ],
)
def test_a_checkpoint_holds_each_padded_weight_and_its_state_once(
    shape: ModelShape, value_head: bool, more: int
) -> None:
    for dtype_bytes, each in ((2, 14), (4, 12)):
        whole, most = checkpoint_bytes(shape, Layout(), dtype_bytes, 48, value_head)
        assert whole == most == each * (shape.parameters + more)


@pytest.mark.parametrize("shape", [DENSE, TIED], ids=["head", "tied"])
def test_one_rank_writes_all_of_a_head(shape: ModelShape) -> None:
    """Of 7 layers dealt out to 32 ranks each has less than that."""
    layout = Layout(pipeline=2, data=32, distributed=True, stages=(1, 7))
    last = rank_weights(shape, layout, 1, vocab_multiple=48)
    share = last.dense // 32
    assert share < PADDED * 64
    weights = share if shape.tied else PADDED * 64
    states = round(12 * last.dense / 32)
    of_first = rank_weights(shape, layout, 0, vocab_multiple=48).dense
    first = 2 * PADDED * 64 + round(12 * of_first / 32)
    assert checkpoint_bytes(shape, layout, 2, 48)[1] == max(2 * weights + states, first)
