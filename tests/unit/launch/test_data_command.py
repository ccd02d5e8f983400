"""`rlcore data`: what a user sees of rows before a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlcore.config.load import load_config
from rlcore.errors import DataError
from rlcore.launch.commands.data import show_data

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from public_rows import verl_gsm8k, write_parquet


@pytest.fixture
def report(tiny_model, tmp_path):
    def make(*overrides: str, rows: int = 2) -> list[str]:
        path = write_parquet(
            tmp_path / "gsm8k.parquet", [verl_gsm8k(f"{i}+{i}", str(2 * i)) for i in range(1, 40)]
        )
        given = ["run.name=x", f"model.path={tiny_model}", "training.steps=1",
                 "rollout.sampling.max_new_tokens=8", f"data.paths={path}", *overrides]  # fmt: skip
        return list(show_data(load_config([], given).config, rows=rows))

    return make


def test_rows_are_shown_as_the_model_sees_them(report):
    lines = report("reward.parts={right: {function: exact_match}}", "data.max_prompt_tokens=4")
    text = "\n".join(lines)
    assert "format verl, prompt in 'prompt', label in 'reward_model.ground_truth'" in lines[0]
    assert "gsm8k.parquet:2: a prompt of 3 tokens\n2+2\n" in text
    assert "label    '4'" in lines
    assert "reward   1 for the label itself: '4'" in lines
    assert "reward   0 for a wrong answer: '2'" in lines
    assert not any(line.startswith("!") for line in lines)
    table = lines.index("tokens of prompts")
    assert lines[table + 2].split() == ["openai/gsm8k", "9", "30", "3", "3", "3", "3"]
    assert lines[table + 3].startswith("left out: 30 with more than data.max_prompt_tokens = 4")


def test_a_reward_that_does_not_know_the_answer_is_pointed_out(report):
    lines = report("reward.parts={right: {function: 'public_rows:no_idea'}}", rows=1)
    assert lines.count("reward   0 for the label itself: '2'") == 1
    assert sum(line.startswith("! the reward scores the label no higher") for line in lines) == 1
    assert "data.label_key" in next(line for line in lines if line.startswith("!"))
    with pytest.raises(DataError, match=r"data\.label_key.*reward_model\.ground_truth"):
        report("data.label_key=reward_model")


def test_what_a_workflow_rewards_is_not_asked(report):
    own = "env: {source: workflow}"
    lines = report(f"reward.parts={{{own}}}", rows=1)
    assert "reward   not asked: env (the workflow gives it)" in lines
    lines = report(f"reward.parts={{right: {{function: exact_match}}, {own}}}", rows=1)
    assert "reward   1 for the label itself: '2'" in lines
    assert "         without env (the workflow gives it)" in lines
    assert not any(line.startswith("!") for line in lines)


def test_supervised_rows_show_what_is_trained(report):
    lines = report("algorithm.loss.name=sft", "training.batch_size=4")
    assert "trained  2 tokens behind 3: '4<eos>'" in lines
    assert "tokens of prompts with their answers" in lines


def test_supervised_rows_that_do_not_fit_are_counted(report):
    lines = report("algorithm.loss.name=sft", "policy.max_tokens_per_microbatch=5")
    assert lines[-1].startswith("left out: 35 with more than policy.max_tokens_per_microbatch, for")
    table = lines.index("tokens of prompts with their answers")
    assert lines[table + 2].split() == ["openai/gsm8k", "4", "35", "5", "5", "5", "5"]


def test_sources_show_their_weights(report, tmp_path, tiny_model):
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    both = {
        "a": {"paths": str(tmp_path / "gsm8k.parquet"), "weight": 1},
        "b": {"paths": str(path), "weight": 3},
    }
    lines = report("data.paths=[]", f"data.sources={json.dumps(both)}")
    assert lines[-2:] == [
        "  a: 25.0%, each row 0.26 times an epoch",
        "  b: 75.0%, each row 30 times an epoch",
    ]


def test_evaluation_sets_are_shown_with_their_own_keys_and_rewards(report, tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "label": "2", "sum": "3"}) + "\n")
    lines = report(
        "reward.parts={right: {function: exact_match}, long: {function: overlong, args: {buffer:"
        " 4}}}",
        f"evaluation.paths={path}",
        f"evaluation.sets={{own: {{paths: '{path}', label_key: sum, reward: {{parts: {{m:"
        " {function: math}}}}}",
    )
    heads = [line.partition(": ")[0] for line in lines if "rows, format" in line]
    assert heads == ["data", "evaluation", "evaluation.sets.own"]
    own = lines[next(i for i, line in enumerate(lines) if line.startswith("evaluation.sets")) :]
    assert "label    '3'" in own
    assert "reward   1 for the label in a box: '\\\\boxed{3}'" in own
    assert sum(line == "tokens of prompts" for line in lines) == 3


def test_labels_of_an_evaluation_set_are_checked(report, tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "label": {"ground_truth": "2"}}) + "\n")
    with pytest.raises(DataError, match=r"held\.jsonl:1: .* got a map with 'ground_truth'"):
        report("reward.parts={right: {function: exact_match}}", f"evaluation.paths={path}")
