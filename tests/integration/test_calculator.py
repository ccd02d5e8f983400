"""examples/calculator: whole conversations as data, an environment with tools in a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from workspace import Workspace

from rlcore.runs.rollouts import read_rollouts
from tests.integration.calculator_kit import CALCULATOR, ENV_RUN, WARM, make_data, train, warm_up
from tests.timeline_checks import check_timeline

GRPO = (
    *ENV_RUN, "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
    "evaluation.max_prompts=8", "checkpoint.every=1", f"policy.checkpoint={WARM}",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and a small model that has seen a few conversations."""
    folder = tmp_path_factory.mktemp("calculator")
    make_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        warm_up(workspace)
    return folder


def test_conversations_are_held_to_the_calculator(made: Path) -> None:
    """Right ones end with the right answer, and no question of the tests is in the warm-up."""
    data = made / "build" / "calculator" / "data"
    rows = {
        name: [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test", "warmup")
    }
    held_out = {row["question"] for row in rows["test"]}
    assert not held_out & {row["question"] for row in rows["train"]}
    right = 0
    for row in rows["warmup"]:
        question = row["messages"][0]["content"]
        assert question not in held_out
        right += row["messages"][-1]["content"] == str(eval(question))
        assert [tool["function"]["name"] for tool in row["tools"]] == ["add", "subtract"]
    assert 0.2 < right / len(rows["warmup"]) < 0.3


def test_the_policy_talks_to_it_and_a_resumed_run_says_the_same(
    workspace: Workspace, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(str(CALCULATOR))
    whole = train(workspace, "whole", *GRPO, "training.steps=2")
    samples = list(read_rollouts(whole.rollouts(2)))
    assert len(samples) == 16
    calls = [m.get("tool_calls") for sample in samples for m in sample["messages"]]
    assert any(calls), "the warm-up was too short for calls"
    for sample in samples:
        check_conversation(sample)
    train(workspace, "halves", *GRPO, "training.steps=1")
    again = train(workspace, "halves", *GRPO, "training.steps=2", "--resume")
    assert [s["tokens"] for s in read_rollouts(again.rollouts(2))] == [s["tokens"] for s in samples]
    groups = check_timeline(again.folder, again.rows, lockstep=True)
    used = [span for span in groups["tools"] if span.step == 2 and span.name in ("add", "subtract")]
    held_out = read_rollouts(again.folder / "evaluations" / "step_000002.parquet")
    talks = [sample["messages"] for sample in (*samples, *held_out)]
    called = [
        call for talk in talks for message in talk for call in message.get("tool_calls") or ()
    ]
    # those that their tool refuses are recorded too
    assert 0 < len(used) <= len(called), "each call of a tool that there is, with its arguments"
    assert all("/" in span.args["group"] for span in used)


def check_conversation(sample: dict[str, Any]) -> None:
    roles = [message["role"] for message in sample["messages"]]
    assert roles[0] == "user"
    assert roles.count("assistant") == sample["turns"] == len(sample["turn_spans"])
    trained = sum(sample["loss_mask"])
    assert [span[2] for span in sample["turn_spans"]][:1] == [0]
    assert sample["turn_spans"][-1][3] == trained == len(sample["rollout_logprobs"])
    for number, message, start, end in sample["turn_spans"]:
        assert roles[message] == "assistant"
        assert 0 <= start < end <= trained
        assert number < sample["turns"]
    calls = sum(len(m.get("tool_calls") or ()) for m in sample["messages"])
    assert roles.count("tool") >= calls - 1  # the last one may have no turn left
    assert sample["reward"] == sample["outcome"]["reward"]
    right = sample["messages"][-1].get("content") == sample["label"]
    assert sample["metadata"]["correct"] is (sample["reward"] == 1.0) is right
