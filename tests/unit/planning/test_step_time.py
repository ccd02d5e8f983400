"""The times that docs/planning.md writes down, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlcore.planning.devices import GPUS
from rlcore.planning.job import Job, Trained
from rlcore.planning.memory import Layout, optimizer_bytes
from rlcore.planning.shape import ModelShape
from rlcore.planning.speed import StepTime, fullness, policy_weights, step_time

H100 = GPUS["H100"]
# Widths that fill whole tiles of 128 x 256; a layer has 2^20 x (4 + 3 x 2) weights and attends with
# 8 heads of 128.
DENSE = ModelShape(layers=8, hidden=1024, heads=8, groups=8, head_dim=128, ffn=2048, vocab=32768)
LAYER = (1 << 20) * 10
WORK = Job(
    trained=(Trained("policy", DENSE),), frozen=(), sequences=64, length=4224, trainable=3072,
    scoring_passes=1, pack_tokens=16896, dtype_bytes=2, vocab_multiple=1, chunk_elements=1,
)  # fmt: skip
TOKENS = 64 * 4224


def times(layout: Layout, work: Job = WORK, shape: ModelShape = DENSE) -> StepTime:
    return step_time(layout, replace(work, trained=(Trained("policy", shape),)), H100)


def test_the_arithmetic_of_one_gpu() -> None:
    """16896 rows are 132 tiles: every product fills the 132 multiprocessors in whole waves."""
    assert fullness(DENSE, Layout(), WORK.micro_tokens, H100) == 1
    layers = 8 * (2 * LAYER * TOKENS + 64 * 2 * 1024 * 4224**2)
    head = 2 * 64 * 3072 * 32768 * 1024
    found = times(Layout())
    assert found.arithmetic == pytest.approx(((3 + 1) * layers + (4 + 1) * head) / (989e12 * 0.5))
    assert found.total == found.arithmetic, "alone, it sends nothing"


def test_full_recomputation_repeats_the_layers_alone() -> None:
    layers = 8 * (2 * LAYER * TOKENS + 64 * 2 * 1024 * 4224**2)
    more = times(Layout(recompute="full")).arithmetic - times(Layout()).arithmetic
    assert more == pytest.approx(layers / (989e12 * 0.5))


def test_full_recomputation_by_block_repeats_the_first_layers_of_each_chunk() -> None:
    block = Layout(pipeline=2, virtual_pipeline=2, recompute="full", recompute_method="block")
    plain = replace(block, recompute="none")
    uniform = replace(block, recompute_method="uniform", recompute_layers=2)
    more = times(uniform).arithmetic - times(plain).arithmetic
    assert times(block).arithmetic - times(plain).arithmetic == pytest.approx(more / 2)
    sends = [times(replace(given, tensor=4)).communication for given in (plain, block, uniform)]
    assert sends[2] - sends[0] == pytest.approx(2 * (sends[1] - sends[0]))


def test_a_prompt_that_a_pack_has_already_is_not_computed() -> None:
    """Three of four prompts of 1152 tokens, with the attention inside them."""
    once = replace(WORK, siblings=4)
    assert once.repeated == 0.75
    layers = 8 * (2 * LAYER * TOKENS + 64 * 2 * 1024 * 4224**2)
    prompts = 8 * (2 * LAYER * 64 * 1152 + 64 * 2 * 1024 * 1152**2)
    head = 2 * 64 * 3072 * 32768 * 1024
    full = fullness(DENSE, Layout(), once.micro_tokens, H100)
    expected = (3 + 1) * (layers - 0.75 * prompts) / full + (4 + 1) * head
    assert times(Layout(), once).arithmetic == pytest.approx(expected / (989e12 * 0.5))
    ratio = times(Layout(tensor=4), once).communication / times(Layout(tensor=4)).communication
    assert ratio == pytest.approx(1 - 0.75 * 1152 / 4224)


@pytest.mark.parametrize(
    ("pack", "held"),
    [
        (14, (4, 1, 14)),  # a group
        (20, (4, 1, 14)),  # what is left has room for another prompt alone
        (24, (6, 2, 24)),  # a group, and two of another
        (9, (1, 1, 8)),
        (5, (1, 1, 8)),  # a sequence that is longer than a pack has one of its own
    ],
)
def test_a_pack_holds_the_prompt_of_a_group_once(pack: int, held: tuple[int, int, int]) -> None:
    """Sequences, prompts and tokens of a pack."""
    job = replace(WORK, length=8, trainable=2, pack_tokens=pack, siblings=4)
    assert (job.in_pack, job.prompts_in_pack, job.micro_tokens) == held


def test_small_products_leave_multiprocessors_idle() -> None:
    """128 rows: QKV is 12 tiles, the projection 4, the MLP 16 and 4; each takes a wave of 132."""
    # of weights in units of 2^20
    time = 3 / (12 / 132) + 1 / (4 / 132) + 4 / (16 / 132) + 2 / (4 / 132)
    assert fullness(DENSE, Layout(), 128, H100) == pytest.approx(10 / time)


def test_tensor_parallelism_sends_four_half_all_reduces_a_sweep() -> None:
    """Forward, backward and a scoring pass; sequence parallelism gathers twice more going back."""

    def sent(layout: Layout) -> float:
        return times(layout).communication

    one = 8 * TOKENS * 1024 * 2 * (4 - 1) / 4 / (450e9 * 0.7)
    assert sent(Layout(tensor=4)) == pytest.approx(one * 4 * 3)
    assert sent(Layout(tensor=4, sequence=True)) == pytest.approx(one * (4 * 3 + 2))
    assert sent(Layout(tensor=4, recompute="full")) == pytest.approx(one * 4 * 4)
    # more than a node's 8 GPUs: over the network
    narrow = replace(DENSE, heads=16, groups=16, head_dim=64)
    across = times(Layout(tensor=16), shape=narrow).communication
    assert across == pytest.approx(8 * TOKENS * 1024 * 2 * 15 / 16 / (50e9 * 0.7) * 12)


def test_ranks_that_divide_kv_heads_gather_all_of_them() -> None:
    few = replace(DENSE, groups=2)
    sent = [times(Layout(tensor=n), shape=few).communication for n in (2, 4)]
    gathered = 8 * TOKENS * 2 * 2 * 128 * 2 * 3 / 4 / (450e9 * 0.7) * 3
    hidden = 8 * TOKENS * 1024 * 2 / (450e9 * 0.7) * 4 * 3
    assert sent == pytest.approx([hidden / 2, hidden * 3 / 4 + gathered])
    # Context-parallel ranks exchange the one head that a rank has then.
    shared = Layout(tensor=4, context=2)
    keys = 8 * TOKENS * 2 * 128 * 2 / 2 / (450e9 * 0.7) * 3
    found = times(shared, shape=few).communication
    half = (hidden * 3 / 4 + gathered) / 2
    assert found == pytest.approx(half + keys + summed(shared, few, 8))


def summed(layout: Layout, shape: ModelShape, each: int) -> float:
    """Return the seconds of gradients and weights over copies, `each` bytes a weight."""
    weights = policy_weights(layout, replace(WORK, trained=(Trained("policy", shape),)))
    copies = layout.data * layout.context
    ways = ((weights.dense, copies), (weights.expert, layout.expert_data))
    return sum(each * count * (n - 1) / n for count, n in ways) / (450e9 * 0.7)


def test_context_parallelism_gathers_keys_and_values() -> None:
    layout = Layout(context=2)
    kv = 2 * 8 * 128 * 2
    gathered = 8 * TOKENS * kv / 2 / (450e9 * 0.7) * 3
    assert times(layout).communication == pytest.approx(gathered + summed(layout, DENSE, 8))


def test_experts_send_the_rows_of_the_chosen_there_and_back() -> None:
    moe = replace(DENSE, experts=16, topk=4, expert_ffn=512, expert_layers=(True,) * 8)
    layout = Layout(expert=4, data=4)
    rows = TOKENS / 4 * 4
    sent = 8 * rows * 1024 * 2 * 2 * 3 * 3 / 4 / (450e9 * 0.7)
    found = times(layout, shape=moe).communication
    assert found == pytest.approx(sent + summed(layout, moe, 8))


def test_data_parallelism_sums_gradients_and_gathers_weights() -> None:
    for layout, each in ((Layout(data=4), 8), (Layout(data=4, distributed=True), 6)):
        assert times(layout).communication == pytest.approx(summed(layout, DENSE, each))


def test_an_offloaded_optimizer_travels_to_the_gpu_and_back() -> None:
    for layout in (Layout(data=4), Layout(data=4, distributed=True)):
        there = replace(WORK, trained=(Trained("policy", DENSE),))
        away = replace(WORK, trained=(Trained("policy", DENSE, offload_optimizer=True),))
        states = optimizer_bytes(policy_weights(layout, there), layout, dtype_bytes=2)
        more = step_time(layout, away, H100).total - step_time(layout, there, H100).total
        assert more == pytest.approx(2 * states / 25e9)


def test_the_bubble_and_the_sends_of_a_pipeline() -> None:
    found = times(Layout(pipeline=4))
    sends = TOKENS * 1024 * 2 * 3 / (450e9 * 0.7)
    assert found.communication == pytest.approx(sends)
    assert found.bubble == pytest.approx(found.arithmetic * 3 / 16)
    interleaved = times(Layout(pipeline=4, virtual_pipeline=2))
    assert interleaved.communication == pytest.approx(2 * sends)
    assert interleaved.bubble == pytest.approx(found.arithmetic * 3 / 32)


def test_the_slowest_stage_sets_the_pace() -> None:
    """The last one has the head; fewer layers there help, and too many in the middle do not."""
    layers = 2 * LAYER * TOKENS + 64 * 2 * 1024 * 4224**2
    head = 2 * 64 * 3072 * 32768 * 1024
    even = times(Layout(pipeline=2))
    spared = times(Layout(pipeline=2, stages=(5, 3)))
    assert even.arithmetic == pytest.approx((4 * 4 * layers + 5 * head) / (989e12 * 0.5))
    assert spared.arithmetic == pytest.approx(
        max(5 * 4 * layers, 3 * 4 * layers + 5 * head) / (989e12 * 0.5)
    )
    assert spared.arithmetic < even.arithmetic
