"""A text stream whose lines another process prints."""

from __future__ import annotations

import io
from collections.abc import Callable


class LineStream(io.TextIOBase):
    """Gives every complete line to `send`, and keeps the rest."""

    encoding = "utf-8"

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._line = ""

    def writable(self) -> bool:
        """True, as for every output stream."""
        return True

    def write(self, text: str) -> int:
        """Send the complete lines, and keep the rest."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._send(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Keep an incomplete line: other processes print too."""
