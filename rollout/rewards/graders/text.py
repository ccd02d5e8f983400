"""The rewards `exact_match`, `f1` and `choice`, which compare texts."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from rlcore.data.sample import Sample
from rollout.rewards.base import Verdict
from rollout.rewards.graders.places import (
    accepted,
    after_thinking,
    find_answer,
    last_boxed,
    plain_characters,
)

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(
    sample: Sample,
    answer: str = "all",
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    ignore_articles: bool = False,
    ignore_space: bool = False,
) -> Verdict:
    """1 where the answer is the label, or one of a list of labels, else 0."""

    def bare(text: str) -> str:
        text = text.lower() if ignore_case else text
        text = text.translate(_NO_PUNCTUATION) if ignore_punctuation else text
        if ignore_articles:
            text = re.sub(_ARTICLES.pattern, " ", text, flags=re.IGNORECASE)
        return " ".join(text.split()) if ignore_space or ignore_articles else text.strip()

    found = answer_at(sample.response_text, answer)
    right = found is not None and bare(found) in map(bare, accepted(sample.label))
    if answer == "all":
        return Verdict(float(right), right)
    return Verdict(float(right), right, info={"answer": found and bare(found)})


def f1(sample: Sample, answer: str = "all") -> Verdict:
    """The F1 of the answer's words and the label's, the best of several labels.

    As SQuAD's evaluation counts them: in lower case, without punctuation and a, an, the; with no
    words on a side, 1 where both have none (Rajpurkar et al., arXiv 1606.05250 and 1806.03822).
    """
    found = squad_words(answer_at(sample.response_text, answer) or "")
    golds = [squad_words(label) for label in accepted(sample.label)]
    return Verdict(max(_f1(found, gold) for gold in golds), found in golds)


def squad_words(text: str) -> list[str]:
    """The words of a text that SQuAD compares."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _f1(found: list[str], gold: list[str]) -> float:
    if not found or not gold:
        return float(found == gold)
    shared = (Counter(found) & Counter(gold)).total()
    return 2 * shared / (len(found) + len(gold))


def answer_at(text: str, place: str) -> str | None:
    """The answer at a place; for `all`, everything behind the thinking."""
    return after_thinking(text) if place == "all" else find_answer(text, place)


# --- multiple choice ------------------------------------------------------------------------------


def choice(sample: Sample, choices: str = "ABCDEFGHIJ") -> dict[str, Any]:
    """1 where the response picks the label's letter, else 0.

    Raises:
        ValueError: the label begins with none of the letters.
    """
    golds = letters_of(sample.label, choices)
    letter = picked(sample.response_text, choices)
    right = letter in golds
    return {"score": float(right), "correct": right, "info": {"answer": letter}}


def letters_of(label: Any, choices: str) -> set[str]:
    """The letters that a label accepts. Raises ValueError for a label that begins with none."""
    letters = {one: _letter(one.strip(), choices) for one in accepted(label)}
    for one, letter in letters.items():
        if letter is None:
            raise ValueError(
                f"the label {one!r} is none of the choices {choices}, as B, (B) or B) and a text,"
            )
    return {letter for letter in letters.values() if letter is not None}


def picked(response: str, choices: str) -> str | None:
    """The letter that a response picks, or None.

    It is looked for in the last `\\boxed{}` or `<answer>`, then behind the last "answer is" or
    "answer:", then as a line of its own, the last one, then behind the last "option is", and then
    at the response's start. Two letters ("A or B") pick none.
    """
    text = plain_characters(after_thinking(response))
    for place in (last_boxed(text), find_answer(text, "tagged")):
        if place is not None:
            return _letter(_bare(place), choices)
    # "answer: I believe" names none
    one = (
        rf"(?:[\s*_`($\[{{]|\\\(|\\text(?:bf)?\b|\\math(?:rm|bf)\b)*"
        rf"([{choices}])(?![A-Za-z'])(?!(?<=I) [a-z])"
    )
    # "A or B" has two; "B, A is wrong" has one
    end = (
        rf"(?![\s*_`)$\]]*(?:or|and|/|,|&)[\s*_`($\[]*[{choices}](?![A-Za-z'])"
        r"(?!\s+(?:is|are|was|would|does|cannot)\b))"
    )
    behind = r"(?i:is|:|是|选|为|\s|\*)*"
    said = re.findall(rf"(?i:answer(?:\s+(?:choice|option|letter))?|答案){behind}{one}{end}", text)
    if said:
        return str(said[-1])
    lines = [_letter(_bare(line), choices) for line in text.splitlines() if line.strip()]
    if lines and lines[-1]:
        return lines[-1]
    named = re.findall(rf"(?i:choice|option)\s*(?i:is|:|是|为){behind}{one}{end}", text)
    named = named or re.findall(rf"(?i:choice|option)\s+{one}[\s*_`)$\].]*\Z", text)
    return str(named[-1]) if named else (lines[0] if lines else None)


def _bare(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf|boxed)\b", "", text)
    return text.strip(" \t\n*_`${}")


def _letter(text: str, choices: str) -> str | None:
    """The letter in "B", "(B)", "B.", "B) Paris" or "B: Paris"."""
    found = re.fullmatch(rf"\(?\[?([{choices}])\]?(?:\)?[.:]?|[).:]\s*\S.*)", text, re.DOTALL)
    return found[1] if found else None
