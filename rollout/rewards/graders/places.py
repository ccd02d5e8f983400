"""Finds the answer in a response, and the texts that a label accepts."""

from __future__ import annotations

import math
import re
from typing import Any

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
_ASCII = {full: full - 0xFEE0 for full in range(0xFF01, 0xFF5F)} | {
    ord("："): ": ",
    ord("。"): ".",
    ord("−"): "-",
    ord("\u00a0"): " ",
    ord("\u202f"): " ",
}
_CHINESE = re.compile("[\u3000-\u9fff]+")


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; all of it where there is none."""
    return text.rpartition("</think>")[2]


def find_answer(text: str, place: str) -> str | None:
    """The last answer at `place` (boxed, hash, tagged or line), or None where there is none."""
    if place == "boxed":
        return last_boxed(text)
    if place == "hash":
        return last_hash(text)
    found = (_TAGGED if place == "tagged" else _LINE).findall(text)
    return found[-1].strip() or None if found else None


def last_boxed(text: str) -> str | None:
    """What is in the last `\\boxed{...}` whose braces are balanced; `\\fbox` counts as one.

    Boxes that only "and", "or" or a comma part are one answer: `\\boxed{1}, \\boxed{2}` is `1, 2`.
    """
    found: list[str] = []
    start = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        inner = _braced(text[box.end() - 1 :])
        if inner is None:
            continue
        end = box.end() + len(inner) + 1
        if end > start:  # a box around the one found
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
    """What follows the last `####` on its line, as GSM8K ends its answers."""
    _, mark, rest = text.rpartition("####")
    return rest.partition("\n")[0].strip() or None if mark else None


def plain_characters(text: str) -> str:
    """Full-width digits, letters and punctuation as ASCII ones, and Chinese words set apart."""
    return _CHINESE.sub(r" \g<0> ", text.translate(_ASCII)) if not text.isascii() else text


def accepted(label: Any) -> list[str]:
    """The texts that the label accepts: itself, or any of a list. Raises ValueError for others."""
    labels = list(label) if isinstance(label, list | tuple) else [label]
    if not labels or any(
        isinstance(one, bool)
        or not isinstance(one, str | int | float)
        or (isinstance(one, float) and not math.isfinite(one))
        for one in labels
    ):
        raise ValueError(
            "the label must be text or a number, or a list of these, got"
            f" {type(label).__name__} {str(label)[:80]!r}"
        )
    return [str(one) for one in labels]
