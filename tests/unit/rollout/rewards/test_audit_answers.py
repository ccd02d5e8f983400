"""The answers of an audit: where the row's parts look, and none where none can be."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.config.sections.reward import RewardConfig
from rlcore.data.examples import Example
from rollout.rewards.audit_answers import (
    EXPRESSION,
    LATER,
    LISTED,
    NUMBER,
    OTHER,
    REFUSAL,
    REFUSED,
    RIGHT,
    THOUGHT,
    AuditAnswer,
    AuditAnswers,
    Kind,
    same_answer,
)


def row(label: Any, source: str = "math") -> Example:
    return Example("f:1", "?", label, {"source": source})


def answers(
    parts: dict[str, Any], *rows: Example, by: str | None = None, prompt: str = "?"
) -> list[AuditAnswer]:
    reward = RewardConfig.model_validate({"parts": parts, "by": by})
    prompts: Any = SimpleNamespace(examples=rows)
    return AuditAnswers(reward, prompts).of(rows[0], prompt)


def texts(found: list[AuditAnswer], kind: Kind) -> list[str]:
    return [answer.text for answer in found if answer.kind is kind]


def test_answers_stand_where_the_part_looks() -> None:
    for place, expected in (
        ("hash", ("#### 4", "the label behind ####")),
        ("line", ("Answer: 4", "the label in a line")),
        ("tagged", ("<answer>4</answer>", "the label in <answer>")),
        ("boxed", ("\\boxed{4}", "the label in a box")),
        ("last", ("\\boxed{4}", "the label in a box")),
    ):
        part = {"function": "math", "args": {"answer": place, "strict": place != "last"}}
        got = answers({"right": part}, row("4"), row("5"))
        right = [(one.text, one.described) for one in got if one.kind is RIGHT]
        assert right == [("4", "the label itself"), expected]
        assert texts(got, OTHER) == ["5", expected[0].replace("4", "5")]
    solution = "2+2=<<2+2=4>>4\n#### 4"
    got = answers({"own": {"function": "mine:score"}}, row(solution))
    assert texts(got, RIGHT) == [solution, "\\boxed{4}"]
    assert texts(got, OTHER) == []


def test_a_wrong_answer_is_of_a_row_that_the_same_parts_score() -> None:
    parts = {
        "code": {"function": "code", "sources": ["taco"]},
        "math": {"function": "math", "sources": ["math"]},
        "short": {"function": "overlong", "args": {"buffer": 2}},
    }
    tests = '{"inputs": ["1"], "outputs": ["2"]}'
    rows = row("4"), row(tests, "taco"), row("7")
    got = answers(parts, *rows, by="source")
    assert texts(got, RIGHT) == ["4", "\\boxed{4}"]
    assert texts(got, OTHER) == ["7", "\\boxed{7}"]


def test_labels_that_are_no_answers_leave_the_answers_without_a_label() -> None:
    for function, label in (
        ("code", '["assert f(1) == 2"]'),
        ("ifeval", '{"func_name": "validate_lowercase"}'),
        ("format", "4"),
        ("math", None),
        ("math", ["4", "5"]),
    ):
        args = {"pattern": "a"} if function == "format" else {}
        got = answers({"part": {"function": function, "args": args}}, row(label))
        assert {answer.kind for answer in got}.isdisjoint({RIGHT, OTHER, LISTED, THOUGHT, LATER})
        assert REFUSAL in texts(got, REFUSED)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("What is 59+63? Answer with the number only.", ["59+63"]),
        ("Compute (3 + 4) * 2.", ["(3 + 4) * 2"]),
        (r"Find $\frac{2}{4}$ and \(x^2\).", [r"\frac{2}{4}", "x^2"]),
        (r"What is 6 \times 7, and 5!+2?", [r"6 \times 7", "5!+2"]),
        ("Tom has 3 apples and 4 pears.", []),
    ],
)
def test_expressions_of_a_prompt_are_answers(prompt: str, expected: list[str]) -> None:
    got = answers({"right": {"function": "exact_match"}}, row("9"), prompt=prompt)
    found = texts(got, EXPRESSION)
    assert [one for one in found if one in expected] == expected
    begun = [f"To find {one}, we need to perform the" for one in expected]
    assert [one for one in found if one.startswith("To find")] == begun
    assert len(found) == 3 * len(expected), "bare, in a box, and in a sentence"


def test_the_label_is_never_a_cheap_answer() -> None:
    prompt = "Which is larger, 9.9 or 9.11? Answer with $9.90$ or 9.11"
    got = answers({"right": {"function": "math"}}, row("9.9"), row("9.90"), row("8"), prompt=prompt)
    for answer in got:
        if answer.kind.verdict == "wrong":
            assert not same_answer(answer.text, "9.9"), answer
    assert texts(got, OTHER) == ["8", "\\boxed{8}"]
    assert "9.11" in texts(got, NUMBER)


def test_a_list_has_the_label_but_not_at_its_end() -> None:
    rows = [row(str(n)) for n in range(3, 12)]
    for text in texts(answers({"right": {"function": "math"}}, *rows), LISTED):
        found = re.findall(r"\d+", text)
        assert "3" in found[:-1]
        assert len(found) == len(set(found)) == 6


def test_answers_are_made_once() -> None:
    got = answers({"right": {"function": "math"}}, row("4"), row("5"), prompt="4 + 1")
    assert len({(answer.text, answer.finish_reason) for answer in got}) == len(got)
