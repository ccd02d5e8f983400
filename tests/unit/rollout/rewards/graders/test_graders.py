"""The built-in graders: where the answer stands, and what is right."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from rlcore.config.sections.graders import GRADERS
from rollout.rewards.graders import mathematics
from rollout.rewards.graders.mathematics import math
from rollout.rewards.graders.places import find_answer, last_boxed
from rollout.rewards.graders.text import Format, choice, exact_match, f1, overlong, picked
from rollout.rewards.scorer import LOCAL, POOLED, grader_arguments


def test_a_label_that_is_no_mathematics_is_an_error_and_a_list_takes_any(sample):
    with pytest.raises(ValueError, match=r"the label '' cannot be parsed as mathematics"):
        math(sample("4", ""))
    with pytest.raises(ValueError, match=r"the label must be text or a number.*got dict"):
        math(sample("4", {"ground_truth": "4"}))
    assert math(sample("The answer is 7", ["5", 7]))["correct"]
    assert math(sample("It is 7", "so the answer is $7$"))["correct"], "a label may be a sentence"
    told = [math(sample(text, "1"))["info"]["answer"] for text in ("so 7.", r"\boxed{7}", "none")]
    assert told == ["7", "7", None]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{a{b}c}", "a{b}c"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("\\boxed{\\boxed{3}}", "\\boxed{3}"),
        ("\\boxed{1}, \\boxed{2}", "1, 2"),
        ("\\boxed{1} no, \\boxed{2}", "2"),
        ("\\boxed{}", None),
        ("boxed{4}", None),
        ("\\boxed{" * 2000, None),
    ],
)
def test_the_last_whole_box(text, found):
    assert last_boxed(text) == found


def test_places():
    assert find_answer("#### 7 #### 8 \n9", "hash") == "8"
    assert find_answer("<answer>a\nb</answer>", "tagged") == "a\nb"
    assert find_answer("Answer: 3\nbecause", "line") == "3"
    assert find_answer("no answer here", "line") is None


@pytest.mark.parametrize(
    ("prompt", "answer", "label", "right"),
    [
        ("Expand (x+1)(x-1).", "(x+1)(x-1)", "x^2-1", False),
        ("Expand $(x+1)(x-1)$.", "(x-1)(x+1)", "x^2-1", False),
        ("Expand $(x+1)(x-1)$.", r"1\cdot(x+1)\left(x-1\right)+0", "x^2-1", False),
        ("Expand $(x+1)(x-1)$.", "x^2-1", "x^2-1", True),
        ("What is $x^2-1$ if $x$ is kept?", "x^2-1", "x^2-1", True),
        ("Factor $x^2-1$.", "(x+1)(x-1)", "(x-1)(x+1)", True),
        ("Factor $x^2-1$.", "x^2-1", "(x-1)(x+1)", False),
        ("Write 3/8 as a decimal.", "3/8", "0.375", False),
        ("Write 3/8 as a decimal.", "0.375", "0.375", True),
        (r"Reduce $\frac{6}{8}$.", "6/8", "3/4", False),
        (r"Simplify $\sqrt{72}$.", r"\sqrt{72}", r"6\sqrt{2}", False),
        ("Which is larger, 1/2 or 1/3?", "1/2", r"\frac{1}{2}", True),
        ("Let x = 12. What is 2x-12?", "x=12", "12", True),
        ("What is the number after 121?", "122", "122", True),
    ],
)
def test_what_the_prompt_says_is_no_answer(sample, prompt, answer, label, right):
    given = replace(sample(rf"\boxed{{{answer}}}", label), prompt_text=prompt)
    assert math(given)["correct"] is right
    assert math(given, form="any")["correct"], "it is equal"


@pytest.mark.parametrize(
    "equal",
    [
        ["10", "10.0", "10.", "{10}", "x=10", "10 apples", "020/2", "\\{10\\}"][:6],
        ["1/3", "\\frac{2}{6}", "0.333333", "\\frac13"],
        ["1,234", "1234", "1234.00", "1{,}234", "1.234e3"],
        ["-1/2", "-0.5", "−½", "-\\frac{1}{2}"],
        ["\\sqrt{8}", "2\\sqrt2"],
        ["(1,2)", "(1.0, 2)"],
        ["\\{1,2\\}", "2,1", "1 and 2"],
        ["[0,1)", "[0.0,1)"],
        ["2x+2", "2(x+1)", "2+2x"],
        ["x^2-1", "(x+1)(x-1)"],
        ["20\\%", "20"],
        ["0.0000003", "3\\times10^{-7}"],
        ["7"],
        ["\\text{yes}"],
    ],
)
def test_equal_answers_have_one_vote_and_others_another(sample, equal):
    """Whether they are right or wrong; a computation abstains."""
    for label in ("77", equal[0]):
        told = {
            math(sample(rf"\boxed{{{text}}}", label), form="any")["info"]["answer"]
            for text in equal
        }
        assert len(told) == 1, (label, told)
        assert told != {math(sample(r"\boxed{8}", "77"))["info"]["answer"]}
    assert math(sample(r"\boxed{59+63}", "122"))["info"]["answer"] is None


def test_a_number_that_python_cannot_read_is_wrong(sample):
    assert not math(sample("The answer is " + "9" * 5000, "3"))["correct"]
    assert not math(sample(r"\boxed{" + "9" * 5000 + "}", "3"))["correct"]
    assert not math(sample(r"\boxed{" + "(" * 5000 + "3" + ")" * 5000 + "}", "3"))["correct"]
    assert not math(sample(r"\boxed{\mathbb{}", "3"))["correct"]


REPEATED = ["(", "{", "[1]", "|", "-", "x=", "1,", "\\int", "\\frac{", "9.", "log", "\\boxed{"]


@pytest.mark.parametrize("piece", REPEATED)
@pytest.mark.parametrize("around", ["{}", "${}$", "\\boxed{{{}}}", "the answer is {}"])
def test_what_a_policy_repeats_is_not_parsed_for_minutes(sample, monkeypatch, piece, around):
    parsed = []
    extract = mathematics.extract_match

    def spy(match, target):
        parsed.append(match[0])
        return extract(match, target)

    monkeypatch.setattr(mathematics, "extract_match", spy)
    math(sample(around.format(piece * (1500 // len(piece))), "3"))
    assert all(len(text) <= 1000 for text in parsed)
    deep = around.format("(" * 60 + piece + ")" * 60)
    parsed.clear()
    math(sample(deep, "3"))
    assert not any("(" * 51 in text for text in parsed)


def test_a_thought_that_the_prompt_opens_has_no_answer(sample):
    opened = replace(sample("It is 3", "3"), prompt_text="user: 1+2? assistant: <think>\n")
    assert not math(opened)["correct"]
    assert not choice(replace(opened, response_text="B", label="B"))["correct"]
    assert math(replace(opened, response_text="It is 4</think>It is 3"))["correct"]


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "label", "args", "right"),
    [
        (" Paris \n", "Paris", {}, True),
        ("paris", "Paris", {}, False),
        ("paris", "Paris", {"ignore_case": True}, True),
        ("Paris.", "Paris", {"ignore_punctuation": True}, True),
        ("The  Eiffel Tower", "Eiffel Tower", {"ignore_articles": True}, True),
        ("the eiffel tower", "Eiffel Tower", {"ignore_articles": True}, False),
        ("New\n York", "New York", {"ignore_space": True}, True),
        ("New\n York", "New York", {}, False),
        ("Rome", ["Paris", "Rome"], {}, True),
        ("<think>Rome?</think> Paris", "Paris", {}, True),
        ("<answer>Paris</answer>", "Paris", {"answer": "tagged"}, True),
        ("Paris", "Paris", {"answer": "tagged"}, False),
        ("2", 2, {}, True),
    ],
)
def test_exact_match(sample, response, label, args, right):
    got = exact_match(sample(response, label), **args)
    assert (got.score, got.correct) == (float(right), right)


@pytest.mark.parametrize(
    ("response", "label", "score", "right"),
    [
        ("the Eiffel Tower!", "Eiffel tower", 1.0, True),
        ("Eiffel Tower in Paris", "Eiffel Tower", 2 * (2 / 4) * 1 / (2 / 4 + 1), False),
        ("a cat sat", "cat cat", 2 * (1 / 2) * (1 / 2) / (1 / 2 + 1 / 2), False),
        ("Rome", "Paris", 0.0, False),
        ("Rome", ["Paris", "Rome, Italy"], 2 * 1 * (1 / 2) / (3 / 2), False),
        ("", "Paris", 0.0, False),
        ("the", "a", 1.0, True),
    ],
)
def test_f1_is_precision_and_recall_of_words(sample, response, label, score, right):
    verdict = f1(sample(response, label))
    assert verdict.score == pytest.approx(score)
    assert verdict.correct is right


# further ones are in `hand_checked_choices`
PICKED = {
    "A": ["The answer is A because it is not in France"],
    "B": [
        *("The answer is B.", "**Answer:** B", r"Answer: \(B\)", r"Answer: \text{B}", "答案：Ｂ"),
        *("B. Paris is the capital.\nIt has been since 987.", "A and C are wrong.\n\nB"),
        *(
            r"The correct option is $\boxed{B}$",
            r"\boxed{\text{(B)}}",
            "The answer is B, A is wrong.",
        ),
        *("<answer> (B) Paris </answer>", "The answer is (B), since A is a city in Italy."),
        "First I thought the answer is A. No, the answer is B.",
        "<think>The answer is A.</think>The answer is B.",
        "The answer is (B). Option A is too small, and option C is wrong.",
        "The correct answer is B. Option D is incorrect.",
        "Option A: no.\nOption B: yes.\nOption C: no.\nB",
        "The answer choice is B because choice C is wrong",
        "The correct option is B, and option A is not",
    ],
    "C": ["I choose option C."],
    None: [
        *("The answer is A or B", "The answer is A, B or C"),
        *("The answer is Paris", "The answer is K"),
    ],
}


@pytest.mark.parametrize(
    ("response", "letter"),
    [(response, letter) for letter, given in PICKED.items() for response in given],
)
def test_the_choice_that_a_response_picks(response, letter):
    assert picked(response, "ABCD") == letter


def test_a_pronoun_is_no_choice():
    assert picked("My answer: I believe it is (B)", "ABCDEFGHIJ") == "B"
    assert picked("My answer: I believe so", "ABCDEFGHIJ") is None
    assert picked("Answer: I", "ABCDEFGHIJ") == "I"


@pytest.mark.parametrize(
    "label",
    [
        *("5 dollars", "2 people", "5.", "5°", "1\\,000", "1.5e3", "1e6", "\\$18.90"),
        "\\$32,\\!348",
        *("\\$36", "４２", "1e-05", "1/2", "1 1/2", "x=5", "(1,2)", "\\frac{3}{4}", "18 apples"),
    ],
)
def test_what_is_written_as_the_label_is_right(sample, label):
    assert math(sample(f"so \\boxed{{{label}}}", label), answer="boxed", strict=True)["correct"]
    assert not math(sample("so \\boxed{77}", label), answer="boxed", strict=True)["correct"]


def test_choice_compares_with_the_labels_letter(sample):
    assert choice(sample("The answer is B", "B"))["correct"]
    assert choice(sample("The answer is B", "B"))["info"] == {"answer": "B"}
    assert choice(sample("The answer is B", "(B)"))["correct"]
    assert not choice(sample("The answer is B", "A"))["correct"]
    with pytest.raises(ValueError, match="the label 'Paris' is none of the choices"):
        choice(sample("The answer is B", "Paris"))


# --- shape ----------------------------------------------------------------------------------------


def test_format_matches_the_whole_response(sample):
    grade = Format(r"<think>.+</think>\s*<answer>[^<]+</answer>")
    assert grade(sample("<think>a\nb</think>\n<answer>4</answer>\n")) == 1.0
    assert grade(sample("so <think>a</think><answer>4</answer>")) == 0.0
    with pytest.raises(ValueError, match=r"pattern '\(' is no regular expression"):
        Format("(")


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (130, -1.0)],
)
def test_overlong_falls_linearly_over_the_buffer(tokens, penalty):
    class Made:
        num_trainable = tokens
        measured: ClassVar = {}

    assert overlong(Made(), buffer=20, max_tokens=100).score == pytest.approx(penalty)
    # of a conversation in several samples
    Made.num_trainable = 3
    Made.measured = {"generated_tokens": float(tokens)}
    assert overlong(Made(), buffer=20, max_tokens=100).score == pytest.approx(penalty)


def test_overlong_takes_the_limit_of_the_run():
    assert grader_arguments("overlong", {"buffer": 20}, 100) == {"buffer": 20, "max_tokens": 100}


def test_every_declared_grader_can_be_built():
    assert set(GRADERS) >= {*LOCAL, *POOLED}
