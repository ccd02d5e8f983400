"""The times that docs/planning.md writes down, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlcore.planning.devices import GPUS
from rlcore.planning.memory import Layout, Weights
from rlcore.planning.search import Job
from rlcore.planning.shape import ModelShape
from rlcore.planning.speed import StepTime, Work, fullness, rank_flops, step_time

H100 = GPUS["H100"]
# Widths that fill whole tiles of 128 x 256; a layer has 2^20 x (4 + 3 x 2) weights and attends with
# 8 heads of 128.
DENSE = ModelShape(layers=8, hidden=1024, heads=8, groups=8, head_dim=128, ffn=2048, vocab=32768)
LAYER = (1 << 20) * 10
WORK = Work(
    sequences=64,
    length=4096,
    trainable=3072,
    scoring_passes=1,
    micro_batches=16,
    micro_tokens=16896,
)
NONE = Weights(0, 0)
TOKENS = 64 * 4096


def times(
    layout: Layout, work: Work = WORK, shape: ModelShape = DENSE, weights: Weights = NONE
) -> StepTime:
    return step_time(shape, layout, work, weights, H100)


def test_the_arithmetic_of_one_gpu() -> None:
    """16896 rows are 132 tiles: every product fills the 132 multiprocessors in whole waves."""
    assert fullness(DENSE, Layout(), WORK.micro_tokens, H100) == 1
    layers = 8 * (2 * LAYER * TOKENS + 64 * 2 * 1024 * 4096**2)
    head = 2 * 64 * 3072 * 32768 * 1024
    found = times(Layout())
    assert found.arithmetic == pytest.approx(((3 + 1) * layers + (4 + 1) * head) / (989e12 * 0.5))
    assert found.total == found.arithmetic, "alone, it sends nothing"


def test_full_recomputation_repeats_the_layers_alone() -> None:
    layers = 8 * (2 * LAYER * TOKENS + 64 * 2 * 1024 * 4096**2)
    more = times(Layout(recompute="full")).arithmetic - times(Layout()).arithmetic
    assert more == pytest.approx(layers / (989e12 * 0.5))


def test_full_recomputation_by_block_repeats_the_first_layers_of_each_chunk() -> None:
    block = Layout(pipeline=2, virtual_pipeline=2, recompute="full", recompute_method="block")
    plain = replace(block, recompute="none")
    uniform = replace(block, recompute_method="uniform", recompute_layers=2)
    more = times(uniform).arithmetic - times(plain).arithmetic
    assert times(block).arithmetic - times(plain).arithmetic == pytest.approx(more / 2)
    sends = [times(replace(given, tensor=4)).tensor for given in (plain, block, uniform)]
    assert sends == pytest.approx([sends[0], sends[0] * 7 / 6, sends[0] * 8 / 6])
    flops = [rank_flops(DENSE, given, 0, [64], 0, training=True) for given in (plain, block)]
    assert flops[1] == pytest.approx(flops[0] * 3.5 / 3)


def test_a_prompt_that_a_pack_has_already_is_not_computed() -> None:
    """Three of four prompts of 1024 tokens, with the attention inside them."""
    layers = 8 * (2 * LAYER * 64 * 1024 + 64 * 2 * 1024 * 1024**2)
    once = replace(WORK, repeated=0.75)
    less = times(Layout()).arithmetic - times(Layout(), once).arithmetic
    assert less == pytest.approx(0.75 * (3 + 1) * layers / (989e12 * 0.5))
    ratio = times(Layout(tensor=4), once).tensor / times(Layout(tensor=4)).tensor
    assert ratio == pytest.approx(1 - 0.75 * 1024 / 4096)


@pytest.mark.parametrize(
    ("pack", "sequences", "prompts", "tokens"),
    [
        (14, 4, 1, 14),  # a group
        (20, 4, 1, 14),  # what is left has room for another prompt alone
        (24, 6, 2, 24),  # a group, and two of another
        (9, 1, 1, 8),
        (5, 1, 1, 8),  # a sequence that is longer than a pack has one of its own
    ],
)
def test_a_pack_holds_the_prompt_of_a_group_once(
    pack: int, sequences: int, prompts: int, tokens: int
) -> None:
    job = Job(
        trained=(), frozen=(), sequences=64, length=8, trainable=2, scoring_passes=0,
        pack_tokens=pack, dtype_bytes=2, vocab_multiple=1, chunk_elements=1, siblings=4,
    )  # fmt: skip
    assert (job.in_pack, job.prompts_in_pack, job.micro_tokens) == (sequences, prompts, tokens)


def test_small_products_leave_multiprocessors_idle() -> None:
    """128 rows: QKV is 12 tiles, the projection 4, the MLP 16 and 4; each takes a wave of 132."""
    # of weights in units of 2^20
    time = 3 / (12 / 132) + 1 / (4 / 132) + 4 / (16 / 132) + 2 / (4 / 132)
    assert fullness(DENSE, Layout(), 128, H100) == pytest.approx(10 / time)


def test_tensor_parallelism_sends_four_half_all_reduces_a_sweep() -> None:
    """Forward, backward and a scoring pass; sequence parallelism gathers twice more going back."""
    one = 8 * TOKENS * 1024 * 2 * (4 - 1) / 4 / (450e9 * 0.7)
    assert times(Layout(tensor=4)).tensor == pytest.approx(one * 4 * 3)
    assert times(Layout(tensor=4, sequence=True)).tensor == pytest.approx(one * (4 * 3 + 2))
    assert times(Layout(tensor=4, recompute="full")).tensor == pytest.approx(one * 4 * 4)
    across = times(Layout(tensor=16)).tensor  # more than a node's 8 GPUs: over the network
    assert across == pytest.approx(8 * TOKENS * 1024 * 2 * 15 / 16 / (50e9 * 0.7) * 12)


def test_context_parallelism_gathers_keys_and_values() -> None:
    kv = 2 * 8 * 128 * 2
    assert times(Layout(context=2)).context == pytest.approx(
        8 * TOKENS * kv / 2 / (450e9 * 0.7) * 3
    )


def test_experts_send_the_rows_of_the_chosen_there_and_back() -> None:
    moe = replace(DENSE, experts=16, topk=4, expert_ffn=512, expert_layers=(True,) * 8)
    rows = TOKENS / 4 * 4
    found = times(Layout(expert=4, data=4), shape=moe).expert
    assert found == pytest.approx(8 * rows * 1024 * 2 * 2 * 3 * 3 / 4 / (450e9 * 0.7))


def test_data_parallelism_sums_gradients_and_gathers_weights() -> None:
    weights = Weights(dense=10**9, expert=0)
    assert times(Layout(data=4), weights=weights).data == pytest.approx(8e9 * 3 / 4 / (450e9 * 0.7))
    assert times(Layout(data=4, distributed=True), weights=weights).data == pytest.approx(
        6e9 * 3 / 4 / (450e9 * 0.7)
    )


def test_the_bubble_and_the_sends_of_a_pipeline() -> None:
    found = times(Layout(pipeline=4))
    sends = TOKENS * 1024 * 2 * 3 / (450e9 * 0.7)
    assert found.pipeline == pytest.approx(found.arithmetic * 3 / 16 + sends)
    interleaved = times(Layout(pipeline=4, virtual_pipeline=2))
    assert interleaved.pipeline == pytest.approx(found.arithmetic * 3 / 32 + 2 * sends)


def test_the_slowest_stage_sets_the_pace() -> None:
    """The last one has the head; fewer layers there help, and too many in the middle do not."""
    layers = 2 * LAYER * TOKENS + 64 * 2 * 1024 * 4096**2
    head = 2 * 64 * 3072 * 32768 * 1024
    even = times(Layout(pipeline=2))
    spared = times(Layout(pipeline=2, stages=(5, 3)))
    assert even.arithmetic == pytest.approx((4 * 4 * layers + 5 * head) / (989e12 * 0.5))
    assert spared.arithmetic == pytest.approx(
        max(5 * 4 * layers, 3 * 4 * layers + 5 * head) / (989e12 * 0.5)
    )
    assert spared.arithmetic < even.arithmetic
