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
from torch import Tensor

from tests import nccl_rules

TIGHT = 1e-5  # relative, over each whole tensor
IN_FLIGHT = "dp2_distributed_overlap"
TP2 = {"tensor": 2}
PP2 = {"pipeline": 2}
SP2 = {"tensor": 2, "sequence": True}
CP2 = {"context": 2}

# "full": run by `scripts/test.sh --full` alone, in a launch of their own.
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"name": "qwen3", "model": "qwen3", "plan": "one", "critic": True, "share": "off"},
        {"name": "shared", "model": "qwen3", "plan": "one", "critic": True},
        {"name": "merged", "model": "qwen3", "plan": "one", "critic": True, "merged": True},
        {"name": "qwen3_tied", "model": "qwen3_tied", "plan": "one"},
        {"name": "qwen2_tied", "model": "qwen2_tied", "plan": "one"},
        {"name": "llama", "model": "llama", "plan": "one"},
        {"name": "qwen3_three", "model": "qwen3_three", "plan": "one", "critic": True},
        {"name": "qwen3_six", "model": "qwen3_six", "plan": "one"},
        {"name": "uneven", "model": "qwen3", "plan": "uneven", "critic": True},
        {"name": "tokens_20", "model": "qwen3", "max_tokens": 20},
        {"name": "tokens_64", "model": "qwen3", "max_tokens": 64},
        {"name": "chunks", "model": "qwen3", "plan": "one", "chunk_elements": 100},
        {"name": "padded", "model": "qwen3", "plan": "one", "divisible_by": 128},
        {"name": "on_policy", "model": "qwen3", "plan": "uneven", "leave_out": ["old_logprobs"]},
        {"name": "recompute", "model": "qwen3", "plan": "uneven",
         "megatron": {"recompute_granularity": "full", "recompute_method": "uniform",
             "recompute_num_layers": 1}},
        {"name": "offloaded", "model": "qwen3", "plan": "one", "reference": "qwen3_other",
         "offload": True},
        {"name": "other_reference", "model": "qwen3", "plan": "one", "reference": "qwen3_other"},
        {"name": "half0", "model": "qwen3", "plan": ["half0", "half1"], "update": 0,
         "critic": True},
        {"name": "half1", "model": "qwen3", "plan": ["half0", "half1"], "update": 1,
         "critic": True},
        {"name": "trained", "model": "qwen3", "plan": "uneven", "optimizer": TRAINED, "steps": 3},
        {"name": "poisoned", "model": "qwen3", "plan": "uneven", "poison": True},
        {"name": "silent", "model": "qwen3", "plan": "uneven", "silent": True, "critic": True},
        {"name": "bf16", "model": "qwen3", "plan": "uneven", "dtype": "bf16", "critic": True},
        *({"name": f"{name}{split}", "model": "qwen3", "reference": "qwen3_other",
            "algorithm": algorithm, **how}
          for name, algorithm in (("clip_cov", CLIP_COV), ("kl_cov", KL_COV),
              ("corrected", CORRECTED))
          for split, how in (("", {"plan": "one"}), ("_uneven", {"plan": "uneven"}),
              ("_tokens", {"max_tokens": 40}))),
    ],
    2: [
        {"name": "tp2", "model": "qwen3", "plan": "uneven", "parallel": TP2, "critic": True},
        {"name": "tp2_tied", "model": "qwen2_tied", "plan": "uneven", "parallel": TP2},
        {"name": "tp2_padded", "model": "qwen3", "plan": "uneven", "parallel": TP2,
         "divisible_by": 64},
        {"name": "tp2_sp", "model": "qwen3", "plan": "uneven", "parallel": SP2, "critic": True},
        {"name": "tp2_sp_tied", "model": "qwen3_tied", "plan": "uneven", "parallel": SP2},
        {"name": "pp2", "model": "qwen3", "plan": "uneven", "parallel": PP2, "critic": True,
         "offload": True},
        {"name": "cp2_merged", "model": "qwen3", "plan": "uneven", "parallel": CP2, "critic": True,
         "merged": True},
        {"name": "pp2_tied", "model": "qwen3_tied", "plan": "uneven", "parallel": PP2},
        {"name": "vpp2", "model": "qwen3", "plan": "pairs",
         "parallel": {"pipeline": 2, "virtual_pipeline": 2}},
        {"name": "pp2_1_2", "model": "qwen3_three", "plan": "uneven", "critic": True,
         "parallel": {"pipeline": 2, "first_stage_layers": 1}},
        {"name": "pp2_2_1", "model": "qwen3_three", "plan": "uneven",
         "parallel": {"pipeline": 2, "last_stage_layers": 1}},
        {"name": "vpp2_4_2", "model": "qwen3_six", "plan": "pairs",
         "parallel": {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 4}},
        {"name": "dp2", "model": "qwen3", "plan": "dp2", "critic": True},
        {"name": "dp2_starved", "model": "qwen3", "plan": "starved"},
        {"name": "dp2_distributed", "model": "qwen3", "plan": "starved", "distributed": True,
         "critic": True},
        {"name": "dp2_overlap", "model": "qwen3_tied", "plan": "starved",
         "optimizer": {"overlap": True}},
        {"name": "dp2_distributed_overlap", "model": "qwen3", "plan": "starved",
         "distributed": True, "critic": True,
         "optimizer": {"overlap": True}},
        {"name": "dp2_planned", "model": "qwen3", "max_tokens": 40},
        {"name": "dp2_clip_cov", "model": "qwen3", "reference": "qwen3_other",
         "algorithm": CLIP_COV, "plan": "starved"},
        {"name": "dp2_kl_cov", "model": "qwen3", "reference": "qwen3_other", "algorithm": KL_COV,
         "plan": "dp2"},
        {"name": "dp2_corrected", "model": "qwen3", "reference": "qwen3_other",
         "algorithm": CORRECTED, "plan": "dp2"},
        {"name": "tp2_own_old", "model": "qwen3", "plan": "uneven", "parallel": SP2,
         "own_old": True},
        {"name": "dp2_half0", "model": "qwen3", "plan": ["dp2_half0", "dp2_half1"], "update": 0,
         "critic": True},
        {"name": "dp2_half1", "model": "qwen3", "plan": ["dp2_half0", "dp2_half1"], "update": 1,
         "critic": True},
        {"name": "tp2_trained", "model": "qwen3", "plan": "uneven", "parallel": TP2,
         "optimizer": TRAINED, "steps": 3},
        {"name": "dp2_trained", "model": "qwen3", "plan": "starved", "distributed": True,
         "optimizer": TRAINED, "steps": 3},
        {"name": "pp2_poisoned", "model": "qwen3", "plan": "uneven", "parallel": PP2,
         "poison": True},
        {"name": "pp2_silent", "model": "qwen3", "plan": "uneven", "parallel": PP2,
         "silent": True, "critic": True},
        {"name": "dp2_silent", "model": "qwen3", "plan": "starved", "distributed": True,
         "silent": True, "critic": True},
        {"name": "tp2_sp_bf16", "model": "qwen3", "plan": "uneven", "parallel": SP2,
         "dtype": "bf16", "critic": True},
        {"name": "cp2", "model": "qwen3", "plan": "uneven", "parallel": CP2, "critic": True},
        {"name": "cp2_tied", "model": "qwen2_tied", "plan": "uneven", "parallel": CP2,
         "distributed": True},
        {"name": "cp2_llama", "model": "llama", "plan": "uneven", "parallel": CP2, "full": True},
        {"name": "cp2_planned", "model": "qwen3", "max_tokens": 40, "parallel": CP2, "full": True},
        {"name": "cp2_recompute", "model": "qwen3", "plan": "uneven", "parallel": CP2, "full": True,
         "megatron": {"recompute_granularity": "full", "recompute_method": "uniform",
             "recompute_num_layers": 1}},
        {"name": "cp2_own_old", "model": "qwen3", "plan": "uneven", "parallel": CP2,
         "own_old": True, "full": True},
        {"name": "cp2_corrected", "model": "qwen3", "reference": "qwen3_other",
         "algorithm": CORRECTED, "plan": "uneven",
         "parallel": CP2, "full": True},
        {"name": "cp2_clip_cov", "model": "qwen3", "reference": "qwen3_other",
         "algorithm": CLIP_COV, "plan": "uneven",
         "parallel": CP2, "full": True},
        {"name": "cp2_kl_cov", "model": "qwen3", "reference": "qwen3_other", "algorithm": KL_COV,
         "plan": "uneven",
         "parallel": CP2, "full": True},
        {"name": "cp2_half0", "model": "qwen3", "plan": ["half0", "half1"], "update": 0,
         "critic": True, "parallel": CP2,
         "full": True},
        {"name": "cp2_half1", "model": "qwen3", "plan": ["half0", "half1"], "update": 1,
         "critic": True, "parallel": CP2,
         "full": True},
        {"name": "cp2_trained", "model": "qwen3", "plan": "uneven", "parallel": CP2,
         "distributed": True,
         "optimizer": TRAINED, "steps": 3, "full": True},
        {"name": "cp2_poisoned", "model": "qwen3", "plan": "uneven", "parallel": CP2,
         "poison": True, "full": True},
        {"name": "cp2_bf16", "model": "qwen3", "plan": "uneven", "parallel": CP2, "dtype": "bf16",
         "critic": True,
         "full": True},
    ],
    4: [
        {"name": "tp2_pp2", "model": "qwen3", "plan": "uneven",
         "parallel": {"tensor": 2, "pipeline": 2}, "critic": True},
        {"name": "tp2_sp_pp2_tied", "model": "qwen3_tied", "plan": "uneven",
         "parallel": {"tensor": 2, "pipeline": 2, "sequence": True}},
        {"name": "tp2_dp2_distributed", "model": "qwen3", "plan": "starved", "parallel": TP2,
         "distributed": True},
        {"name": "vpp2_dp2_overlap", "model": "qwen3_tied", "plan": "dp2",
         "optimizer": {"overlap": True},
         "parallel": {"pipeline": 2, "virtual_pipeline": 2}, "distributed": True},
        {"name": "pp2_dp2", "model": "qwen3", "plan": "starved", "parallel": PP2, "critic": True},
        {"name": "tp2_sp_cp2", "model": "qwen3", "plan": "uneven", "parallel": SP2 | CP2,
         "critic": True},
        {"name": "tp2_cp2_tied", "model": "qwen3_tied", "plan": "uneven", "parallel": TP2 | CP2,
         "full": True},
        {"name": "tp2_sp_cp2_padded", "model": "qwen3", "plan": "uneven", "parallel": SP2 | CP2,
         "divisible_by": 64,
         "full": True},
        {"name": "pp2_cp2", "model": "qwen3", "plan": "uneven", "parallel": PP2 | CP2,
         "critic": True, "full": True},
        {"name": "pp2_cp2_tied", "model": "qwen3_tied", "plan": "uneven", "parallel": PP2 | CP2,
         "full": True},
        {"name": "vpp2_cp2", "model": "qwen3", "plan": "pairs",
         "parallel": PP2 | CP2 | {"virtual_pipeline": 2},
         "full": True},
        {"name": "cp4", "model": "qwen3", "plan": "uneven", "parallel": {"context": 4},
         "critic": True, "full": True},
        {"name": "cp4_tied", "model": "qwen2_tied", "plan": "one", "parallel": {"context": 4},
         "full": True},
        {"name": "cp2_dp2_distributed", "model": "qwen3", "plan": "starved", "parallel": CP2,
         "distributed": True,
         "critic": True, "full": True},
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


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def check_gradients(got: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert got.keys() == expected.keys()
    far = {name: d for name in expected if not (d := distance(got[name], expected[name])) <= bound}
    assert not far, f"relative distance of gradients above {bound}: {far}"


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
    got = results[name]
    torch.testing.assert_close(
        got["scores"]["logprobs"].double(), expected["logprobs"], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        got["scores"]["entropy"].double(), expected["entropy"], atol=1e-5, rtol=0
    )
    check_gradients(got["gradients"]["policy"], expected["gradients"], TIGHT)


@pytest.mark.rest
@pytest.mark.parametrize("name", each("cp2", "cp2_tied", "cp2_llama"))
def test_log_probs_of_context_parallel_ranks_equal_transformers(
    name: str, results: Results, folder: Path
) -> None:
    expected = oracle.policy_step(folder / "models" / case_named(name)["model"])
    got = results[name]["scores"]
    for key in ("logprobs", "entropy"):
        torch.testing.assert_close(got[key].double(), expected[key], atol=1e-5, rtol=0)


def test_critic_equals_plain_torch(results: Results, folder: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(1, 32, generator=generator) / 33**0.5
    expected = oracle.critic_step(folder / "models" / "qwen3", head)
    got = results["qwen3"]
    torch.testing.assert_close(
        got["values"]["values"].double(), expected["values"], atol=1e-5, rtol=0
    )
    # The vocabulary's output layer has no part in a value.
    gradients = {k: v for k, v in got["gradients"]["critic"].items() if k in expected["gradients"]}
    check_gradients(gradients, expected["gradients"], TIGHT)


def test_without_old_logprobs_the_step_is_on_policy(results: Results, folder: Path) -> None:
    expected = oracle.policy_step(folder / "models" / "qwen3", on_policy=True)
    check_gradients(results["on_policy"]["gradients"]["policy"], expected["gradients"], TIGHT)
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
    for key in ("logprobs", "entropy"):
        torch.testing.assert_close(got["scores"][key], expected["scores"][key], atol=1e-5, rtol=0)
    if "reference" not in case:  # the initial policy: its KL is 0, not nearly 0
        assert torch.equal(got["reference"]["logprobs"], got["scores"]["logprobs"])
    if case.get("critic"):
        torch.testing.assert_close(
            got["values"]["values"], expected["values"]["values"], atol=1e-5, rtol=0
        )
    for model, gradients in got["gradients"].items():
        check_gradients(gradients, expected["gradients"][model], TIGHT)
    for metric in got["metrics"].keys() - {"perf/shared_tokens"}:  # packs differ in what they share
        assert got["metrics"][metric] == pytest.approx(
            expected["metrics"][metric], rel=1e-4, abs=1e-6
        ), metric
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
    check_gradients(got["gradients"]["policy"], expected["gradients"]["policy"], TIGHT)
    assert got["metrics"].keys() == expected["metrics"].keys()
    for metric in got["metrics"].keys() - {"perf/shared_tokens"}:
        assert got["metrics"][metric] == pytest.approx(
            expected["metrics"][metric], rel=1e-4, abs=1e-6
        ), metric


@pytest.mark.parametrize("prefix", ["", "dp2_", pytest.param("cp2_", marks=pytest.mark.full)])
def test_gradients_of_two_optimizer_steps_add_up_to_that_of_one(
    prefix: str, results: Results
) -> None:
    first = results[f"{prefix}half0"]
    second = results[f"{prefix}half1"]
    whole = results["qwen3"]
    torch.testing.assert_close(
        first["scores"]["logprobs"], whole["scores"]["logprobs"], atol=1e-5, rtol=0
    )
    for model, expected in whole["gradients"].items():
        summed = {
            name: first["gradients"][model][name] + second["gradients"][model][name]
            for name in expected
        }
        check_gradients(summed, expected, TIGHT)


@pytest.mark.parametrize("name", each("trained", "tp2_trained", "dp2_trained", "cp2_trained"))
def test_three_steps_of_adamw_equal_torchs(name: str, results: Results, folder: Path) -> None:
    """Clipping, warm-up, cosine, and weight decay that spares norms."""
    expected = oracle.trained(folder / "models" / "qwen3", steps=3)
    got = results[name]
    assert got["metrics"]["lr"] == pytest.approx(oracle.rate(2))
    assert got["metrics"]["train/grad_norm"] > TRAINED["clip_grad"], "clipping was not exercised"
    far = {
        key: d for key in expected if not (d := distance(got["moved"][key], expected[key])) <= 1e-4
    }
    assert not far, f"relative distance of what three steps changed: {far}"


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
    torch.testing.assert_close(
        results[name]["reference"]["logprobs"].double(), expected, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("name", each("poisoned", "pp2_poisoned", "cp2_poisoned"))
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


@pytest.mark.parametrize("name", each("bf16", "tp2_sp_bf16", "cp2_bf16"))
def test_bf16_stays_near_fp32(name: str, results: Results) -> None:
    """bf16 has 8 bits of mantissa: log-probs within 0.1, the gradient's norm within 5 %."""
    got = results[name]
    expected = results["qwen3"]
    assert (got["scores"]["logprobs"] - expected["scores"]["logprobs"]).abs().max() < 0.1
    assert (got["values"]["values"] - expected["values"]["values"]).abs().max() < 0.1
    for key in ("train/grad_norm", "train/critic_grad_norm"):
        assert got["metrics"][key] == pytest.approx(expected["metrics"][key], rel=0.05)
    for name_, gradients in got["gradients"].items():
        check_gradients(gradients, expected["gradients"][name_], 0.1)
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
