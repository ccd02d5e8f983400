"""Agent programs in real runs over the embedded engine: what they do, and what is trained."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_logprobs import logprobs
from workspace import ROOT, Workspace

from rlcore.data.sample import Sample
from rlcore.runs.rollouts import read_rollouts
from tests.integration.calculator_kit import (
    AGENT,
    AGENT_RUN,
    WARM,
    make_data,
    think,
    train,
    warm_up,
)

GRPO = (
    *AGENT_RUN, "policy.optimizer.lr=1e-3", "training.steps=2", "checkpoint.every=2",
    "rollout.sampling.max_new_tokens=96",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and a small model that thinks a little and calls tools."""
    folder = tmp_path_factory.mktemp("agent")
    think(make_data(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        warm_up(workspace)
    return folder


@pytest.mark.parametrize(
    "stream", [pytest.param(False, marks=pytest.mark.full), True], ids=["whole", "streamed"]
)
def test_log_probs_are_those_of_a_forward_pass_whatever_the_program_does(
    workspace: Workspace, made: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(str(AGENT))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "integration"))
    import agent_programs

    agent_programs.kinds.clear()
    done = train(
        workspace, f"wild-{stream}", *GRPO, "rollout.workflow.run=agent_programs:run",
        f"rollout.workflow.options.stream={str(stream).lower()}", "rollout.service=in_process",
        "rollout.prompts_per_step=12",
        "rollout.samples_per_prompt=2", "evaluation=null", "training.steps=1",
    )  # fmt: skip
    records = list(read_rollouts(done.rollouts(1)))
    samples = [Sample.from_record(record) for record in records]
    expected = logprobs(made / WARM / "hf", samples)
    for sample, right in zip(samples, expected, strict=True):
        given = torch.from_numpy(sample.rollout_logprobs).double()
        assert len(given) > 0
        torch.testing.assert_close(given, right, atol=1e-4, rtol=0)

    ran = Counter(kind for kind, _ in agent_programs.kinds)
    assert set(ran) == set(agent_programs.KINDS)
    assert min(ran.values()) >= 2
    seen = Counter[str]()
    for kind, counts in agent_programs.kinds:
        seen.update({f"{kind}: {name}": int(value) for name, value in counts.items()})
    for kind in ("echoes", "drops thoughts", "rewrites results"):
        assert seen[f"{kind}: thoughts"], "the warm-up was too short for thoughts"
        assert seen[f"{kind}: calls"], "the warm-up was too short for calls"
    assert check_rollouts(samples) == {
        "repeated": ran["retries"],
        "abandoned": ran["abandons"],
        # of two turns, the first is shared; each rewriting of a result is a branch
        "branches": ran["in parallel"] + ran["abandons"] + 2 * ran["rewrites results"],
    }


def check_rollouts(samples: list[Sample]) -> dict[str, int]:
    """Each turn is trained in one sample. Returns what the rollouts say of their calls."""
    found = Counter[str]()
    rollouts: dict[int, list[Sample]] = {}
    for sample in samples:
        rollouts.setdefault(sample.rollout_id, []).append(sample)
    for parts in rollouts.values():
        counts = next(part.measured for part in parts if part.measured)
        turns = [span.turn for part in parts for span in part.turn_spans]
        assert sorted(turns) == list(range(int(counts["turns"])))
        found["repeated"] += int(counts["repeated_calls"])
        found["abandoned"] += int(counts["abandoned_calls"])
        found["branches"] += len(parts) - 1
    return dict(found)


def test_the_example_trains(
    workspace: Workspace, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(str(AGENT))
    done = train(
        workspace, "agent", *GRPO, "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
        "evaluation.max_prompts=8",
    )  # fmt: skip
    samples = [record for step in (1, 2) for record in read_rollouts(done.rollouts(step))]
    check_example(samples, 32)
    assert max(sample["turns"] for sample in samples) > 1, "the warm-up was too short for calls"
    assert "eval/accuracy" in done.rows[2]


def test_the_same_program_trains_as_a_command(
    workspace: Workspace, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    command = json.dumps([sys.executable, str(AGENT / "calculator_agent.py")])
    done = train(
        workspace, "command", *GRPO, "rollout.workflow.run=null",
        f"rollout.workflow.command={command}", "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2", "evaluation=null",
    )  # fmt: skip
    check_example([r for step in (1, 2) for r in read_rollouts(done.rollouts(step))], 8)


def check_example(samples: list[dict[str, Any]], count: int) -> None:
    assert len(samples) == count, "a program that only appends makes one sample a rollout"
    for sample in samples:
        roles = [message["role"] for message in sample["messages"]]
        assert roles.count("assistant") == sample["turns"] == sample["measured"]["turns"]
        right = sample["messages"][-1]["content"] == sample["label"]
        assert sample["reward"] == sample["outcome"]["correct"] == float(right)
