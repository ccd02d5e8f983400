"""The text rewards `exact_match`, `f1`, `choice`, `format` and `overlong`."""

from __future__ import annotations

import re
import string
from collections import Counter
from functools import lru_cache
from typing import Any

from rlcore.data.sample import Sample
from rollout.rewards.base import LabelError, Verdict
from rollout.rewards.graders import places

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
    """1 if the answer is the label, or one of a list of labels, otherwise 0."""

    def bare(text: str) -> str:
        text = text.lower() if ignore_case else text
        text = text.translate(_NO_PUNCTUATION) if ignore_punctuation else text
        if ignore_articles:
            text = re.sub(_ARTICLES.pattern, " ", text, flags=re.IGNORECASE)
        return " ".join(text.split()) if ignore_space or ignore_articles else text.strip()

    found = answer_at(sample.response_text, answer)
    right = found is not None and bare(found) in map(bare, places.accepted(sample.label))
    if answer == "all":
        return Verdict(float(right), right)
    return Verdict(float(right), right, info={"answer": found and bare(found)})


def f1(sample: Sample, answer: str = "all") -> Verdict:
    """The F1 of the answer's and the label's words, the best of several labels.

    Words are counted as in SQuAD's evaluation: in lower case, without punctuation and a, an, the.
    If a side has no words, 1 if both have none (Rajpurkar et al., arXiv 1606.05250 and 1806.03822).
    """
    found = squad_words(answer_at(sample.response_text, answer) or "")
    golds = [squad_words(label) for label in places.accepted(sample.label)]
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
    """The answer at a place, after the thought; for `all`, everything there."""
    said = places.after_thinking(text)
    return said if place == "all" else places.find_answer(said, place)


# --- format and length ----------------------------------------------------------------------------


class Format:
    """1 if the whole response matches `pattern`, otherwise 0. `.` matches line ends too.

    Raises:
        ValueError: at construction; `pattern` is not a regular expression.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error

    def __call__(self, sample: Sample) -> float:
        """Score one sample."""
        return float(self._pattern.fullmatch(sample.response_text.strip()) is not None)


def overlong(sample: Sample, buffer: int, max_tokens: int) -> Verdict:
    """DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4), from 0 down to -1.

    With y the response's tokens, L the limit and c the buffer:

        0                    |y| <= L - c
        (L - c - |y|) / c    L - c < |y| <= L
        -1                   L < |y|

    Tokens are counted over all turns of the policy, including those in other samples of the
    rollout or in none. The part's `weight` is verl's `penalty_factor`.
    """
    made = sample.measured.get("generated_tokens", sample.num_trainable)
    over = made - (max_tokens - buffer)
    return Verdict(-min(max(over, 0) / buffer, 1.0))


# --- multiple choice ------------------------------------------------------------------------------


_AFTER_LETTER = (
    r"(?:because|since|as|and|is|for|due|given|with|which|but|so|if|or|by|from|in|based|rather"
    r"|instead|according|that|when|while|where|was|would|must|has)\b"
)
_IS = r"(?i:is|are|was|seems|looks|appears|must|would|should|has to|'s)"
_WRONG = r"(?i:not\b|n't|wrong|incorrect|false|out\b|impossible|eliminated|ruled|too\b|also)"
_RIGHT = (
    r"(?:be\s+)?(?:to be\s+)?(?:clearly |definitely |therefore |thus |indeed |obviously )?"
    r"(?:the\s+)?(?:only\s+)?(?:correct|right|true|best|answer"
    r"|most (?:likely|appropriate|accurate))\b"
)
_BEFORE_LETTER = (
    r"so|thus|hence|therefore|clearly|only|think that|think|believe that|believe|conclude that"
    r"|means that|means|that means|option|choice|answer|statement|see that|know that|but|while"
)
_CHOOSE = (
    r"(?:choose|chose|pick|picked|select|selected|go with|go for|went with|say|opt for|vote for"
    r"|answer|conclude|believe it is|think it is|think it's|believe it's|think|believe)"
)
_SO = (
    r"thus|hence|therefore|so|it's|it is|it must be|must be|that's|that leaves|leaves|leaving"
    r"|solution|result|choice|pick|selection|correct|→|=>|->|conclusion"
)


def choice(sample: Sample, choices: str = "ABCDEFGHIJ") -> dict[str, Any]:
    """1 if the response picks the label's letter, otherwise 0.

    Raises:
        ValueError: the label begins with none of the letters.
    """
    golds = letters_of(sample.label, choices)
    letter = picked(places.answered(sample), choices)
    right = letter in golds
    return {"score": float(right), "correct": right, "info": {"answer": letter}}


def letters_of(label: Any, choices: str) -> set[str]:
    """The letters that a label accepts. Raises ValueError if it begins with none."""
    letters = {one: _letter(one.strip(), choices) for one in places.accepted(label)}
    for one, letter in letters.items():
        if letter is None:
            raise LabelError(
                f"the label {one!r} is none of the choices {choices}, as B, (B) or B) and a text,"
            )
    return {letter for letter in letters.values() if letter is not None}


def picked(answer: str, choices: str) -> str | None:
    """The letter that an answer picks, or None.

    The search order: the last `\\boxed{}` or `<answer>`; the last statement about a letter ("the
    answer is B", "B is correct", "I choose B", "Thus (B)"); the last line that is a letter; the
    text after the last "option is"; the answer's start. Two letters ("A or B") pick none.
    """
    text = places.plain_characters(answer)
    for place in (places.last_boxed(text), places.find_answer(text, "tagged")):
        if place is not None:
            return _letter(_bare(place), choices, ignore_case=True)
    says, names = _patterns(choices)
    text = text.replace("’", "'")
    said = [
        (match.start(match.lastindex or 0), match[match.lastindex or 0])
        for pattern in says
        for match in pattern.finditer(text)
    ]
    if said:
        return max(said)[1].upper()
    lines = [_letter(_bare(line), choices) for line in text.splitlines() if line.strip()]
    if lines and lines[-1]:
        return lines[-1]
    named = [letters[-1] for pattern in names if (letters := pattern.findall(text))]
    return str(named[0]) if named else (lines[0] if lines else None)


@lru_cache(maxsize=16)
def _patterns(choices: str) -> tuple[tuple[re.Pattern[str], ...], tuple[re.Pattern[str], ...]]:
    """Patterns for statements about a letter, and for names of one; the letter is group 1."""
    marks = r"(?:[\s*_`\"'“‘($\[{<]|\\\(|\\text(?:bf)?\b|\\math(?:rm|bf)\b)*"
    closing = r"[\s*_`\"'”)$\]}>]*"
    # "answer: I believe" and "Answer: A man" name no letter, nor do "B is wrong" and "B isn't"
    one = (
        rf"{marks}([{choices}])(?!['-]?\w)(?!(?<=I) [a-z])(?!(?<=A) (?!{_AFTER_LETTER})[a-z])"
        rf"(?!{closing}\s*(?:{_IS})\s*(?:be\s+)?(?:{_WRONG}))(?!{closing}\s*(?:isn't|cannot|can't)\b)"
    )
    # "A or B" has two letters; "B, A is wrong" has one
    end = (
        rf"(?!{closing}(?:or|and|/|,|&)(?:\s*and|\s*or)?[\s*_`($\[]*[{choices}](?![A-Za-z'])"
        r"(?!\s+(?:is|are|was|would|does|cannot|isn't)\b))"
    )
    stop = rf"(?={closing}(?:[.!:\n]|[.)]? [A-Z]|\Z))"
    kind = r"(?:(?i:the )?(?i:option|choice|letter|answer)\s*)?"
    behind = r"(?i:is|:|=|-|>|→|是|选|为|\s|\*|must be|would be|should be|has to be)*"
    answer = r"(?i:answer|答案)(?i:\s+(?:choice|option|letter))?"
    return (
        (
            re.compile(rf"(?<!not the ){answer}{behind}{kind}{one}{end}"),
            # "B is correct", unless preceded by "if", "or" and the like
            re.compile(
                rf"(?:\A|\n|[.;:!?,]\s|\b(?i:{_BEFORE_LETTER})[ ,:]*){kind}"
                rf"{one}{end}{closing}\s*(?:{_IS})\s*(?i:{_RIGHT})(?!\s+(?:only|if|for|in)\b)"
            ),
            re.compile(
                rf"\b(?:I|[Ww]e)(?:'d|'ll|\s+would|\s+will|\s+have to|\s+must)?\s+(?:{_CHOOSE})\s+"
                rf"{kind}{one}{end}"
            ),
            re.compile(
                rf"(?:\A|\n|[.;:!?,]\s|\b)(?i:{_SO})[ ,:]*"
                rf"(?:(?i:it|that|this)(?:'s| is| must be)\s+)?{kind}{one}{end}{stop}"
            ),
            # lower case only in brackets
            re.compile(rf"{answer}{behind}{kind}\(([{choices.lower()}])\)"),
        ),
        (
            re.compile(rf"(?i:choice|option|one)\s*(?i:is|:|是|为){behind}{one}{end}"),
            re.compile(rf"(?i:choice|option)\s+{one}[\s*_`)$\].]*\Z"),
        ),
    )


def _bare(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf|boxed)\b|\\[()]|[*_`\"'“”‘’]", "", text)
    text = text.strip(" \t\n${}").lstrip(">#-• ")
    return re.sub(r"\A(?:the )?(?:option|choice|letter|answer) ", "", text, flags=re.IGNORECASE)


def _letter(text: str, choices: str, ignore_case: bool = False) -> str | None:
    """The letter in "B", "(B)", "B.", "B) Paris", "B: Paris", "B - Paris" or "B, because"."""
    found = re.fullmatch(
        rf"[(\[<]*([{choices}])[\])>]*(?:[.:!]?|[).:]\s*\S.*|\s+-\s+\S.*"
        r"|,?\s+(?:because|since|as|given)\b.*)",
        text,
        re.DOTALL | (re.IGNORECASE if ignore_case and len(text) <= 4 else 0),
    )
    return found[1].upper() if found else None
