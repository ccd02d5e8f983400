"""Log-probs, values and full gradients of Megatron under every layout, against plain torch.

Every case has sequences of unequal length, one without any token, some without a trainable one, and
unequal micro-batches; those under data parallelism have a rank without trainable tokens. One launch
per world size runs all its cases.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from cases import CLIP_COV, CORRECTED, KL_COV, LENGTHS, TRAINED, make_batch
from covering_runs import unequal
from spawn import Results

from tests import nccl_rules

IN_FLIGHT = "dp2_distributed_overlap"
TP2 = {"tensor": 2}
TP4 = {"tensor": 4}
PP2 = {"pipeline": 2}
SP2 = {"tensor": 2, "sequence": True}
CP2 = {"context": 2}

OTHER = "qwen3_other"
# Objectives that know more than their micro-batch.
WHOLE_STEPS = {"clip_cov": CLIP_COV, "kl_cov": KL_COV, "corrected": CORRECTED}


def case(
    name: str, plan: str | list[str] | None = "uneven", model: str = "qwen3", **keys: Any
) -> dict[str, Any]:
    planned = {} if plan is None else {"plan": plan}
    return {"name": name, "model": model, **planned, **keys}


# The layouts by themselves are those of test_covering.py; here is what it does not have.
# "full": run by `scripts/test.sh --full` alone, in a launch of their own.
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        case("qwen3", "one", critic=True, share="off"),
        case("shared", "one", critic=True),
        case("merged", "one", critic=True, merged=True),
        case("qwen3_tied", "one", "qwen3_tied"),
        case("qwen2_tied", "one", "qwen2_tied"),
        case("llama", "one", "llama"),
        case("qwen3_three", "one", "qwen3_three", critic=True),
        case("qwen3_six", "one", "qwen3_six"),
        case("uneven", critic=True),
        case("tokens_20", None, max_tokens=20),
        case("tokens_64", None, max_tokens=64),
        case("chunks", "one", chunk_elements=100),
        case("padded", "one", divisible_by=128),
        case("on_policy", leave_out=["old_logprobs"]),
        case("offloaded", "one", reference=OTHER, offload=True),
        case("other_reference", "one", reference=OTHER),
        *(case(f"half{k}", ["half0", "half1"], update=k, critic=True) for k in (0, 1)),
        case("trained", optimizer=TRAINED, steps=3),
        case("poisoned", poison=True),
        case("silent", silent=True, critic=True),
        case("bf16", dtype="bf16", critic=True),
        *(
            case(f"{name}{split}", plan, reference=OTHER, algorithm=algorithm, **how)
            for name, algorithm in WHOLE_STEPS.items()
            for split, plan, how in (
                ("", "one", {}), ("_uneven", "uneven", {}), ("_tokens", None, {"max_tokens": 40}),
            )
        ),
    ],
    2: [
        case("tp2_tied", model="qwen2_tied", parallel=TP2),
        case("tp2_padded", parallel=TP2, divisible_by=64, chunk_elements=100),
        case("tp2_sp", parallel=SP2, critic=True),
        case("pp2", parallel=PP2, critic=True, offload=True),
        case("cp2_merged", parallel=CP2, critic=True, merged=True),
        case("pp2_tied", model="qwen3_tied", parallel=PP2),
        case("pp2_1_2", model="qwen3_three", critic=True,
             parallel={**PP2, "first_stage_layers": 1}),
        case("pp2_2_1", model="qwen3_three", parallel={**PP2, "last_stage_layers": 1}),
        case("vpp2_4_2", "pairs", "qwen3_six",
             parallel={**PP2, "virtual_pipeline": 2, "first_stage_layers": 4}),
        case("dp2_distributed", "starved", distributed=True, critic=True),
        case("dp2_overlap", "starved", "qwen3_tied", optimizer={"overlap": True}),
        case(IN_FLIGHT, "starved", distributed=True, critic=True, optimizer={"overlap": True}),
        case("dp2_planned", None, max_tokens=40),
        *(
            case(f"{prefix}_{name}", plan, reference=OTHER, algorithm=algorithm, **how)
            for prefix, plans, how in (
                ("dp2", ("starved", "dp2", "dp2"), {}),
                ("cp2", ("uneven",) * 3, {"parallel": CP2, "full": True}),
            )
            for (name, algorithm), plan in zip(WHOLE_STEPS.items(), plans)
        ),
        case("tp2_own_old", parallel=SP2, own_old=True),
        case("cp2_own_old", parallel=CP2, own_old=True, full=True),
        *(
            case(f"dp2_half{k}", ["dp2_half0", "dp2_half1"], update=k, critic=True) for k in (0, 1)
        ),
        case("tp2_trained", parallel=TP2, optimizer=TRAINED, steps=3),
        case("dp2_trained", "starved", distributed=True, optimizer=TRAINED, steps=3),
        case("pp2_poisoned", parallel=PP2, poison=True),
        case("pp2_silent", parallel=PP2, silent=True, critic=True),
        case("dp2_silent", "starved", distributed=True, silent=True, critic=True),
        case("tp2_sp_bf16", parallel=SP2, dtype="bf16", critic=True),
        case("cp2", parallel=CP2, critic=True),
        case("cp2_tied", model="qwen2_tied", parallel=CP2, distributed=True),
        case("cp2_llama", model="llama", parallel=CP2, full=True),
    ],
    4: [
        case("tp2_pp2", parallel=TP2 | PP2, critic=True),
        # Two ranks hold a KV head.
        case("tp4", parallel=TP4, critic=True),
        case("tp4_sp_tied", model="qwen2_tied", parallel={**TP4, "sequence": True}),
        case("tp4_trained", parallel=TP4, optimizer=TRAINED, steps=3),
        case("vpp2_dp2_overlap", "dp2", "qwen3_tied", optimizer={"overlap": True},
             parallel={**PP2, "virtual_pipeline": 2}, distributed=True, full=True),
    ],
}  # fmt: skip
# One of each axis, in `./scripts/test.sh`, in launches of their own.
EVERYDAY = ("qwen3", "tp2_sp", "pp2", "dp2_distributed", "cp2", "tp2_pp2")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity")
    oracle.write_models(path / "models")
    return path


@pytest.fixture(scope="session")
def results(folder: Path) -> Results:
    return Results(
        folder,
        CASES,
        [EVERYDAY, [c["name"] for cases in CASES.values() for c in cases if not c.get("full")]],
    )


@pytest.fixture(scope="session")
def by_nccl_rules(folder: Path) -> Results:
    """The cases with overlapped sums, whose buffers are in use while gradients are computed."""
    cases = {
        size: [case for case in cases if case.get("optimizer") == {"overlap": True}]
        for size, cases in CASES.items()
    }
    return Results(folder, cases, [[IN_FLIGHT]], environment=nccl_rules.ON)


def case_named(name: str) -> dict[str, Any]:
    return next(case for cases in CASES.values() for case in cases if case["name"] == name)


def is_full(name: str) -> bool:
    return bool(case_named(name).get("full"))


def tier_of(name: str) -> Any:
    """The mark of the tier in which a case is run."""
    if name in EVERYDAY:
        return pytest.mark.everyday
    return pytest.mark.full if is_full(name) else ()


def each(*names: str) -> list[Any]:
    """The cases as parameters of a test, marked."""
    return [pytest.param(name, marks=tier_of(name)) for name in names]


@pytest.mark.parametrize("name", each("qwen3", "qwen3_tied", "qwen2_tied", "llama"))
def test_one_process_equals_plain_torch(name: str, results: Results, folder: Path) -> None:
    expected = oracle.policy_step(folder / "models" / name)
    oracle.check_scores(results[name]["scores"], expected)
    oracle.check_gradients(results[name]["gradients"]["policy"], expected["gradients"])


@pytest.mark.rest
@pytest.mark.parametrize("name", each("cp2", "cp2_tied", "cp2_llama"))
def test_log_probs_of_context_parallel_ranks_equal_transformers(
    name: str, results: Results, folder: Path
) -> None:
    expected = oracle.policy_step(folder / "models" / case_named(name)["model"])
    oracle.check_scores(results[name]["scores"], expected)


def test_critic_equals_plain_torch(results: Results, folder: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(1, 32, generator=generator) / 33**0.5
    expected = oracle.critic_step(folder / "models" / "qwen3", head)
    got = results["qwen3"]
    oracle.check_scores(got["values"], expected)
    # The vocabulary's output layer has no part in a value.
    gradients = {k: v for k, v in got["gradients"]["critic"].items() if k in expected["gradients"]}
    oracle.check_gradients(gradients, expected["gradients"])


def test_without_old_logprobs_the_step_is_on_policy(results: Results, folder: Path) -> None:
    expected = oracle.policy_step(folder / "models" / "qwen3", on_policy=True)
    oracle.check_gradients(results["on_policy"]["gradients"]["policy"], expected["gradients"])
    assert results["on_policy"]["metrics"]["val/ratio"] == 1.0


RATIOS = [
    case["name"]
    for cases in CASES.values()
    for case in cases
    if case.get("dtype") is None and case.get("steps", 1) == 1 and not case.get("silent")
]


@pytest.mark.parametrize("name", each(*RATIOS))
def test_recorded_ratios_are_those_of_the_update(name: str, results: Results) -> None:
    """What is recorded of each token's update reaches rank 0 in its order from every layout."""
    got = results[name]
    ratio = got["updated"]["ratio"]
    clipped = got["updated"]["clipped"]
    old = got["old_logprobs"]
    if old is None:  # the step is on-policy, and has no ratio
        assert ratio.isnan().all()
        return
    trained = ~ratio.isnan()
    assert bool(trained.all()) == ("update" not in case_named(name))
    assert trained.any()
    expected = (got["scores"]["logprobs"] - old).exp()
    torch.testing.assert_close(ratio[trained], expected[trained], rtol=1e-4, atol=0)
    assert set(clipped[trained].tolist()) <= {0.0, 1.0}
    assert torch.equal(trained, ~clipped.isnan())


EXACT = [
    case["name"]
    for cases in CASES.values()
    for case in cases
    if case["name"] not in oracle.MODELS
    and not {"poison", "silent", "dtype", "leave_out", "update", "steps", "own_old", "algorithm"}
    & case.keys()
]


@pytest.mark.parametrize("name", each(*EXACT))
def test_every_layout_equals_one_process(name: str, results: Results) -> None:
    case = case_named(name)
    got = results[name]
    expected = results[case["model"]]
    oracle.check_step(got, expected)
    if "reference" not in case:  # the initial policy: its KL is 0, not nearly 0
        assert torch.equal(got["reference"]["logprobs"], got["scores"]["logprobs"])
    assert got["padding_is_zero"]
    assert got["skipped"] == (False, False)


def test_a_pack_holds_each_prefix_once(results: Results) -> None:
    """Of sequences that follow each other in the order of their tokens, what both begin with.

    A sixteenth of a sequence is the least.
    """
    sequences = sorted(tokens.tolist() for tokens in make_batch().tokens.split(LENGTHS))
    both = [
        next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        for a, b in pairwise(sequences)
    ]
    shared = sum(n for n, sequence in zip(both, sequences[1:]) if n >= len(sequence) / 16)
    assert shared > 20
    metrics = results["shared"]["metrics"]
    assert metrics["perf/shared_tokens"] == pytest.approx(shared / sum(LENGTHS))
    assert "perf/shared_tokens" not in results["qwen3"]["metrics"], "policy.share_prefixes: off"


@pytest.mark.parametrize(
    ("name", "acts"),
    [
        ("clip_cov", "policy/cov_clipfrac_avg"),
        ("kl_cov", "policy/cov_klfrac_avg"),
        ("corrected", "correction/masked_fraction"),
    ],
)
@pytest.mark.parametrize(
    "split", ["{}_uneven", "{}_tokens", "dp2_{}", pytest.param("cp2_{}", marks=pytest.mark.full)]
)
def test_what_is_known_of_the_whole_step_is_the_same_in_every_split(
    name: str, acts: str, split: str, results: Results
) -> None:
    """Tokens are chosen once an optimizer step, sequences masked, weights by rollout.

    All of them go through credit, ranks and micro-batches.
    """
    expected = results[name]
    got = results[split.format(name)]
    assert 0 < expected["metrics"][acts] < 1
    assert got["metrics"].keys() == expected["metrics"].keys()
    oracle.check_step(got, expected)


@pytest.mark.parametrize("prefix", ["", "dp2_"])
def test_gradients_of_two_optimizer_steps_add_up_to_that_of_one(
    prefix: str, results: Results
) -> None:
    first = results[f"{prefix}half0"]
    second = results[f"{prefix}half1"]
    whole = results["qwen3"]
    oracle.check_scores(first["scores"], whole["scores"])
    for model, expected in whole["gradients"].items():
        summed = {
            name: first["gradients"][model][name] + second["gradients"][model][name]
            for name in expected
        }
        oracle.check_gradients(summed, expected)


@pytest.mark.parametrize("name", each("trained", "tp2_trained", "tp4_trained", "dp2_trained"))
def test_three_steps_of_adamw_equal_torchs(name: str, results: Results, folder: Path) -> None:
    """Clipping, warm-up, cosine, and weight decay that spares norms."""
    expected = oracle.trained(folder / "models" / "qwen3", steps=3)
    got = results[name]
    assert got["metrics"]["lr"] == pytest.approx(oracle.rate(2))
    assert got["metrics"]["train/grad_norm"] > TRAINED["clip_grad"], "clipping was not exercised"
    oracle.check_gradients(got["moved"], expected, 1e-4)


@pytest.mark.parametrize("name", each("tp2_own_old", "cp2_own_old"))
def test_scored_log_probs_are_those_of_the_step_to_the_bit(name: str, results: Results) -> None:
    metrics = results[name]["metrics"]
    assert metrics["policy/approxkl_avg"] == 0
    assert (metrics["val/ratio"], metrics["val/ratio_var"]) == (1, 0)


def test_the_token_budget_decides_the_micro_batches(results: Results) -> None:
    counts = [results[name]["micro_batches"] for name in ("qwen3", "tokens_64", "tokens_20")]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[2] > 3


@pytest.mark.parametrize("name", ["offloaded", "other_reference"])
def test_another_reference(name: str, results: Results, folder: Path) -> None:
    expected = oracle.policy_step(folder / "models" / "qwen3_other")["logprobs"]
    oracle.check_scores(results[name]["reference"], {"logprobs": expected})


@pytest.mark.parametrize("name", each("poisoned", "pp2_poisoned"))
def test_a_step_without_finite_gradients_is_skipped_and_reported(
    name: str, results: Results
) -> None:
    got = results[name]
    assert got["skipped"] == (True, False)
    assert got["unchanged"]["policy"]


@pytest.mark.parametrize("name", each("silent", "dp2_silent", "pp2_silent"))
def test_a_step_without_any_gradient_moves_nothing(name: str, results: Results) -> None:
    """Moments of the step before would move the weights; the critic has a gradient of its own."""
    got = results[name]
    assert got["skipped"] == (False, True)
    assert got["metrics"]["train/grad_norm"] == 0.0
    assert got["unchanged"] == {"policy": True, "critic": False}


@pytest.mark.parametrize("name", each("bf16", "tp2_sp_bf16"))
def test_bf16_stays_near_fp32(name: str, results: Results) -> None:
    """bf16 has 8 bits of mantissa: log-probs within 0.1, the gradient's norm within 5 %."""
    got = results[name]
    expected = results["qwen3"]
    assert (got["scores"]["logprobs"] - expected["scores"]["logprobs"]).abs().max() < 0.1
    assert (got["values"]["values"] - expected["values"]["values"]).abs().max() < 0.1
    for key in ("train/grad_norm", "train/critic_grad_norm"):
        assert got["metrics"][key] == pytest.approx(expected["metrics"][key], rel=0.05)
    for name_, gradients in got["gradients"].items():
        oracle.check_gradients(gradients, expected["gradients"][name_], 0.1)
    assert not got["unchanged"]["policy"]


@pytest.mark.parametrize(
    "name",
    [
        IN_FLIGHT,
        pytest.param("dp2_overlap", marks=pytest.mark.full),
        pytest.param("vpp2_dp2_overlap", marks=pytest.mark.full),
    ],
)
def test_overlapped_sums_by_nccl_rules_equal_gloos_to_the_bit(
    name: str, results: Results, by_nccl_rules: Results
) -> None:
    """No gradient is read, and none is added, while its sum is under way."""
    assert not unequal(results[name], by_nccl_rules[name])
