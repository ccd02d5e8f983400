"""Bytes of a rank and the layouts that a plan looks at, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlcore.planning.activations import head_peak_bytes, scoring_bytes, training_bytes
from rlcore.planning.devices import GPUS
from rlcore.planning.fit import options, stage_needs
from rlcore.planning.job import Job, Trained
from rlcore.planning.memory import Layout, Load, Weights, optimizer_bytes, rank_weights
from rlcore.planning.shape import ModelShape

DENSE = ModelShape(layers=8, hidden=64, heads=4, groups=4, head_dim=16, ffn=96, vocab=256)
MOE = ModelShape(
    layers=8, hidden=64, heads=4, groups=4, head_dim=16, ffn=96, vocab=256, experts=4, topk=2,
    expert_ffn=32, expert_layers=(True,) * 8,
)  # fmt: skip

JOB = Job(
    trained=(Trained("policy", DENSE),), frozen=(), sequences=64, length=8, trainable=2,
    scoring_passes=0, pack_tokens=16, dtype_bytes=2, vocab_multiple=1, chunk_elements=1 << 20,
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


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("data", [2, 16])
def test_at_the_start_a_distributed_optimizer_has_the_weights_twice(
    data: int, offload: bool
) -> None:
    """Beside gradients, before its state, of which a rank of 16 has less than a copy of weights."""
    layout = Layout(data=data, distributed=True)
    trained = Trained("policy", DENSE, offload_optimizer=offload)
    job = replace(JOB, trained=(trained,))
    found = stage_needs(layout, job.load(layout), job, 0)
    weights = rank_weights(DENSE, layout, 0)
    resident = sum(found.resident.values())
    start = (2 + 4 + 2) * weights.total
    assert resident + found.phases["policy start"] == max(start, resident)


def layouts(shape: ModelShape, gpus: int) -> list[Layout]:
    """Every layout that a plan looks at."""
    job = replace(JOB, trained=(Trained("policy", shape),))
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


MIXED = replace(MOE, expert_layers=(False,) * 3 + (True,) * 5)
INTERLEAVED = Layout(pipeline=2, virtual_pipeline=2)  # layers 0, 1, 4, 5 and 2, 3, 6, 7


def test_an_interleaved_stage_has_the_experts_of_its_chunks() -> None:
    of_layer = 4 * 3 * 64 * 32
    assert [rank_weights(MIXED, INTERLEAVED, k).expert for k in (0, 1)] == [
        2 * of_layer,
        3 * of_layer,
    ]
    uneven = replace(INTERLEAVED, stages=(2, 6))  # 0, 4 and 1, 2, 3, 5, 6, 7
    assert [rank_weights(MIXED, uneven, k).expert for k in (0, 1)] == [of_layer, 4 * of_layer]
    mixed = replace(MOE, expert_layers=(True, False, False) * 2 + (True, False))
    assert [rank_weights(mixed, Layout(pipeline=2), k).expert for k in (0, 1)] == [
        2 * of_layer,
        of_layer,
    ]


def test_chunks_keep_their_own_layers_for_the_packs_in_flight() -> None:
    """Stage 0 runs four passes ahead and one more: two packs, then a third, of its first chunk.

    That has no experts, and the second has nothing else.
    """
    load = replace(load_of(100, dtype_bytes=4), micro_batches=4)
    layer = {
        kind: training_bytes(
            kind, Layout(pipeline=8), replace(load, micro_batches=1), 0, transient=False
        )
        for kind in (DENSE, MOE)
    }
    rotary = 4 * 100 * 16
    found = training_bytes(MIXED, INTERLEAVED, load, 0, transient=False)
    dense, experts = (2 * (layer[kind] - rotary) for kind in (DENSE, MOE))
    assert found == 3 * dense + 2 * experts + 5 * rotary / 2


def test_full_recomputation_keeps_the_inputs_of_runs_or_of_a_chunks_first_layers() -> None:
    """A row of the stream is 64 wide; the first of two stages, with one pack, has no head."""
    load = load_of(100, dtype_bytes=4)
    rotary, row = 4 * 100 * 16, 4 * 100 * 64
    full = Layout(pipeline=2, recompute="full")

    def kept(shape: ModelShape, **layout: Any) -> float:
        return training_bytes(shape, replace(full, **layout), load, 0, transient=False) - rotary

    whole = kept(DENSE, recompute="none") / 4
    experts = kept(MOE, recompute="none") / 4
    assert kept(DENSE) == 4 * row + whole
    assert kept(DENSE, recompute_layers=2) == 2 * row + 2 * whole
    assert kept(DENSE, recompute_layers=4) == row + 4 * whole
    assert kept(DENSE, recompute_method="block") == row + 3 * whole
    assert kept(DENSE, recompute_method="block", recompute_layers=4) == 4 * row + whole
    assert kept(MIXED, recompute_method="block", recompute_layers=3) == 3 * row + experts
    wide = replace(MOE, expert_ffn=2048)
    first = replace(wide, expert_layers=(True,) + (False,) * 7)
    experts = kept(wide, recompute="none") / 4
    assert kept(first, recompute_method="block") == row + experts, "the others' bytes are gone"


def test_in_fp32_on_cuda_keys_and_values_are_copied_to_all_heads_of_queries() -> None:
    """4 heads of 16 share the keys of 2; of the projection nothing is kept, unless norms do."""
    grouped = replace(DENSE, groups=2)
    fp32 = load_of(100, dtype_bytes=4)

    def kept(shape: ModelShape, load: Load) -> float:
        return training_bytes(shape, Layout(pipeline=8), load, 0, transient=False)

    q, k = 4 * 100 * 64, 4 * 100 * 32
    assert kept(DENSE, fp32) - kept(grouped, fp32) == (3 * q + 2 * q) - 3 * q
    normed = [kept(replace(shape, qk_norm=True), fp32) for shape in (DENSE, grouped)]
    # The projection stays, beside a copy of the queries of groups; two rows of 1 / rms fewer.
    assert normed[0] - normed[1] == (3 * q + 2 * q) - (q + 2 * k + q + 3 * q) + 4 * 100 * 2


@pytest.mark.parametrize(("dtype_bytes", "is_converted"), [(2, True), (4, False)])
def test_gradients_in_bf16_are_converted_for_a_piece(dtype_bytes: int, is_converted: bool) -> None:
    """Next to 12 bytes of its state; those of an fp32 model are in fp32."""
    stepping = []
    for fp32_gradients in (True, False):
        policy = Trained("policy", DENSE, offload_optimizer=True, fp32_gradients=fp32_gradients)
        job = Job(
            trained=(policy,), frozen=(), sequences=1, length=8, trainable=2, scoring_passes=0,
            pack_tokens=16, dtype_bytes=dtype_bytes, vocab_multiple=1, chunk_elements=1,
        )  # fmt: skip
        layout = Layout()
        found = stage_needs(layout, job.load(layout), job, 0)
        stepping.append(found.phases["policy optimizer step"])
    assert stepping[0] == (8 + 4 * (dtype_bytes == 2)) * policy.parameters
    assert stepping[1] - stepping[0] == stepping[0] // 3 * is_converted


TIED = replace(DENSE, tied=True)


@pytest.mark.parametrize(
    ("shape", "value_head", "more"),
    [
        (DENSE, False, 0),
        (TIED, False, 0),
        (TIED, True, 64),
        # a critic has a row in place of a head
        (DENSE, True, 64 - 256 * 64),
    ],
)
def test_a_checkpoint_holds_each_weight_and_its_state_once(
    shape: ModelShape, value_head: bool, more: int
) -> None:
    assert Trained("policy", shape, value_head).parameters == shape.parameters + more
    for dtype_bytes, each in ((2, 14), (4, 12)):
        job = Job(
            trained=(Trained("policy", shape, value_head),), frozen=(), sequences=1, length=8,
            trainable=2, scoring_passes=0, pack_tokens=16, dtype_bytes=dtype_bytes,
            vocab_multiple=1, chunk_elements=1,
        )  # fmt: skip
        assert job.checkpoint_bytes == each * (shape.parameters + more)
