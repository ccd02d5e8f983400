"""`run.deterministic: true`: a rerun on the same layout is equal bit for bit."""

from __future__ import annotations

import os

import pytest
from rank_runs import Ended, RankRuns
from workspace import LEARNING, Workspace, learned

from backends.megatron.testing import stub_config
from rlcore.launch.process import DETERMINISTIC_LIBRARIES, set_up_torch
from tests import nccl_rules

LAYOUTS = {
    "tp2": ("policy.parallel.tensor=2", "policy.parallel.sequence=true"),
    "dp2": ("policy.optimizer.distributed=true",),
}


def assert_bit_equal(first: Ended, second: Ended) -> None:
    """Metrics but for times, exported weights and checkpoints."""
    assert (first.code, second.code) == (0, 0), first.said + second.said
    rows = learned(first.rows)
    assert rows == learned(second.rows)
    trained = [row["loss/policy_avg"] for row in rows if "loss/policy_avg" in row]
    assert len(set(trained)) == len(trained) == 3
    for folder, pattern in (("hf", "*.safetensors"), ("checkpoints", "*/model/policy/*.distcp")):
        files = sorted(
            path.relative_to(first.folder) for path in (first.folder / folder).glob(pattern)
        )
        assert files
        for file in files:
            assert (first.folder / file).read_bytes() == (second.folder / file).read_bytes(), file


@pytest.mark.full  # in every run of the tests two ranks end as two others did: test_soak.py
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_rerun_is_bit_equal(rank_runs: RankRuns, layout: str) -> None:
    options = (
        *LAYOUTS[layout], *LEARNING, "run.deterministic=true", "training.steps=3",
        "algorithm.minibatches=2", "algorithm.epochs=2", "algorithm.kl.loss_coef=0.01",
        "checkpoint.every=1",
    )  # fmt: skip
    first, second = (
        rank_runs.train(f"deterministic_{layout}_{number}", *options) for number in (1, 2)
    )
    assert_bit_equal(first, second)


@pytest.mark.parametrize("layout", ["dp2", pytest.param("tp2", marks=pytest.mark.full)])
def test_a_run_by_the_rules_of_nccl_equals_one_over_gloo(
    workspace: Workspace, rank_runs: RankRuns, layout: str
) -> None:
    """Generation, evaluation, batches, scores, training, publication, checkpoints and export."""
    options = (
        *LAYOUTS[layout], *LEARNING, "rollout.service=in_process", "training.steps=3",
        "algorithm.estimator.name=ppo", "algorithm.minibatches=2", "checkpoint.every=2",
        workspace.heldout,
        "evaluation.max_prompts=4", "evaluation.every=2",
    )  # fmt: skip
    gloo = rank_runs.train(f"over_gloo_{layout}", *options)
    ours = rank_runs.train(f"by_nccl_rules_{layout}", *options, environment=nccl_rules.ON)
    assert ours.said.count(nccl_rules.INSTALLED) == 2, ours.said
    assert_bit_equal(gloo, ours)
    assert any("eval" in name for row in ours.rows for name in row)


def test_the_libraries_of_a_gpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of cuBLAS, NCCL and Transformer Engine; a user's value stays."""
    import torch

    for name in DETERMINISTIC_LIBRARIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    try:
        set_up_torch(stub_config("run.deterministic=true"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert {name: os.environ[name] for name in DETERMINISTIC_LIBRARIES} == {
            **DETERMINISTIC_LIBRARIES,
            "NCCL_ALGO": "Tree",
        }
    finally:
        torch.use_deterministic_algorithms(False)
