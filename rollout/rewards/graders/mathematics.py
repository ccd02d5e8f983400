"""The reward `math`: 1 if the answer in the response equals the label, otherwise 0.

math-verify finds and compares answers; `forms` decides whether an answer is a value. Only worker
processes import this module: sympy may never return, and then the pool's deadline ends it.
math-verify's own time limits are signals, which fail off the main thread, so they are disabled.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from math import isclose, log10
from operator import itemgetter
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, verify
from math_verify.grader import get_pct_val
from math_verify.parser import extract_match, get_extraction_regexes
from sympy import Basic, Expr, FiniteSet, Integer, Interval, Pow, Tuple
from sympy.core.relational import Equality

from rlcore.data.sample import Sample
from rollout.rewards.base import LabelError
from rollout.rewards.graders import places
from rollout.rewards.graders.uncomputed import SYMBOL, UNREDUCED, pending, repeats

# these loggers warn once about the disabled time limits
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)
# "72 dollars" is 72; a word of one or two letters may be a product of variables
_NUMBER_AND_WORDS = re.compile(r"([-+]?\d[\d,]*(?:\.\d+)?)\s+(?!or\b|and\b)[A-Za-z]{3,}[A-Za-z /]*")
_LEAD = re.compile(r"(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s*", re.IGNORECASE)
_DOLLAR = re.compile(r"\\\$(?=\s*-?[\d.])")
_THIN_SPACE = re.compile(r"(?<=\d)\\[,!;: ](?=\d{3})")
_PLUS = re.compile(r"(?:(?<=is )|(?<=[=:] )|^)\+(?=\d)")
# "1 1/2", which math-verify reads as a product
_MIXED = re.compile(r"(?<![\d/.,^])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\d/])")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)\b")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|lt|gt|leq|geq)(?![a-z])")
_FRACTION = re.compile(r"/|\\frac|:")
_PATTERNS = sorted(
    (
        (priority, pattern, target)
        for patterns, target in get_extraction_regexes(
            [LatexExtractionConfig(), ExprExtractionConfig()]
        )
        for pattern, priority in patterns
    ),
    key=itemgetter(0),
)
_BY_PRIORITY = [
    [found[1:] for found in group] for _, group in groupby(_PATTERNS, key=itemgetter(0))
]
# math-verify compares six decimals; smaller numbers must agree in three digits
_SMALL = 1e-3
# limit for expressions that are expanded for a vote
_MAX_OPERATIONS = 40
# limit of parsed characters: for endless repetitions the parser takes minutes
_MAX_LENGTH = 1000
_MAX_NESTING = 50
_MAX_EXPONENT = 12


@dataclass(frozen=True)
class Reading:
    """A text as mathematics: the values that math-verify compares, and their text."""

    values: tuple[Any, ...]
    text: str


def math(
    sample: Sample, answer: str = "last", strict: bool = False, form: str = "evaluated"
) -> dict[str, Any]:
    """Compare the answer with the label: plain ("3/4") or LaTeX, bare or in `$` or `\\boxed`.

    Args:
        answer: place of the answer, see `rlcore.config.sections.graders.MathArgs`.
        strict: read only that place.
        form: `evaluated` rejects computations as numbers; `any` accepts them.

    Raises:
        ValueError: the label is not mathematics; the sample then counts as a reward error.
    """
    golds = [gold for label in places.accepted(sample.label) for gold in parse_label(label)]
    given = _given(places.plain_numbers(places.answered(sample)), answer, strict)
    if given is None:
        return {"score": 0.0, "correct": False, "info": {"answer": None}}
    fitting = [gold for gold in golds if form == "any" or _is_value(given, gold, sample)]
    gold = next((gold for gold in fitting if _equal(gold, given)), None)
    right = gold is not None
    # maj@k counts equal texts, so an answer that equals the label is written like the label
    voted = normal_form(given if gold is None else gold) if fitting else None
    return {"score": float(right), "correct": right, "info": {"answer": voted}}


def _given(text: str, place: str, strict: bool) -> Reading | None:
    """The answer of a response; without a place, the last box is read first."""
    if place == "last":
        # math-verify takes all boxes of a text as one set; here a later correction counts
        said_later = "final answer is" in text[text.rfind("\\boxed") :].lower()
        found = None if said_later else places.last_boxed(text)
    else:
        found = places.find_answer(text, place)
    if found is not None:
        return parse_answer(found)
    return None if strict else _read(readable(places.unmarked(text)))


@lru_cache(maxsize=256)
def parse_label(label: str) -> list[Reading]:
    """The label as mathematics; GSM8K's labels are solutions that end in `#### 72`.

    A bare label is read both like an answer and literally, so an identical spelling is right.
    """
    text = _DOLLAR.sub("", places.plain_numbers(places.last_hash(label) or label))
    bare = "$" not in text and "\\boxed" not in text
    as_answer = parse_answer(text) if bare else None
    text = _MIXED.sub(_improper, text)
    as_it_is = _read(f"\\boxed{{{text}}}" if bare else text)
    if as_it_is is None:
        raise LabelError(f"the label {label!r} cannot be parsed as mathematics")
    if as_answer is None or as_answer == as_it_is:
        return [as_it_is]
    # of "18 apples", only the number
    has_words = SYMBOL in _allowed(as_it_is.text) and SYMBOL not in _allowed(as_answer.text)
    return [as_answer] if has_words else [as_answer, as_it_is]


def parse_answer(answer: str) -> Reading | None:
    """The text at the answer's place, as mathematics."""
    answer = _LEAD.sub("", answer.strip(" \n\t*_`").rstrip(" .,;"))
    answer = readable(answer).replace("°", "").strip()
    if answer.count("$") % 2:
        answer = answer.replace("$", "")
    with_words = _NUMBER_AND_WORDS.fullmatch(answer)
    if with_words:
        answer = with_words[1]
    return _read(f"\\boxed{{{answer}}}")


def readable(text: str) -> str:
    """Rewrite numbers for math-verify: no `\\$`, thin spaces, `+`, `1.5e3`, `1 1/2`."""
    text = _THIN_SPACE.sub("", _DOLLAR.sub("", text))
    text = _PLUS.sub("", _SCIENTIFIC.sub(r"\1*10^(\2)", text))
    return _MIXED.sub(_improper, text)


def _improper(mixed: re.Match[str]) -> str:
    whole, above, below = map(int, mixed.groups())
    return f"\\frac{{{whole * below + above}}}{{{below}}}"


def _read(text: str) -> Reading | None:
    """The last answer in a text, in the order of math-verify's patterns, with its own text."""
    first = ""
    for patterns in _BY_PRIORITY:
        matches = [
            (match.end(), -match.start(), match, target)
            for pattern, target in patterns
            for match in pattern.finditer(text)
        ]
        for _, _, match, target in sorted(matches, key=itemgetter(0, 1), reverse=True):
            if len(match[0]) > _MAX_LENGTH or _nesting(match[0]) > _MAX_NESTING:
                continue
            try:
                value, written = extract_match(match, target)
            except ValueError:
                # more digits than Python can read
                continue
            first = first or written
            if value is not None:
                return Reading((value, first) if first else (value,), written)
    return Reading((first,), first) if first else None


def _nesting(text: str) -> int:
    depths = accumulate(("([{".find(sign) >= 0) - (")]}".find(sign) >= 0) for sign in text)
    return max(depths, default=0)


# --- verdict --------------------------------------------------------------------------------------


def _is_value(given: Reading, gold: Reading, sample: Sample) -> bool:
    """Whether an answer is fully computed and does not repeat the prompt."""
    allowed = _allowed(gold.text)
    if SYMBOL not in allowed:
        every_side = _RELATION.search(gold.text) is not None
        if not pending(given.text, every_side=every_side) <= allowed:
            return False
    return not repeats(sample.prompt_text, given.text, gold.text)


@lru_cache(maxsize=256)
def _allowed(label: str) -> frozenset[str]:
    found = pending(label, every_side=True)
    return found | {UNREDUCED} if _FRACTION.search(label) else found


def _equal(gold: Reading, given: Reading) -> bool:
    same = verify(
        list(gold.values), list(given.values), timeout_seconds=None, allow_set_relation_comp=True
    )
    if not same:
        return False
    one = _real(gold.values[0])
    other = _real(given.values[0])
    if one is None or other is None or min(abs(one), abs(other)) >= _SMALL:
        return True
    return isclose(one, other, rel_tol=_SMALL)


def _real(value: Any) -> float | None:
    if isinstance(value, FiniteSet) and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, Equality):
        value = value.rhs
    if not isinstance(value, Basic) or not value.is_number:
        return None
    value = value.evalf(15)
    return float(value) if value.is_Float or value.is_Rational else None


# --- votes ----------------------------------------------------------------------------------------


def normal_form(reading: Reading) -> str:
    """A common text for answers that the grader considers equal, if that is cheap to decide."""
    return _written(reading.values[0])


def _written(value: Any) -> str:
    if not isinstance(value, Basic):
        return str(value)
    if isinstance(value, Equality):
        return _written(value.rhs)
    if isinstance(value, FiniteSet | Tuple):
        parts = [_written(part) for part in value.args]
        if isinstance(value, Tuple):
            return f"({', '.join(parts)})"
        return parts[0] if len(parts) == 1 else f"{{{', '.join(sorted(parts))}}}"
    if isinstance(value, Interval):
        left = "(" if value.left_open else "["
        right = ")" if value.right_open else "]"
        return f"{left}{_written(value.start)}, {_written(value.end)}{right}"
    percent = get_pct_val(value)
    if percent is not None:
        return _written(percent)
    if isinstance(value, Integer):
        return str(value)
    if value.is_number:
        return _written_number(value)
    if not isinstance(value, Expr):
        return str(value)
    small = value.count_ops() <= _MAX_OPERATIONS and all(
        power.exp.is_number and abs(power.exp) <= _MAX_EXPONENT for power in value.atoms(Pow)
    )
    return str(value.expand() if small else value)


def _written_number(value: Basic) -> str:
    number = value.evalf(15)
    if not (number.is_Float or number.is_Rational) or abs(number) >= 10**15:
        return str(number)
    size = abs(float(number))
    decimals = 6 if size >= _SMALL or not size else 9 - int(log10(size))
    text = f"{float(number):.{decimals}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
