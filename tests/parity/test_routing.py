"""Routing replay on every layout: a step uses recorded experts with the new weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from cases import make_batch
from spawn import Results
from torch import Tensor, nn

from backends.megatron.convert.architecture import Architecture
from backends.megatron.cpu.shim import importing_megatron
from rlcore.errors import RunFailed

with importing_megatron():
    from backends.megatron.model.routing_replay import ExpertChoice, check_records

RANKS = Path(__file__).with_name("routing_ranks.py")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FORCED: dict[str, Any] = {
    "model": "qwen3_moe",
    "then": "qwen3_moe_other",
    "plans": ["pairs"],
    "replay": "logprobs",
}
SP2 = {"tensor": 2, "sequence": True}

# By the ranks of a launch; those of several are launched by `scripts/test.sh --full` alone.
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"name": "off", "model": "qwen3_moe", "plans": ["pairs"], "replay": "none"},
        {"name": "same", "model": "qwen3_moe", "plans": ["pairs"], "replay": "logprobs"},
        # the second layer is dense
        {"name": "same_mixed", "model": "qwen2_moe", "plans": ["pairs"], "replay": "logprobs"},
        {"name": "forced", **FORCED},
        {"name": "forced_guest", **FORCED, "offload": True},
        {"name": "forced_recompute", **FORCED, "megatron": FULL},
        {"name": "forced_recompute_moe", **FORCED,
         "megatron": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
        {"name": "sigmoid", **FORCED, "model": "deepseek_v3", "then": "deepseek_v3_other",
         "megatron": FULL},
        {"name": "two_steps", "model": "qwen3_moe", "plans": ["half0", "half1"],
         "replay": "logprobs"},
    ],
    2: [
        {"name": "ep2", **FORCED, "plans": ["dp2"], "parallel": {"expert": 2}},
        {"name": "vpp2_recompute", **FORCED, "parallel": {"pipeline": 2, "virtual_pipeline": 2},
         "megatron": FULL},
        {"name": "pp2_recompute", **FORCED, "parallel": {"pipeline": 2}, "megatron": FULL},
        {"name": "tp2_sp", **FORCED, "parallel": SP2},
        {"name": "cp2", **FORCED, "parallel": {"context": 2}},
    ],
    4: [
        {"name": "tp2_sp_pp2", **FORCED, "parallel": SP2 | {"pipeline": 2}, "megatron": FULL},
        {"name": "ep2_pp2", **FORCED, "plans": ["dp2"], "parallel": {"expert": 2, "pipeline": 2}},
    ],
}  # fmt: skip
# experts of, weights of
ORACLES = {"qwen3_moe": "qwen3_moe_other", "deepseek_v3": "deepseek_v3_other"}
FORCED_NAMES = [pytest.param(case["name"], marks=pytest.mark.full if size > 1 else ())
                for size, cases in CASES.items()
                for case in cases if case.get("then") == "qwen3_moe_other"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("routing")
    oracle.write_models(base / "models", only=("qwen2_moe", *ORACLES, *ORACLES.values()))
    return base


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return Results(folder, CASES, (), script=RANKS)


def routers(model: Any) -> list[nn.Module]:
    return [
        module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")
    ]


@contextmanager
def choices_of(model: Any) -> Iterator[list[list[Tensor]]]:
    """The experts that each router chooses inside, call by call."""
    made: list[list[Tensor]] = [[] for _ in routers(model)]
    hooks = [router.register_forward_hook(lambda _, inputs, output,
        calls=calls: calls.append(output[2]))
             for router, calls in zip(routers(model), made)]  # fmt: skip
    yield made
    for hook in hooks:
        hook.remove()


def force(model: Any, made: list[list[Tensor]]) -> None:
    """Make each router use those experts: its scores, normalised to 1 over the chosen."""
    for router, calls in zip(routers(model), made):
        given = iter(calls)

        def forward(
            router: Any, inputs: Any, output: Any, given: Iterator[Tensor] = given
        ) -> tuple[Tensor, Tensor, Tensor]:
            chosen = next(given)
            scale = getattr(router, "routed_scaling_factor", None)  # of sigmoid scores
            scores = (output[0].softmax(-1) if scale is None else output[0].sigmoid()).gather(
                1, chosen
            )
            return output[0], (scale or 1.0) * scores / scores.sum(-1, keepdim=True), chosen

        router.register_forward_hook(forward)


def forced_gradients(folder: Path, one: str) -> dict[str, Tensor]:
    """The gradients of the other model with the experts of `one`, in float64."""
    first, second = (oracle._load(folder / "models" / name) for name in (one, ORACLES[one]))
    with choices_of(first) as made:
        oracle._policy_backward(first)
    force(second, made)
    oracle._policy_backward(second)
    return oracle._gradients(second)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Tensor]:
    return forced_gradients(folder, "qwen3_moe")


@pytest.mark.parametrize("name", FORCED_NAMES)
def test_gradients_are_those_of_the_forced_experts(
    name: str, results: Results, expected: dict[str, Tensor]
) -> None:
    result = results[name]
    got = result["gradients"]
    assert set(got) == set(expected)
    assert not oracle.far(got, expected)
    assert result["as_recorded"]
    assert (
        result["metrics"]["train/routing_replay_changed"]
        == results["forced"]["metrics"]["train/routing_replay_changed"]
    )


def test_a_sigmoid_router_replays_too(results: Results, folder: Path) -> None:
    """Whatever its bias says of the experts by now, and when its layer is recomputed."""
    result = results["sigmoid"]
    expected = forced_gradients(folder, "deepseek_v3")
    assert result["gradients"].keys() > expected.keys()  # the biases have none
    assert not oracle.far(result["gradients"], expected)
    assert result["as_recorded"]
    assert 0.2 < result["metrics"]["train/routing_replay_changed"] < 1


def test_the_share_of_changed_choices_is_counted_over_real_tokens_and_layers(
    results: Results,
) -> None:
    share = results["forced"]["metrics"]["train/routing_replay_changed"]
    assert 0.2 < share < 1
    assert results["same"]["metrics"]["train/routing_replay_changed"] == 0
    assert results["same_mixed"]["metrics"]["train/routing_replay_changed"] == 0
    assert results["same_mixed"]["as_recorded"]


def test_unchanged_weights_give_the_same_gradients_to_the_bit(results: Results) -> None:
    off = results["off"]
    same = results["same"]
    assert same["as_recorded"]
    assert "train/routing_replay_changed" not in off["metrics"]
    for name, gradient in off["gradients"].items():
        assert torch.equal(gradient, same["gradients"][name]), name


def test_the_second_step_uses_what_was_recorded_before_the_first(results: Results) -> None:
    result = results["two_steps"]
    assert result["as_recorded"]
    assert result["metrics"]["train/routing_replay_changed"] > 0


# --- one router -----------------------------------------------------------------------------------


def top2(
    scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
) -> tuple[Tensor, Tensor]:
    values, indices = scores.topk(topk, dim=1)
    return values, indices


def test_recomputations_get_the_experts_of_their_forwards_oldest_first() -> None:
    """As with pipeline stages: two micro-batches go forward, then the first is recomputed."""
    choice = ExpertChoice()
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0]], requires_grad=True)
    given = [torch.tensor([[3, 1]], dtype=torch.int16), torch.tensor([[2, 0]], dtype=torch.int16)]
    for one in given:
        choice.given = one
        with torch.no_grad():
            assert (
                choice.get_replay_topk(scores, 2, default_compute_topk=top2)[1].tolist()
                == one.tolist()
            )
    choice.given = None
    for one in given:
        values, chosen = choice.get_replay_topk(scores, 2, default_compute_topk=top2)
        assert chosen.tolist() == one.tolist()
        (gradient,) = torch.autograd.grad(values.sum(), scores)
        assert gradient[0].nonzero()[:, 0].tolist() == sorted(one[0].tolist())
    assert choice.changed is not None
    assert int(choice.changed) == 2
    assert choice.get_replay_topk(scores, 2, default_compute_topk=top2)[1].tolist() == [[0, 1]]


def test_pads_and_the_order_of_a_choice_count_nothing_and_shared_tokens_several_times() -> None:
    choice = ExpertChoice()
    scores = torch.tensor([[4.0, 3.0, 2.0]]).repeat(4, 1).requires_grad_()
    choice.given = torch.tensor([[1, 0], [2, 0], [2, 1], [2, 0]], dtype=torch.int16)
    choice.counts = torch.tensor([5, 1, 0, 3])
    choice.get_replay_topk(scores, 2, default_compute_topk=top2)
    assert choice.changed is not None
    assert int(choice.changed) == 1 + 3


def test_tokens_without_a_record_keep_their_routers_choice_in_the_recomputation_too() -> None:
    choice = ExpertChoice()
    scores = torch.tensor([[4.0, 3.0, 2.0]]).repeat(2, 1)
    choice.given = torch.tensor([[2, 0], [-1, -1]], dtype=torch.int16)
    with torch.no_grad():
        assert choice.get_replay_topk(scores, 2, default_compute_topk=top2)[1].tolist() == [
            [2, 0],
            [0, 1],
        ]
    assert choice.changed is not None
    assert int(choice.changed) == 1
    moved = scores.flip(1).requires_grad_()
    assert choice.get_replay_topk(moved, 2, default_compute_topk=top2)[1].tolist() == [
        [2, 0],
        [0, 1],
    ]
    choice.recomputed = False  # a pass that only scores is never run again
    with torch.no_grad():
        choice.get_replay_topk(scores, 2, default_compute_topk=top2)
    assert not choice.again


def test_the_engines_records_must_be_those_of_the_model() -> None:
    arch = Architecture("qwen3_moe", {}, 31, True, 64, (),
                        {"num_layers": 2, "num_moe_experts": 4, "moe_router_topk": 2})  # fmt: skip
    batch = make_batch()
    with pytest.raises(
        RunFailed,
        match=r"routed_experts are missing, expected \[tokens, 2 layers with experts, 2 experts",
    ):
        check_records(batch, arch)
    batch.routed_experts = torch.zeros(len(batch.tokens), 3, 2, dtype=torch.int16)
    with pytest.raises(RunFailed, match=r"routed_experts are \(3, 2\), expected"):
        check_records(batch, arch)
    batch.routed_experts = torch.full((len(batch.tokens), 2, 2), 3, dtype=torch.int16)
    check_records(batch, arch)
    batch.routed_experts[-1, 1, 0] = 4
    with pytest.raises(
        RunFailed, match=r"routed_experts name expert 4 of a model of 4: set it to logprobs"
    ):
        check_records(batch, arch)
