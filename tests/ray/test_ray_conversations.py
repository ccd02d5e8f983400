"""Conversations on a Ray cluster are those of a local run: an environment, an agent program."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.runs.rollouts import read_rollouts
from tests.integration import calculator_kit
from tests.integration.accounting_checks import read_samples
from tests.integration.calculator_kit import AGENT, AGENT_RUN, CALCULATOR, ENV_RUN, WARM
from tests.integration.hf_logprobs import gaps_by_version
from tests.integration.workspace import Run, Workspace
from tests.ray.ray_runs import balance

STEPS = 2
RUNS = {"env": ENV_RUN, "agent": AGENT_RUN}
GIVEN = (
    f"training.steps={STEPS}", "evaluation=null", "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4", "policy.optimizer.lr=1e-3", "checkpoint.every=1",
    f"policy.checkpoint={WARM}",
)  # fmt: skip


@pytest.fixture(scope="module")
def _in_a_calculator(
    workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The current folder has data and a small model that has seen a few conversations."""
    folder = tmp_path_factory.mktemp("calculator")
    calculator_kit.make_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for path in map(str, (AGENT, CALCULATOR)):
            patch.syspath_prepend(path)  # for this process
            patch.setenv("PYTHONPATH", path, prepend=os.pathsep)  # for those of a cluster
        calculator_kit.warm_up(workspace)
        yield


def samples_of(run: Run) -> list[dict[str, Any]]:
    """All recorded samples, without what depends on the clock."""
    records = [
        record for step in range(1, STEPS + 1) for record in read_rollouts(run.rollouts(step))
    ]
    for record in records:
        for name in ("engine_s", "tool_s"):
            record["measured"].pop(name, None)
    return records


@pytest.mark.usefixtures("_in_a_calculator")
@pytest.mark.parametrize("kind", ["env", pytest.param("agent", marks=pytest.mark.full)])
def test_conversations_on_a_cluster_equal_local_ones(
    workspace: Workspace, cluster: Any, kind: str
) -> None:
    local = calculator_kit.train(workspace, f"local {kind}", *RUNS[kind], *GIVEN)
    on_ray = ("cluster.launcher=ray", f"cluster.ray.address={cluster.address}")
    run = calculator_kit.train(workspace, f"ray {kind}", *RUNS[kind], *GIVEN, *on_ray)
    samples = samples_of(run)
    assert samples == samples_of(local)
    assert run.exported.read_bytes() == local.exported.read_bytes()
    assert max(sample["turns"] for sample in samples) > 1, "the warm-up was too short for calls"
    assert any(m["role"] == "tool" for sample in samples for m in sample["messages"])
    assert balance(run, STEPS)["consumed"] == 4 * STEPS


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("_in_a_calculator")
def test_an_agent_command_over_sglang_on_a_cluster(workspace: Workspace, cluster: Any) -> None:
    """Each rollout is a process beside the service's actor, and talks to its gateway."""
    command = f"[{sys.executable}, {AGENT / 'calculator_agent.py'}]"
    run = calculator_kit.train(
        workspace, "command", *RUNS["agent"], *GIVEN, "cluster.launcher=ray",
        f"cluster.ray.address={cluster.address}", "cluster.ray.engine_cpus=1",
        "rollout.workflow.run=null", f"rollout.workflow.command={command}",
        "rollout.engine={kind: sglang, threads: 1, device: cpu, start_timeout_s: 500}",
    )  # fmt: skip
    samples = [sample for step in (1, STEPS) for sample in read_samples(run.folder, step)]
    assert max(sample.turns for sample in samples) > 1, "the warm-up was too short for calls"
    assert any(m["role"] == "tool" for sample in samples for m in sample.messages or ())
    gaps = gaps_by_version(workspace, run, samples, start=Path(WARM) / "hf")
    assert len(gaps) == STEPS
    assert max(gaps.values()) < 1e-4, gaps
    assert balance(run, STEPS)["consumed"] == 4 * STEPS
