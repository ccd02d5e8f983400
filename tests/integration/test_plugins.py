"""Algorithms of other packages, found by entry point and by import path, and trained with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rank_runs import RankRuns
from workspace import LEARNING, ROOT, Run, Workspace

from rlcore.data.sample import Sample
from rlcore.runs.rollouts import read_rollouts
from tests.pages import block, commands

ESTIMATOR = """\
import torch
from rlcore.algorithms import Advantages, EstimatorInputs, expand_to_tokens


class Ranked:
    needs = frozenset()

    def __init__(self, *, scale: float = 1.0):
        self.scale = scale

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        ranks = inputs.rewards.argsort().argsort().float()
        ranks = self.scale * (ranks - ranks.mean()) / max(len(ranks) - 1, 1)
        return Advantages(expand_to_tokens(ranks, inputs.cu_seqlens))
"""
LOSS = """\
from rlcore.algorithms import PolicyLoss, PolicyLossInputs


class Vanilla:
    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        surprise = -inputs.logprobs.detach()
        return PolicyLoss(-inputs.advantages * inputs.logprobs, {"surprise": surprise})
"""


def installed(folder: Path) -> Path:
    """Make what pip installs of a package with two entry points: its code and a dist-info."""
    site = folder / "site"
    (site / "ranked_rl").mkdir(parents=True)
    (site / "ranked_rl" / "__init__.py").write_text("")
    (site / "ranked_rl" / "estimators.py").write_text(ESTIMATOR)
    (site / "ranked_rl" / "losses.py").write_text(LOSS)
    info = site / "ranked_rl-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ranked-rl\nVersion: 1.0\n")
    estimator = "ranked = ranked_rl.estimators:Ranked"
    loss = "vanilla = ranked_rl.losses:Vanilla"
    (info / "entry_points.txt").write_text(
        f"[rlcore.estimators]\n{estimator}\n\n[rlcore.policy_losses]\n{loss}\n"
    )
    return site


def expected_advantages(samples: list[Sample], scale: float) -> list[float]:
    ranks = np.argsort(np.argsort([sample.reward for sample in samples])).astype(np.float64)
    return list(scale * (ranks - ranks.mean()) / (len(ranks) - 1))


def assert_trained_with_ranks(run: Run, scale: float) -> None:
    assert run.code == 0, run.out + run.err
    for step in (1, 2, 3):
        records = read_rollouts(run.rollouts(step))
        samples = [Sample.from_record(record) for record in records]
        for record, advantage in zip(records, expected_advantages(samples, scale), strict=True):
            assert np.allclose(record["advantages"], advantage, atol=1e-6)
            assert len(record["advantages"]) == sum(record["loss_mask"])
        assert run.rows[step]["train/grad_norm"] > 0


def test_the_estimator_is_short() -> None:
    assert len(ESTIMATOR.splitlines()) <= 15


def test_an_installed_package_is_found_by_its_entry_points(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: nothing but an installed package tells rlcore of it."""
    site = installed(tmp_path)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "rlcore", "train", str(workspace.base), "run.name=entry point",
               *LEARNING, "algorithm.estimator={name: ranked, scale: 2.0}",
               "algorithm.loss.name=vanilla"]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
    )
    run = Run(done.returncode, done.stdout, done.stderr, workspace.folder / "runs" / "entry point")
    assert_trained_with_ranks(run, 2.0)
    assert all(row["policy/surprise_avg"] > 1.0 for row in run.metrics), (
        "a metric of the plugin's own"
    )

    monkeypatch.syspath_prepend(site)
    listed = workspace.command("config", "--algorithms").out
    assert re.search(r"^  ranked$", listed, re.MULTILINE)
    assert "scale: float = 1.0" in listed


def test_the_same_class_by_its_import_path(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "by_path.py").write_text(ESTIMATOR)
    monkeypatch.syspath_prepend(tmp_path)
    named = ("algorithm.estimator.name=by_path:Ranked", "algorithm.estimator.scale=0.5")
    assert_trained_with_ranks(workspace.train("import path", *LEARNING, *named), 0.5)

    for override, hint in (
        ("algorithm.estimator.scael=1", "did you mean algorithm.estimator.scale?"),
        ("algorithm.estimator.scale=high", "'scale' expected float, got 'high'"),
        ("algorithm.estimator.name=by_path:Rnked", "did you mean 'Ranked'?"),
        ("algorithm.estimator.name=by_pth:Ranked", "no module 'by_pth'"),
        ("algorithm.kl.reward_coef=0.1", "takes no KL into its reward and would ignore it"),
    ):
        refused = workspace.train("refused plugin", *named, override)
        assert refused.code == 2
        assert hint in refused.err
        assert "Traceback" not in refused.err
        assert not refused.folder.exists()


def test_the_estimator_of_the_first_run_works_as_printed(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs" / "first-run.md"
    code = block(page, "my_package/credit.py").text
    [command] = [
        words[-1] for _, words in commands(page) if words[-1].startswith("algorithm.estimator.name")
    ]
    assert len(code.strip().splitlines()) <= 16
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "credit.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    [check] = [words[-1] for _, words in commands(page, "python -c")]
    report = subprocess.run(
        [sys.executable, "-c", check],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "0 skipped" in report.stdout
    run = workspace.train("first-run", *LEARNING, command)
    assert run.code == 0, run.err
    for record in read_rollouts(run.rollouts(1)):
        assert set(record["advantages"]) <= {0.0, 1.0}
    by_group: dict[int, list[tuple[float, float]]] = {}
    for record in read_rollouts(run.rollouts(3)):
        by_group.setdefault(record["group_id"], []).append(
            (record["reward"], record["advantages"][0])
        )
    assert len(by_group) == 4
    assert all(max(group)[1] == 1.0 and min(group)[1] == 0.0 for group in by_group.values())


def test_a_loss_may_report_other_metrics_on_each_rank(rank_runs: RankRuns) -> None:
    """Each is averaged over the tokens that it was reported for, under its own name."""
    run = rank_runs.train(
        "other metrics",
        "algorithm.loss.name=failing_plugins:OtherMetricsOnRank1",
        "training.steps=1",
        "checkpoint.export_hf=false",
    )
    assert run.code == 0, run.said
    own = {name: run.rows[0].get(f"policy/{name}_avg") for name in ("zero", "one", "two")}
    assert own == {"zero": 0.0, "one": 1.0, "two": 2.0}
