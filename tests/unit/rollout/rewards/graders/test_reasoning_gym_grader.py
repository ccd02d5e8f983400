"""The grader `reasoning_gym`, over the package's own scorers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlcore.config.load import load_config
from rlcore.data.paths.reasoning_gym import COLUMN, GymRows
from rlcore.data.sample import Sample
from rlcore.errors import DataError
from rollout.rewards.graders.reasoning_gym import ReasoningGym
from rollout.rewards.labels import check_labels
from tests.unit.data.prompt_sets import load_set

MakeSample = Callable[..., Sample]


@pytest.fixture
def graded(sample: MakeSample) -> Callable[..., dict[str, Any]]:
    def grade(task: str, response: str, answer: str = "all") -> dict[str, Any]:
        row = GymRows(f"reasoning-gym:{task}?seed=1&size=1")[0]
        filled = response.replace("RIGHT", row["answer"])
        return ReasoningGym(answer)(sample(filled, row["answer"], **{COLUMN: row[COLUMN]}))

    return grade


def test_the_answer_stands_where_it_is_asked_for(graded: Callable[..., dict[str, Any]]) -> None:
    right = {"score": 1.0, "correct": True}
    for place, text in {
        "all": "<think>7 or 8</think> RIGHT\n",  # a scorer alone would mark spaces down
        "tagged": "It is 12.\n<answer> RIGHT </answer>",
        "boxed": r"So \boxed{RIGHT}",
    }.items():
        found = graded("gcd", text, place)
        assert {key: found[key] for key in right} == right, place
    assert graded("gcd", "RIGHT", "tagged") == {"score": 0.0, "correct": False}


def test_part_of_the_score_is_not_right(graded: Callable[..., dict[str, Any]]) -> None:
    found = graded("gcd", "it may be RIGHT")
    assert 0 < found["score"] < 1
    assert found["correct"] is False


def test_an_answer_at_which_the_scorer_raises_is_wrong(
    graded: Callable[..., dict[str, Any]],
) -> None:
    found = graded("prime_factorization", "zzz")
    assert (found["score"], found["correct"]) == (0.0, False)
    assert found["info"]["raised"].startswith("ValueError")


def test_rows_of_other_data_are_refused(
    write_rows: Callable[..., str], tokenizer: Any, tmp_path: Any
) -> None:
    path = write_rows([{"prompt": "1+1=", "label": "2"}])
    config = load_config([], [
        "run.name=x", f"model.path={tmp_path}", f"data.paths={path}", "training.steps=1",
        "reward.parts={right: {function: reasoning_gym}}",
    ]).config  # fmt: skip
    prompts = load_set([path], tokenizer)
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*no column 'reasoning_gym'.*parts\.right"):
        check_labels(config, prompts)
