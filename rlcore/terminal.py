"""Text for a terminal: what a model or another process wrote must not steer it."""

from __future__ import annotations

import re

# Control characters but tab and line end, marks of direction, and halves of characters, which no
# stream can encode.
_STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Return `text` with what could steer a terminal spelled out: `\x1b` for an escape."""
    return _STEERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
