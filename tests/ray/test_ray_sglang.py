"""Real SGLang on a Ray cluster: ranks and engine on separate nodes, or on both nodes by turns."""

from __future__ import annotations

import psutil
import pytest

from rlcore.runs.versions import read_versions
from tests.integration.accounting_checks import read_samples, version_faults
from tests.integration.async_checks import check_async_run
from tests.integration.hf_logprobs import gaps_by_version
from tests.integration.workspace import LEARNING, Run, Workspace
from tests.ray.ray_runs import Going, RayRuns

STEPS = 4
# An engine takes a whole node, and so do the ranks with the rollout service.
SGLANG = (
    *LEARNING,
    "rollout.service=process",
    "policy.parallel.tensor=2",
    "cluster.processes_per_node=2",
    "cluster.ray.engine_cpus=2",
    "rollout.engine={kind: sglang, threads: 1, device: cpu, start_timeout_s: 500}",
    f"training.steps={STEPS}",
    "checkpoint.every=1",
    f"checkpoint.keep={STEPS}",
)


def nodes_of(going: Going) -> dict[str, set[int]]:
    """The raylets above each part: a raylet is a node."""
    parts = {"ranks": going.rank_pids(), "engine": [going.engine_pid()]}
    return {part: {raylet_above(pid) for pid in pids} for part, pids in parts.items()}


def look_at_turns(going: Going) -> dict[str, list[int]]:
    """The raylet above each rank, and above each engine."""
    engines = [going.engine_pid(index) for index in range(2)]
    parts = {"ranks": going.rank_pids(), "engines": engines}
    return {part: [raylet_above(pid) for pid in pids] for part, pids in parts.items()}


def raylet_above(pid: int) -> int:
    return next(
        process.pid for process in psutil.Process(pid).parents() if process.name() == "raylet"
    )


def check_books(run: Run, staleness: int) -> None:
    """The ledger balances, versions only grow, and the oldest tokens are exactly at the bound."""
    assert max(check_async_run(run.folder, steps=STEPS, staleness=staleness)) == staleness
    assert version_faults([vars(one) for one in read_versions(run.folder / "versions.jsonl")]) == []


def check_logprobs(workspace: Workspace, run: Run) -> None:
    """Every token has the log-prob that transformers gives it with the weights of its version."""
    samples = [sample for step in range(1, STEPS + 1) for sample in read_samples(run.folder, step)]
    gaps = gaps_by_version(workspace, run, samples)
    assert len(gaps) == STEPS
    assert max(gaps.values()) < 1e-4, gaps


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("staleness", [0, 1])
def test_nodes_share_a_run(ray_runs: RayRuns, staleness: int) -> None:
    workspace = ray_runs.workspace
    seen = []
    run = ray_runs.train(
        f"sglang_{staleness}",
        *SGLANG,
        f"rollout.max_staleness={staleness}",
        "rollout.on_update=retract",
        acts=[(2, lambda going: seen.append(nodes_of(going)))],
        held_after=0,
    )
    assert run.code == 0, run.err
    assert {len(raylets) for raylets in seen[0].values()} == {1}
    assert len(set.union(*seen[0].values())) == 2, "some parts shared a node"

    check_books(run, staleness)
    check_logprobs(workspace, run)
    if staleness == 0:
        assert all(row["rollout/train_rollout_logprob_diff"] < 1e-5 for row in run.metrics)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_engines_of_two_nodes_take_turns_with_the_ranks(ray_runs: RayRuns) -> None:
    seen = []
    run = ray_runs.train(
        "sglang_turns",
        *SGLANG,
        *("cluster.nodes=2", "cluster.processes_per_node=1", "cluster.ray.engine_cpus=1"),
        *("rollout.engine.colocated=true", "rollout.engine.count=2"),
        acts=[(2, lambda going: seen.append(look_at_turns(going)))],
        held_after=0,
    )
    assert run.code == 0, run.err
    assert seen[0]["ranks"] == seen[0]["engines"]
    assert len(set(seen[0]["ranks"])) == 2
    check_books(run, 0)
    check_logprobs(ray_runs.workspace, run)
    assert all(row["rollout/train_rollout_logprob_diff"] < 1e-5 for row in run.metrics)
