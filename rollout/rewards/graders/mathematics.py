"""The reward `math`: 1 where the answer in the response equals the label, else 0.

math-verify compares them. Only worker processes import this module: sympy may run for ever, and
then the pool's deadline ends it. math-verify's own time limits are signals, which fail off the main
thread, so they are switched off.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import parse, verify

from rlcore.data.sample import Sample
from rollout.rewards.graders.places import (
    accepted,
    after_thinking,
    find_answer,
    last_boxed,
    last_hash,
    plain_characters,
)

# these warn once that their time limits are off
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)
# "72 dollars" is 72; a word of one or two letters may be a product of variables
_NUMBER_AND_WORDS = re.compile(r"([-+]?\d[\d,]*(?:\.\d+)?)\s+(?!or\b|and\b)[A-Za-z]{3,}[A-Za-z /]*")
_LEAD = re.compile(r"(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s*", re.IGNORECASE)
_DOLLAR = re.compile(r"\\\$(?=\s*[\d.])")
_THIN_SPACE = re.compile(r"(?<=\d)\\[,!;: ](?=\d{3})")
_PLUS = re.compile(r"(?:(?<=is )|(?<=[=:] )|^)\+(?=\d)")
# "1 1/2", which math-verify reads as a product
_MIXED = re.compile(r"(?<![\d/.,^])(\d+) (\d+)/(\d+)(?![\d/])")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)\b")


def math(sample: Sample, answer: str = "last", strict: bool = False) -> dict[str, Any]:
    """Compare the answer with the label: plain ("3/4") or LaTeX, bare or in `$` or `\\boxed`.

    Args:
        answer: where the answer stands, see `rlcore.config.sections.graders.MathArgs`.
        strict: read nothing but that place.

    Raises:
        ValueError: the label is no mathematics; the sample then counts as a reward error.
    """
    golds = [parse_label(label) for label in accepted(sample.label)]
    text = plain_characters(after_thinking(sample.response_text))
    found = _last_of_all(text) if answer == "last" else find_answer(text, answer)
    if found is not None:
        given = parse_answer(found)
    else:
        given = [] if strict else parse(readable(text), parsing_timeout=None)
    right = any(
        verify(gold, given, timeout_seconds=None, allow_set_relation_comp=True) for gold in golds
    )
    # what maj@k counts: equal answers are mostly written alike once they were read
    voted = str(given[0]) if given else None
    return {"score": float(right), "correct": right, "info": {"answer": voted}}


def _last_of_all(text: str) -> str | None:
    """The last box, unless a final answer is said after it; None leaves it to math-verify.

    math-verify takes all boxes of a text for one set; here a correction counts.
    """
    said_later = "final answer is" in text[text.rfind("\\boxed") :].lower()
    return None if said_later else last_boxed(text)


def parse_label(label: str) -> list[Any]:
    """The label as mathematics; GSM8K's labels are a solution that ends in `#### 72`.

    A bare one is read as an answer is, and as it stands: what is written alike is right.
    """
    text = _DOLLAR.sub("", plain_characters(last_hash(label) or label))
    bare = "$" not in text and "\\boxed" not in text
    gold = parse_answer(text) if bare else []
    text = _MIXED.sub(r"(\1+\2/\3)", text)
    as_it_is = parse(f"\\boxed{{{text}}}" if bare else text, parsing_timeout=None)
    gold += [one for one in as_it_is if one not in gold]
    if not gold:
        raise ValueError(f"the label {label!r} cannot be parsed as mathematics")
    return gold


def parse_answer(answer: str) -> list[Any]:
    """What stood at the answer's place, as mathematics."""
    answer = _LEAD.sub("", answer.strip(" \n\t*_`").rstrip(" .,;"))
    answer = readable(answer).replace("°", "").strip()
    if answer.count("$") % 2:
        answer = answer.replace("$", "")
    with_words = _NUMBER_AND_WORDS.fullmatch(answer)
    if with_words:
        answer = with_words[1]
    found: list[Any] = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return found


def readable(text: str) -> str:
    """Numbers as math-verify reads them: no `\\$`, thin spaces, `+`, `1.5e3`, `1 1/2`."""
    text = _THIN_SPACE.sub("", _DOLLAR.sub("", text))
    text = _PLUS.sub("", _SCIENTIFIC.sub(r"\1*10^(\2)", text))
    return _MIXED.sub(r"(\1+\2/\3)", text)
