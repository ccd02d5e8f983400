"""Scores to advantages without Megatron on a CPU: every estimator, the raw KL, two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mpu_stub_cases import LENGTHS, PART_WEIGHTS, PARTS, full_batch
from torch import Tensor

from backends.megatron import ParallelState, compute_advantages_and_returns
from backends.megatron.testing import stub_batch, stub_config, stub_mpu
from rlcore.algorithms import (
    Advantages,
    EstimatorInputs,
    KeywordError,
    MissingInputError,
    approx_kl,
    build_estimator,
    estimator_keywords,
    estimator_names,
    normalize_advantages,
    whiten,
)
from rlcore.data.batch import RolloutBatch
from rlcore.errors import ConfigError, RunFailed
from tests.pages import blocks

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ALONE = ParallelState.from_mpu(stub_mpu())
RAW = "algorithm.normalize_advantages=none"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / script), *arguments]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def results_of(processes: list[subprocess.Popen[str]]) -> list[Any]:
    try:
        outputs = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


# --- every estimator ------------------------------------------------------------------------------


def test_every_estimator_runs_where_megatron_cannot_be_imported() -> None:
    ((names, imported),) = results_of([start("mpu_stub_offline.py")])
    assert set(names) <= set(estimator_names()), (
        "this process may hold plugins of other tests besides"
    )
    assert {"ppo", "grpo", "reinforce++"} <= set(names)
    assert imported == []


def inputs_of(batch: RolloutBatch, kl: Tensor) -> EstimatorInputs:
    fields: dict[str, Any] = {name: value for name, value in batch.vectors.items() if name != "kl"}
    return EstimatorInputs(cu_seqlens=batch.cu_seqlens, kl=kl, **fields)


def assert_same(got: Advantages, expected: Advantages) -> None:
    assert torch.equal(got.advantages, expected.advantages)
    assert (got.returns is None) == (expected.returns is None)
    assert (
        got.returns is None
        or expected.returns is None
        or torch.equal(got.returns, expected.returns)
    )


@pytest.mark.parametrize("name", estimator_names())
def test_it_is_the_estimator_called_directly(name: str) -> None:
    batch = full_batch()
    options: dict[str, Any] = {}
    overrides = [f"algorithm.estimator.name={name}", RAW]
    if "kl_coef" in estimator_keywords(name):
        options |= {"kl_coef": 0.3, "distill_coef": 0.2}
        overrides += ["algorithm.kl.reward_coef=0.3", "algorithm.kl.reward_kind=k2"]
        overrides += ["algorithm.distillation.coef=0.2", "teacher.path=unread"]
    if "reward_weights" in estimator_keywords(name):
        options["reward_weights"] = [*PART_WEIGHTS.values()]
        overrides += PARTS
    kl = approx_kl(batch.vectors["logprobs"], batch.vectors["ref_logprobs"], "k2")
    expected = build_estimator(name, **options)(inputs_of(full_batch(), kl))
    assert_same(compute_advantages_and_returns(batch, stub_config(*overrides), ALONE), expected)


@pytest.mark.parametrize("mode", ["batch", "group"])
def test_advantages_are_normalised_as_configured_and_returns_are_not(mode: str) -> None:
    raw, normalised = (
        compute_advantages_and_returns(
            full_batch(),
            stub_config("algorithm.estimator.name=ppo", f"algorithm.normalize_advantages={given}"),
            ALONE,
        )
        for given in ("none", mode)
    )
    batch = full_batch()
    expected = normalize_advantages(
        raw.advantages, batch.cu_seqlens, batch.vectors["group_ids"], mode
    )
    assert_same(normalised, Advantages(expected, raw.returns))
    assert not torch.equal(expected, raw.advantages)
    if mode == "batch":
        assert torch.equal(expected, whiten(raw.advantages))


# --- the raw KL -----------------------------------------------------------------------------------


def assert_kl_is_raw(batch: RolloutBatch, kind: Any) -> None:
    fresh = full_batch().vectors
    raw = approx_kl(fresh["logprobs"], fresh["ref_logprobs"], kind)
    assert torch.equal(batch.vectors["kl"], raw)
    assert batch.vectors["kl"]._version == raw._version


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize(
    "name", [name for name in estimator_names() if "kl_coef" in estimator_keywords(name)]
)
def test_the_kl_stays_raw_when_rewards_are_shaped_with_it(name: str, kind: str) -> None:
    config, unshaped = (
        stub_config(
            f"algorithm.estimator.name={name}",
            f"algorithm.kl.reward_kind={kind}",
            f"algorithm.kl.reward_coef={coef}",
        )
        for coef in (0.3, 0.0)
    )
    batch = full_batch()
    versions = {field: vector._version for field, vector in batch.vectors.items()}
    shaped = compute_advantages_and_returns(batch, config, ALONE)
    assert_kl_is_raw(batch, kind)
    assert {field: batch.vectors[field]._version for field in versions} == versions
    assert not torch.equal(
        shaped.advantages, compute_advantages_and_returns(full_batch(), unshaped, ALONE).advantages
    )


def test_scaling_the_kl_in_place_would_be_seen() -> None:
    """The KL is compared in a way that finds an error of slime's PPO branch.

    It multiplied the logged KL by -kl_coef and added the reward to its last token.
    """
    batch = full_batch()
    compute_advantages_and_returns(
        batch, stub_config("algorithm.estimator.name=ppo", "algorithm.kl.reward_coef=0.3"), ALONE
    )
    batch.vectors["kl"].mul_(1.0)  # even where the numbers stay, the version counter has moved
    with pytest.raises(AssertionError):
        assert_kl_is_raw(batch, "k1")
    batch = full_batch()
    batch.set(
        "kl", approx_kl(batch.vectors["logprobs"], batch.vectors["ref_logprobs"], "k1") * -0.3
    )
    with pytest.raises(AssertionError):
        assert_kl_is_raw(batch, "k1")


PLUGINS = """
import torch
from rlcore.algorithms import Advantages, expand_to_tokens

calls = []

class Shapes:
    needs = {"kl"}

    def __init__(self, *, how: str = "mul_") -> None:
        self.how = how

    def __call__(self, inputs):
        kl = inputs.kl
        if self.how == "mul_":
            kl.mul_(-0.3)
        elif self.how == "data":
            kl.data.mul_(-0.3)
        else:
            kl.numpy()[:] *= -0.3
        return Advantages(kl)

class Random:
    def __call__(self, inputs):
        calls.append("Random")
        return Advantages(torch.randn(inputs.num_tokens,
            generator=torch.Generator().manual_seed(torch.seed() % 2**31)))

class Wide(Random):
    def __call__(self, inputs):
        advantages = expand_to_tokens(inputs.rewards, inputs.cu_seqlens).double()
        return Advantages(advantages,
            returns=torch.zeros(1, dtype=torch.float64).expand(inputs.num_tokens))

class Broken(Random):
    def __call__(self, inputs):
        return Advantages(torch.zeros(1))
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stub_plugins.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "stub_plugins", raising=False)
    return tmp_path


@pytest.mark.parametrize("how", ["mul_", "data", "numpy"])
def test_a_plugin_that_writes_into_the_kl_is_refused_and_does_not_reach_it(
    plugins: Path, how: str
) -> None:
    batch = full_batch()
    with pytest.raises(RunFailed, match="'stub_plugins:Shapes' wrote into its input 'kl'"):
        compute_advantages_and_returns(
            batch,
            stub_config(f"algorithm.estimator={{name: 'stub_plugins:Shapes', how: {how}}}"),
            ALONE,
        )
    assert_kl_is_raw(batch, "k1")


# --- two ranks ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of two gloo ranks; see mpu_stub_ranks.py."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "stub_plugins.py").write_text(PLUGINS)
    return results_of(
        [
            start("mpu_stub_ranks.py", str(rank), str(folder / "store"), str(folder))
            for rank in (0, 1)
        ]
    )


def test_two_ranks_get_what_rank_0_computed_once(two_ranks: list[Any]) -> None:
    zero, one = two_ranks
    assert (zero["coordinates"], one["coordinates"]) == ([0, 2, 0, [0, 1]], [1, 2, 1, [0, 1]])
    for case in ("ppo", "random", "alike", "wide"):
        assert zero[case] == one[case]
        assert len(zero[case]["advantages"]) == sum(LENGTHS)
    config = stub_config("algorithm.estimator.name=ppo", "algorithm.kl.reward_coef=0.2")
    here = compute_advantages_and_returns(full_batch(), config, ALONE)
    assert here.returns is not None
    assert (zero["ppo"]["advantages"], zero["ppo"]["returns"]) == (
        here.advantages.tolist(),
        here.returns.tolist(),
    )
    assert zero["random"]["advantages"] != zero["alike"]["advantages"], (
        "the plugin draws anew at each call"
    )
    assert (one["wide"]["dtype"], one["random"]["returns"]) == ("torch.float64", None)
    assert (zero["calls"], one["calls"]) == (["Random", "Random"], [])


def test_what_goes_wrong_on_rank_0_ends_both(two_ranks: list[Any]) -> None:
    zero, one = two_ranks
    assert zero["broken"]["says"].startswith(
        "algorithm.estimator: estimator 'stub_plugins:Broken': advantages: expected shape"
    )
    assert one["broken"] == {
        "error": "FailedElsewhere", "says": "computing the advantages failed on rank 0; its log "
        "has the reason"
    }  # fmt: skip
    for seen in (zero, one):
        assert "has no dp_group: mpu.get_data_parallel_group is missing" in seen["group"]
        assert (
            "no rank of 2 is the last of 1 pipeline stages of data-parallel rank 1 of 2"
            in seen["contradiction"]
        )


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "missing", "says"),
    [
        ("ppo", "values", r"'values' \(float \[M\]; set critic.path\)"),
        ("ppo", "rewards", r"'rewards' \(float \[B\]; RolloutBatch.from_samples makes it\)"),
        (
            "ppo",
            "ref_logprobs",
            r"'ref_logprobs' \(float \[M\]; 'kl' is computed from it; set algorithm.kl.reward_coef",
        ),
        ("grpo", "group_ids", r"'group_ids' \("),
    ],
)
def test_a_vector_that_is_missing_is_named(estimator: str, missing: str, says: str) -> None:
    batch = full_batch()
    del batch.vectors[missing]
    config = stub_config(
        f"algorithm.estimator.name={estimator}",
        f"algorithm.kl.reward_coef={0.1 * (estimator == 'ppo')}",
    )
    with pytest.raises(
        MissingInputError, match=rf"^estimator '{estimator}': batch.vectors lacks {says}"
    ):
        compute_advantages_and_returns(batch, config, ALONE)


def test_a_kl_that_was_computed_elsewhere_counts() -> None:
    config = stub_config("algorithm.estimator.name=ppo", "algorithm.kl.reward_coef=0.1", RAW)
    expected = compute_advantages_and_returns(batch := full_batch(), config, ALONE)
    del batch.vectors["ref_logprobs"]
    assert_same(compute_advantages_and_returns(batch, config, ALONE), expected)


def test_no_batch_without_a_process_group_is_refused() -> None:
    rank_1 = ParallelState.from_mpu(stub_mpu(data=2, rank=1))
    with pytest.raises(ValueError, match=r"^batch: got None"):
        compute_advantages_and_returns(None, stub_config("algorithm.estimator.name=grpo"), rank_1)


def test_a_configuration_made_by_hand_ignores_nothing_in_silence(plugins: Path) -> None:
    grpo = stub_config("algorithm.estimator.name=grpo")
    plugin = stub_config("algorithm.estimator.name=stub_plugins:Random")
    for config in (grpo, plugin):
        config.algorithm.kl.reward_coef = 0.1
        with pytest.raises(
            ConfigError, match=r"^algorithm.kl.reward_coef.*: got 0.1, but estimator .* takes no KL"
        ):
            compute_advantages_and_returns(full_batch(), config, ALONE)
    ppo = stub_config("algorithm.estimator.name=ppo")
    ppo.algorithm.estimator = type(ppo.algorithm.estimator).model_validate(
        {"name": "ppo", "kl_coef": 0.1}
    )
    with pytest.raises(
        ConfigError, match=r"algorithm.estimator.kl_coef.*set algorithm.kl.reward_coef instead"
    ):
        compute_advantages_and_returns(full_batch(), ppo, ALONE)
    ppo.algorithm.estimator = type(ppo.algorithm.estimator).model_validate(
        {"name": "ppo", "lamda": 0.1}
    )
    with pytest.raises(KeywordError, match="unknown keyword 'lamda'"):
        compute_advantages_and_returns(full_batch(), ppo, ALONE)
    with pytest.raises(ConfigError, match=r"algorithm.loss.name: 'sft'"):
        compute_advantages_and_returns(
            full_batch(), stub_config("algorithm.loss.name=sft", "data.label_key=a"), ALONE
        )


def test_a_batch_of_numbers() -> None:
    batch = stub_batch([2, 0, 1], rewards=[1, 0, 0.5], versions=[3, 3, 4])
    assert batch.cu_seqlens.tolist() == [0, 2, 2, 3]
    assert batch.vectors["rewards"].dtype == torch.float32
    assert batch.vectors["group_ids"].tolist() == [0, 0, 0]
    assert batch.versions is not None
    assert (batch.versions.each().dtype, batch.versions.each().tolist()) == (torch.int64, [3, 3, 4])
    with pytest.raises(ValueError, match=r"batch.values has shape \(2,\), expected \(3,\)"):
        stub_batch([2, 0, 1], values=[1.0, 2.0])


@pytest.mark.rest
def test_the_page_on_testing_shows_code_that_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = ROOT / "docs" / "testing.md"
    alone, with_stub, fixture, several_ranks = (
        one.text for one in blocks(page) if one.language == "python"
    )
    names: dict[str, Any] = {}
    exec(alone, {})
    exec(with_stub, names)
    assert names["result"].advantages.shape == (5,)
    assert capsys.readouterr().out.count("tensor(") == 3
    exec(several_ranks, names)
    names["run_rank"](0, 1, str(tmp_path / "store"))
    (tmp_path / "test_page.py").write_text(fixture)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tmp_path / "test_page.py"),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "1 passed" in done.stdout, done.stdout
