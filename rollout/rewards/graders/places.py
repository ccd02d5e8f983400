"""Finds the answer in a response, and reads labels: accepted texts, or literals."""

from __future__ import annotations

import ast
import json
import math
import re
from typing import Any
from unicodedata import normalize

import numpy as np

from rlcore.data.sample import Sample
from rollout.rewards.base import LabelError

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_JOINED = re.compile(
    r"(?:[\s$,;&()]|\\[()\[\],;]|\\q?quad|\\text\{\s*(?:and|or)\s*\}|\band\b|\bor\b)*"
)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
# "Answer: 4", "**Answer:** 4", "Final answer: 4", "The answer: 4", as the last line for DAPO
_LINE = re.compile(
    r"^[\s*_#>-]*(?:the\s+)?(?:final\s+)?(?:answer|答案)[*_]*\s*[:：][*_]*[ \t]*(\S.*)$",
    re.IGNORECASE | re.MULTILINE,
)
_DASHES = "‐‑‒–—―−⁃⁻˗﹘﹣－➖"
_ASCII = (
    {full: full - 0xFEE0 for full in range(0xFF01, 0xFF5F)}
    | {ord(dash): "-" for dash in _DASHES}
    | {ord(sign): "+" for sign in "➕﹢⁺∔⊕"}
    | {ord(sign): "*" for sign in "×✕✖⨯⨉⊗·⋅∙∗"}
    | {ord(sign): "/" for sign in "÷➗∕⁄"}
    | {ord(space): " " for space in "\u00a0\u202f\u2007\u2009"}
    | {ord(unseen): "" for unseen in "\u200b\u2060\ufeff\u00ad"}
    | {ord("："): ": ", ord("。"): "."}
    | {
        ord(one): f" {normalize('NFKC', one)}".replace("\u2044", "/")
        for one in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
    }
)
_SUPERSCRIPT = re.compile(r"(?<=[\d)])[⁰¹²³⁴-⁹⁻]+")
_ROOT = re.compile(r"√\s*\(?(\d+)\)?")
# marks that may precede a number: boxes, dollars, emphasis, currencies
_OPENING = r"(?:\$+|\\[\[(]|[€£¥]|[*_`]+|\\\$|\\(?:boxed|fbox)\s*\{)"
_NUMBER = rf"(?=(?:{_OPENING}|\()*[\d.\\])"
_VERBS = r"(?:is|are|was|be|to|get|gets|gives|equals?|becomes)"
_OPERATOR = r"(?<!\w)(?:plus|minus|times|multiplied by|divided by|over|percent of)|\\?% of"
_OPERATORS = {"plus": "+", "minus": "-", "divided by": "/", "over": "/"}
_SIGNS: list[tuple[re.Pattern[str], Any]] = [
    # "59 plus 63" is an expression
    (
        re.compile(rf"(?<=[\d)$%])\s*({_OPERATOR})\s+(?=[\d(.$\\-])", re.IGNORECASE),
        lambda found: f" {_OPERATORS.get(found[1].lower(), '*')} ",
    ),
    (re.compile(r"\\text\s*\{\s*(minus|negative)\s*\}", re.IGNORECASE), r"\1 "),
    (re.compile(rf"(?<![\w)\-])(?:minus|negative)[ \t]+{_NUMBER}", re.IGNORECASE), "-"),
    # a dash without spaces between a word and a number
    (re.compile(r"(?<=[a-z]{2})-(?=[\d.,]+(?:\s|$))"), " "),
    # list markers
    (re.compile(r"(?<=\n)(?<!<answer>\n)(?<!\$\n)(?<!\\\[\n)[ \t]*[-+*•][ \t]+(?=\S)"), ""),
    (re.compile(r"\A\s*[-+*•][ \t]+(?=[^\n]+\n)"), ""),
    # "is - 3", "= - 3", "(- 3", "**- 3"; not "is - 3 -"
    (
        re.compile(
            rf"((?:\A|\b{_VERBS}[ \t]|[=:<>≤≥≈(\[{{,$*_`][ \t]*)|<answer>\s*|\n)"
            rf"-[ \t]+{_NUMBER}(?!\S+[ \t]+-[ \t])"
        ),
        r"\1-",
    ),
    # move the sign inside dollars, boxes and emphasis, and after a currency; not in "5 -$3$"
    (
        re.compile(
            rf"(?<![\w)}}\]\-])(?<![\d)}}\]$][ \t])(?<!\b[A-Za-z][ \t])-({_OPENING}+)"
            r"(?=[\d.\\][^-+={}$]*(?:\{[^{}]*\}[^-+={}$]*)*(?:[}$*_`.,\s]|\\[\])]|$))"
        ),
        r"\1-",
    ),
    (re.compile(r"(?<![\d.\w}])\.(?=\d)"), "0."),
    (re.compile(r"(?<=[\d}])\s*\\(?:times|cdot)\s*(?=10\b)"), "*"),
]
_SINGLE = r"-?[$€£]?\d[\d.,/]*%?"
_SAID = rf"((?:\A|\n|\b{_VERBS}|[=:])\s*)"
_MARKS: list[tuple[re.Pattern[str], str]] = [
    (
        re.compile(
            r"(?<![\w)\\*`])(\*{1,3}|_{1,3}|`{1,3}|~{2,3})(?=[^\s*_`~])([^*`\n]*?)(?<=[^\s*])\1(?![\w*])"
        ),
        r" \2 ",
    ),
    (re.compile(rf"[\"'“”‘’「」『』«»]({_SINGLE})\.?[\"'“”‘’「」『』«»]"), r" \1 "),
    (re.compile(rf"{_SAID}[(\[]\s*({_SINGLE})\s*[)\]](?=\s*(?:[.!\n]|\Z))"), r"\1 \2"),
    # "is (1, 2)", "is 3:4" and "is 2√3", which math-verify reads between dollars alone
    (
        re.compile(
            rf"{_SAID}([(\[]\s*{_SINGLE}(?:\s*,\s*{_SINGLE})+\s*[)\]]|{_SINGLE}\s*:\s*{_SINGLE})"
            r"(?=\s*(?:[.!\n]|\Z))"
        ),
        r"\1$\2$",
    ),
    (
        re.compile(
            rf"{_SAID}(-?[\d.]*(?:\\pi\b|\\sqrt(?:\d+|\{{\d+\}}))(?:/\d+)?)(?=\s*(?:[.!\n]|\Z))"
        ),
        r"\1$\2$",
    ),
    # "is 5/14.", where the full stop would make a decimal number
    (re.compile(r"(/\d+)\.(?=\s|\Z)"), r"\1,"),
    (re.compile(r"(?<=[A-Za-z*]):(?=-?[\d$])|(?:->|→|⇒|≈|~)(?=\s*-?[\d$])"), ": "),
]
_CHINESE = re.compile("[\u3000-\u9fff]+")


def after_thinking(text: str) -> str:
    """The text after the last `</think>`, or the whole text without one."""
    return text.rpartition("</think>")[2]


def answered(sample: Sample) -> str:
    """The response after its thought; an unclosed thought has no answer after it."""
    text = after_thinking(sample.response_text)
    opened = text.find("<think>")
    if opened >= 0:
        return text[:opened]
    thinks = sample.prompt_text.rstrip().endswith("<think>")
    return "" if thinks and "</think>" not in sample.response_text else text


def find_answer(text: str, place: str) -> str | None:
    """The last answer at `place` (boxed, hash, tagged or line); None if there is none."""
    if place == "boxed":
        return last_boxed(text)
    if place == "hash":
        return last_hash(text)
    found = (_TAGGED if place == "tagged" else _LINE).findall(text)
    return found[-1].strip() or None if found else None


def last_boxed(text: str) -> str | None:
    """The content of the last balanced `\\boxed{...}` or `\\fbox{...}`.

    Boxes separated only by "and", "or" or a comma are one answer: `\\boxed{1}, \\boxed{2}` is
    `1, 2`.
    """
    found: list[str] = []
    start = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        inner = _braced(text[box.end() - 1 :])
        if inner is None:
            continue
        end = box.end() + len(inner) + 1
        # an enclosing box
        if end > start:
            found = [inner.strip()]
        elif not found or _JOINED.fullmatch(text[end:start]):
            found.insert(0, inner.strip())
        else:
            break
        start = box.start()
    return ", ".join(filter(None, found)) or None


def _braced(text: str) -> str | None:
    depth = 0
    escaped = False
    for at, character in enumerate(text):
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[1:at]
    return None


def last_hash(text: str) -> str | None:
    """The text after the last `####` on its line, where GSM8K puts its answers."""
    _, mark, rest = text.rpartition("####")
    return rest.partition("\n")[0].strip() or None if mark else None


def plain_characters(text: str) -> str:
    """Full-width digits, letters and punctuation as ASCII, with spaces around Chinese words."""
    return _CHINESE.sub(r" \g<0> ", text.translate(_ASCII)) if not text.isascii() else text


def plain_numbers(text: str) -> str:
    """The text with plain characters, signs attached to numbers, and operators as characters."""
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda digits: f"^({normalize('NFKC', digits[0])})", text)
        text = _ROOT.sub(r"\\sqrt{\1}", text).replace("π", r"\pi ")
        text = plain_characters(text)
    for pattern, replacement in _SIGNS:
        text = pattern.sub(replacement, text)
    return text


def unmarked(text: str) -> str:
    """The text without Markdown marks, and without quotes and brackets around single numbers."""
    for pattern, replacement in _MARKS:
        text = pattern.sub(replacement, text)
    return text


def accepted(label: Any) -> list[str]:
    """The texts that a label accepts: itself, or those of a list. Raises ValueError otherwise."""
    labels = list(label) if isinstance(label, list | tuple) else [label]
    if not labels or any(
        isinstance(one, bool)
        or not isinstance(one, str | int | float)
        or (isinstance(one, float) and not math.isfinite(one))
        for one in labels
    ):
        raise LabelError(
            "the label must be text or a number, or a list of these, got"
            f" {type(label).__name__} {str(label)[:80]!r}"
        )
    return [str(one) for one in labels]


def literal_of(value: Any) -> Any:
    """Parse a text as JSON or Python (`{'N': None}`); return other values unchanged.

    Arrays and tuples become lists, since columns of data sets use either.
    """
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(value.strip())
    # errors for texts that are not literals, or are nested too deep
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value
