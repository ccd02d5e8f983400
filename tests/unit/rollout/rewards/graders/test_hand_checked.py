"""`math` and `choice` on answers that were checked by hand, beside Math-Verify alone."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

import pytest
from hand_checked import LAST, ROWS
from hand_checked_choices import PICKS
from hand_checked_numbers import COMPUTED, COMPUTED_ROWS, FORMS, NUMBERS, PLACES, SIGNS, UNREAD, Row
from math_verify import StringExtractionConfig, parse, verify

from rollout.rewards.graders.mathematics import math
from rollout.rewards.graders.text import choice


def graded(sample, row: Row, **arguments: object) -> bool:
    response, label, place, _ = row
    strict = place.endswith("!")
    verdict = math(sample(response, label), answer=place.rstrip("!"), strict=strict, **arguments)
    return verdict["correct"]


@pytest.mark.parametrize(
    "rows",
    [ROWS, NUMBERS, COMPUTED_ROWS[::9], pytest.param(COMPUTED_ROWS, marks=pytest.mark.rest)],
    ids=["plain", "numbers", "some computations", "computations"],
)
def test_math_agrees_with_the_answers_that_were_checked_by_hand(sample, rows):
    assert len(rows) >= 100
    assert [row for row, times in Counter(rows).items() if times > 1] == []
    assert [row for row in rows if graded(sample, row) is not row[3]] == []


def test_computations_count_with_any_form(sample):
    boxed = [(rf"\boxed{{{text}}}", label, "boxed!", True) for text, label in COMPUTED[:6]]
    assert [row for row in boxed if not graded(sample, row, form="any")] == []
    assert [row for row in boxed if graded(sample, row, form="evaluated")] == []


def test_no_two_numbers_and_an_operation_are_their_result(sample):
    drawn = random.Random(0)
    for _ in range(25):
        one, other = drawn.randint(2, 99), drawn.randint(2, 99)
        operation, value = drawn.choice(
            [
                ("{}+{}", one + other),
                ("{}-{}", one - other),
                (r"{}\cdot {}", one * other),
                ("{}*{}", one * other),
                (r"\frac{{{}}}{{{}}}-1", Fraction(one, other) - 1),
                ("({})({})", one * other),
                ("-({}+{})", -one - other),
            ]
        )
        text = operation.format(one, other)
        for place, forms in PLACES.items():
            for form in forms:
                way = form.format(f"${text}$" if place == "last" else text)
                assert not graded(sample, (way, str(value), place, False)), (way, value)
                assert graded(sample, (form.format(value), str(value), place, True)), (form, value)


def test_choice_agrees_with_the_answers_that_were_checked_by_hand(sample):
    assert len(PICKS) >= 200
    assert [text for text, times in Counter(text for text, _ in PICKS).items() if times > 1] == []
    wrong = [
        (text, letter, got)
        for text, letter in PICKS
        if (got := choice(sample(text, "B"), choices="ABCD")["info"]["answer"]) != letter
    ]
    assert wrong == []


# --- beside Math-Verify alone ---------------------------------------------------------------------

# docs/rewards.md has these: answers, then false positives and negatives of rlcore and Math-Verify
TABLE = {
    "plain answers": (143, 0, 0, 7, 12),
    "forms": (54, 0, 0, 5, 11),
    "signs": (149, 0, 0, 29, 73),
    "marks": (120, 0, 0, 0, 29),
    "computations": (1260, 0, 0, 915, 0),
    "letters": (430, 0, 0, 44, 61),
}


@pytest.mark.rest
def test_the_table_of_the_docs(sample, capsys):
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    table = {}
    for name, rows in {
        "plain answers": LAST,
        "forms": FORMS,
        "signs": SIGNS,
        "marks": UNREAD,
        "computations": COMPUTED_ROWS,
    }.items():
        ours = false_ones((graded(sample, row), row[3]) for row in rows)
        theirs = false_ones((by_math_verify(row[0], row[1]), row[3]) for row in rows)
        table[name] = (len(rows), *ours, *theirs)
    answers = [(text, letter, label) for text, letter in PICKS for label in "AB"]
    ours = false_ones(
        (choice(sample(text, label), choices="ABCD")["correct"], letter == label)
        for text, letter, label in answers
    )
    theirs = false_ones(
        (letter_by_math_verify(text, label), letter == label) for text, letter, label in answers
    )
    table["letters"] = (len(answers), *ours, *theirs)
    with capsys.disabled():
        print("\n", table)
    assert table == TABLE


def false_ones(judged: Iterable[tuple[bool, bool]]) -> tuple[int, int]:
    counts = Counter(judged)
    return counts[True, False], counts[False, True]


def by_math_verify(response: str, label: str) -> bool:
    text = label.rpartition("####")[2].strip()
    bare = "$" not in text and "\\boxed" not in text
    gold = parse(f"\\boxed{{{text}}}" if bare else text, parsing_timeout=None)
    return verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None)


def letter_by_math_verify(response: str, label: str) -> bool:
    letters = [StringExtractionConfig(strings=tuple("ABCD"))]
    return verify(
        [label.lower()], parse(response, letters, parsing_timeout=None), timeout_seconds=None
    )
