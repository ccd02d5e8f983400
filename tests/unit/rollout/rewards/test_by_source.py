"""Parts by the source of a row, and labels that graders cannot read."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from reward_kit import score

from rlcore.config.sections.reward import RewardConfig
from rlcore.data.examples import Example
from rlcore.errors import DataError
from rollout.rewards.labels import check_labels

BY_SOURCE = {
    "by": "data_source",
    "parts": {
        "words": {"function": "f1", "sources": ["squad", "qa/*"]},
        "exact": {"function": "exact_match", "sources": ["sums"]},
        "long": {"function": "overlong", "args": {"buffer": 1, "max_tokens": 1}, "weight": 0.5},
    },
}


def check(reward: dict, *rows: tuple[object, dict], label_key: str | None = "label") -> None:
    examples = [
        Example(f"a.jsonl:{i}", "1+1=", label, row, label_key=label_key)
        for i, (label, row) in enumerate(rows, 1)
    ]
    prompts: Any = SimpleNamespace(examples=examples)
    config = SimpleNamespace(
        reward=RewardConfig.model_validate(reward), data=SimpleNamespace(label_key=label_key)
    )
    check_labels(config, prompts)


def test_the_source_of_a_row_chooses_its_parts(sample):
    batch = [
        sample("the cat", "cat dog", data_source="squad"),
        sample("2", "2", data_source="sums"),
        sample("x", "y", data_source="qa/hotpot"),
        sample("2", "2", data_source=["sums", "squad"]),
    ]
    (counts,) = score(BY_SOURCE, batch)
    assert [s.reward_parts for s in batch] == [
        {"words": pytest.approx(2 / 3), "long": 0.0},
        {"exact": 1.0, "long": 0.0},
        {"words": 0.0, "long": 0.0},
        {"words": 1.0, "exact": 1.0, "long": 0.0},
    ]
    assert [s.reward for s in batch] == pytest.approx([2 / 3, 1.0, 0.0, 2.0])
    assert [s.metadata["correct"] for s in batch] == [False, True, False, True]
    assert counts.errors == 0


def test_the_column_may_lie_inside_another(sample):
    batch = [sample("2", "2", extra_info={"kind": "sums"})]
    score({**BY_SOURCE, "by": "extra_info.kind"}, batch)
    assert batch[0].reward_parts == {"exact": 1.0, "long": 0.0}


def test_a_sample_that_lost_its_source_is_a_counted_failure(sample):
    batch = [sample("2", "2"), sample("2", "2", data_source="sums")]
    assert score(BY_SOURCE, batch)[0].errors == 1
    assert "reward.by: the row has no text" in batch[0].metadata["reward_error"]
    assert batch[1].reward == 1.0


def test_a_row_that_no_part_scores_is_refused_with_the_known_sources():
    check(BY_SOURCE, ("2", {"data_source": "sums"}), ("2", {"data_source": "qa/x"}))
    with pytest.raises(
        DataError, match=r"a\.jsonl:2: no reward part scores the source 'code'.*qa/\*, squad, sums"
    ):
        check(BY_SOURCE, ("2", {"data_source": "sums"}), ("2", {"data_source": "code"}))
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*at 'data_source'.*columns prompt_id"):
        check(BY_SOURCE, ("2", {"prompt_id": 3}))


def test_only_the_labels_that_a_part_reads_are_checked():
    reward = {
        "by": "s",
        "parts": {
            "exact": {"function": "exact_match", "sources": ["sums"]},
            "free": {"function": "user_rewards:length", "sources": ["free"]},
        },
    }
    check(reward, ("2", {"s": "sums"}), ({"any": "thing"}, {"s": "free"}))
    with pytest.raises(DataError, match=r"a\.jsonl:1.*reward\.parts\.exact"):
        check(reward, ({"any": "thing"}, {"s": "sums"}))


@pytest.mark.parametrize(
    ("function", "good"),
    [
        ("math", ["4", 4, ["4", "5"], "\\boxed{\\pi}", "\\infty"]),
        ("exact_match", ["4", 4, ["4", "5"], ""]),
        ("f1", ["4", 4, ["4", "5"], ""]),
        ("choice", ["B", "(B)", "B) Paris", ["A", "C."]]),
    ],
)
def test_a_label_that_is_a_map_names_the_likely_key(function, good):
    reward = {"parts": {"right": {"function": function}}}
    label = {"style": "rule", "ground_truth": "4"}
    with pytest.raises(
        DataError,
        match=r"a\.jsonl:1: the label must be text or a number for reward\.parts\.right, got a map"
        r" with 'style', 'ground_truth': set data\.label_key to reward_model\.ground_truth",
    ):
        check(reward, (label, {}), label_key="reward_model")
    check(reward, *((one, {}) for one in good))
    with pytest.raises(DataError, match="got null"):
        check(reward, (None, {}))
    with pytest.raises(DataError, match="got bool"):
        check(reward, (True, {}))


@pytest.mark.parametrize(
    ("function", "label", "message"),
    [
        ("choice", "Paris", "'Paris' is none of the choices ABCD"),
        ("choice", "E", "'E' is none of the choices ABCD"),
        ("choice", 2, "'2' is none of the choices ABCD"),
        ("choice", "b", "'b' is none of the choices ABCD"),
        ("choice", ["A", "Paris"], "'Paris' is none of the choices ABCD"),
        ("choice", "", "'' is none of the choices ABCD"),
        ("math", " ", "' ' is no mathematics"),
        ("math", "$$", "is no mathematics"),
        ("math", "\\boxed{}", "is no mathematics"),
        ("math", ["4", ""], "'' is no mathematics"),
        *((f, math.nan, "text or a number") for f in ("math", "exact_match", "f1")),
        *((f, [], "text or a number") for f in ("math", "exact_match", "f1", "choice")),
        ("code", {"inputs": "12", "outputs": "34"}, "inputs must be a list, got str '12'"),
        ("code", {"inputs": {"a": 1}, "outputs": [1]}, "inputs must be a list, got dict"),
        ("code", {"inputs": ["1"], "outputs": [None]}, "an input or output is null"),
        ("code", {"fn_name": 5, "inputs": [[1]], "outputs": [1]}, "must be text, got 5"),
        ("code", {"fn_name": "f", "inputs": [{"a": 1}], "outputs": [1]}, "arguments of a call"),
        ("code", {"fn_name": "f", "inputs": [1], "outputs": [1]}, "arguments of a call"),
        ("ifeval", {"func_name": "verify_bullet_points", "N": "3"}, "N is '3'"),
        ("reasoning_gym", "4", "no column 'reasoning_gym'"),
    ],
)
def test_labels_that_the_grader_cannot_read_are_refused_at_load(function, label, message):
    args = {"choices": "ABCD"} if function == "choice" else {}
    reward = {"parts": {"right": {"function": function, "args": args}}}
    said = rf"a\.jsonl:1: .*{re.escape(message)}.*reward\.parts\.right"
    with pytest.raises(DataError, match=said):
        check(reward, (label, {}))


@pytest.mark.parametrize(
    "entry",
    [
        {"task": None, "settings": {}, "entry": {}},
        {"task": "gcd", "settings": "{}", "entry": {}},
        {"task": "gcd", "settings": {}, "entry": None},
    ],
)
def test_an_entry_of_other_types_is_refused_at_load(entry):
    reward = {"parts": {"right": {"function": "reasoning_gym"}}}
    with pytest.raises(DataError, match=r"a\.jsonl:1: the row has no column 'reasoning_gym'"):
        check(reward, ("4", {"reasoning_gym": entry}))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"parts": {"m": {"function": "math", "sources": ["a"]}}}, "`by` does not say"),
        ({"parts": {"m": {"function": "math"}}, "by": "data_source"}, "no part has `sources`"),
        ({"parts": {"m": {"source": "workflow", "args": {"a": 1}}}}, "`args` are for a function"),
    ],
)
def test_sources_and_column_belong_together(reward, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig.model_validate(reward)
