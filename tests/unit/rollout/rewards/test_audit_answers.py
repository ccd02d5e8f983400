"""The answers that `rlcore data` tries: where the row's parts look, and none where none can be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlcore.config.sections.reward import RewardConfig
from rlcore.data.examples import Example
from rollout.rewards.trial_answers import TrialAnswers


def row(label: Any, source: str = "math") -> Example:
    return Example("f:1", "?", label, {"source": source})


def tried(parts: dict[str, Any], *rows: Example, by: str | None = None) -> dict[str, str]:
    reward = RewardConfig.model_validate({"parts": parts, "by": by})
    prompts: Any = SimpleNamespace(examples=rows)
    return TrialAnswers(reward, prompts).of(rows[0])


def test_answers_stand_where_the_part_looks() -> None:
    for place, expected in (
        ("hash", {"#### 4": "the label behind ####"}),
        ("line", {"Answer: 4": "the label in a line"}),
        ("tagged", {"<answer>4</answer>": "the label in <answer>"}),
        ("boxed", {"\\boxed{4}": "the label in a box"}),
        ("last", {"\\boxed{4}": "the label in a box"}),
    ):
        part = {"function": "math", "args": {"answer": place, "strict": place != "last"}}
        got = tried({"right": part}, row("4"), row("5"))
        assert got == {"4": "the label itself", **expected, "5": "a wrong answer"}
    solution = "2+2=<<2+2=4>>4\n#### 4"
    got = tried({"own": {"function": "mine:score"}}, row(solution))
    assert [*got] == [solution, "\\boxed{4}", "I do not know."]


def test_a_wrong_answer_is_of_a_row_that_the_same_parts_score() -> None:
    parts = {
        "code": {"function": "code", "sources": ["taco"]},
        "math": {"function": "math", "sources": ["math"]},
        "short": {"function": "overlong", "args": {"buffer": 2}},
    }
    tests = '{"inputs": ["1"], "outputs": ["2"]}'
    rows = row("4"), row(tests, "taco"), row("7")
    assert [*tried(parts, *rows, by="source")] == ["4", "\\boxed{4}", "7"]


def test_tests_constraints_and_missing_labels_are_no_answers() -> None:
    for function, label in (
        ("code", '["assert f(1) == 2"]'),
        ("ifeval", '{"func_name": "validate_lowercase"}'),
        ("format", "4"),
        ("math", None),
        ("math", ["4", "5"]),
    ):
        args = {"pattern": "a"} if function == "format" else {}
        assert tried({"part": {"function": function, "args": args}}, row(label)) == {}
