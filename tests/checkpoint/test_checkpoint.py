"""Checkpoints of one layout, loaded under others: weights and next step are equal to the bit."""

from __future__ import annotations

import pytest
import torch
from plan import LAYOUTS, LOADS, PAIRS, REFUSED, VARIANTS, WORLDS, is_usual
from world_outputs import Outputs, read_weights

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.checkpoint.save_load import saved_layout


@pytest.mark.parametrize(
    ("variant", "source", "target"),
    [pytest.param(*load, marks=() if is_usual(load) else pytest.mark.full) for load in LOADS],
)
def test_load_and_next_step_are_bit_equal(
    outputs: Outputs, variant: str, source: str, target: str
) -> None:
    """The next step uses both moments and the step count, so they are equal too."""
    for when in ("before", "after"):
        expected = read_weights(outputs.trained(when, variant, source))
        got = read_weights(outputs.trained(when, variant, source, target))
        assert got.keys() == expected.keys()
        assert "critic/score.weight" in got
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), f"{when}: {name}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_step_changes_every_weight(outputs: Outputs, variant: str) -> None:
    """Else the equalities above would show nothing."""
    before, after = (
        read_weights(outputs.trained(when, variant, "one")) for when in ("before", "after")
    )
    assert before
    for name, tensor in before.items():
        assert not torch.equal(after[name], tensor), name


def test_a_checkpoint_tells_its_layout(outputs: Outputs) -> None:
    variant = next(iter(VARIANTS))
    for source in {source for source, _ in PAIRS}:
        parallel = LAYOUTS[source]
        told = saved_layout(outputs.checkpoint(variant, source))
        assert told.startswith(
            f"TP {parallel.get('tensor', 1)} x PP {parallel.get('pipeline', 1)} x DP "
        )


@pytest.mark.parametrize("name", [name for name, case in REFUSED.items() if case.words])
def test_refused_on_every_rank(outputs: Outputs, name: str) -> None:
    case = REFUSED[name]
    size = next(size for size, world in WORLDS.items() if case.layout in world.layouts)
    for rank in range(size):
        outcome = (outputs.refused(name) / f"result.rank{rank}").read_text()
        assert outcome.startswith("ModelError: ")
        assert str(outputs.refused(name) / "checkpoint") in outcome
        assert "\n" not in outcome
        for words in case.words:
            assert words in outcome


def test_weights_alone(outputs: Outputs) -> None:
    """Under another TP and dtype, and into the critic, whose head keeps its values."""
    saved = read_weights(outputs.trained("before", "fp32", "one") / "policy")
    for name in ("weights_at_tp2", "weights_in_bf16", "critic_from_policy"):
        folder = outputs.refused(name)
        assert (folder / "result.rank0").read_text() == "loaded"
        got = read_weights(
            folder / "export" / ("critic" if name == "critic_from_policy" else "policy")
        )
        dtype = torch.bfloat16 if name == "weights_in_bf16" else torch.float32
        for key, tensor in saved.items():
            if key != "./lm_head.weight" or name != "critic_from_policy":
                assert torch.equal(got[key], tensor.to(dtype)), f"{name}: {key}"
    assert "./score.weight" in got
    assert "./lm_head.weight" not in got
