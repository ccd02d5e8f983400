"""Rows of reasoning-gym's tasks, which are real here."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from rlcore.config.sections.data import DataConfig
from rlcore.data.examples import check_examples, open_examples
from rlcore.data.paths.reasoning_gym import COLUMN, GymRows, score
from rlcore.errors import DataError


def rows(path: str) -> list[dict[str, Any]]:
    return list(GymRows(f"reasoning-gym:{path}"))


def test_rows_follow_from_the_seed_and_the_settings() -> None:
    first = rows("gcd?seed=1&size=20&max_numbers=3")
    assert len(first) == 20
    assert first == rows("gcd?seed=1&size=20&max_numbers=3")
    assert first[7] == GymRows("reasoning-gym:gcd?seed=1&size=20&max_numbers=3")[7]
    assert first != rows("gcd?seed=2&size=20&max_numbers=3")
    assert {len(row[COLUMN]["entry"]["metadata"]["numbers"]) for row in first} == {2, 3}
    assert first[0][COLUMN]["settings"] == {"max_numbers": 3}
    assert rows("gcd") == rows("gcd?seed=0&size=500")


def test_they_are_examples_with_a_prompt_and_a_label() -> None:
    data = DataConfig(paths=["reasoning-gym:chain_sum?seed=3&size=4", "reasoning-gym:gcd?size=2"])
    check_examples(data)
    examples = open_examples(data)
    assert len(examples) == 6
    one = examples[0]
    assert one.where == "reasoning-gym:chain_sum?seed=3&size=4:1"
    assert one.prompt == one.extra[COLUMN]["entry"]["question"]
    assert one.label == one.extra[COLUMN]["entry"]["answer"]
    assert examples[5].extra[COLUMN]["task"] == "gcd"


@pytest.mark.parametrize("task", ["gcd", "chain_sum", "leg_counting", "simple_equations"])
def test_an_entry_is_scored_from_its_json(task: str) -> None:
    for row in rows(f"{task}?seed=5&size=5"):
        column = json.loads(json.dumps(row[COLUMN]))
        assert score(column, row["answer"]) == 1.0
        assert score(column, "zzz") == 0.0


def test_a_scorer_reads_the_settings_of_its_row() -> None:
    """Scorers are methods of a data set, which has settings."""
    row = rows("count_primes?seed=1&size=1&max_n=50")[0]
    assert score(row[COLUMN], row["answer"]) == 1.0
    with pytest.raises(TypeError, match="no_such_setting"):
        score({**row[COLUMN], "settings": {"no_such_setting": 1}}, row["answer"])


def test_a_task_whose_scorer_does_not_know_json_is_refused() -> None:
    with pytest.raises(DataError, match=r"'rearc' gives its own answer 1, and 0\.05 once .*JSON"):
        rows("rearc?size=1")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gdc", r"no task 'gdc'; did you mean 'gcd'\? \(it has 10\d: .*word_ladder"),
        ("gcd?sise=4", r"sise.*the task has the settings .*max_numbers.*size"),
        ("gcd?min_numbers=9&max_numbers=2", "AssertionError: .*max_numbers"),
        ("gcd?size=many", r"size: got 'many', expected a whole number"),
        ("gcd?size", r"expected reasoning-gym:NAME\?seed=1&size=500&KEY=VALUE"),
    ],
)
def test_a_wrong_path_says_what_is_right(path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_examples(DataConfig(paths=[f"reasoning-gym:{path}"]))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"gcd: install the extra: pip .*'rlcore\[reasoning-gym\]'"):
        check_examples(DataConfig(paths=["reasoning-gym:gcd"]))
