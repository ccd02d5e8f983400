"""Text for people: it holds no secret of the run, the text of a model cannot control the terminal,
and a run outlives its terminal.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterable
from typing import TextIO
from urllib.parse import quote

logger = logging.getLogger(__name__)

# Control characters except tab and line end, direction marks, and surrogates, which no stream can
# encode.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


MASK = "(masked)"
MIN_SECRET_LENGTH = 6  # characters: shorter secrets are parts of ordinary words
_secrets: set[str] = set()
# Matches any of the secrets.
_secret = re.compile("(?!)")


def hide(secrets: Iterable[str]) -> None:
    """Mask these values, also quoted for JSON and URLs, in all later output of this process."""
    global _secret
    for secret in secrets:
        if len(secret) >= MIN_SECRET_LENGTH and secret != MASK:
            _secrets.update({secret, json.dumps(secret)[1:-1], quote(secret), quote(secret, "")})
    if _secrets:
        longest_first = sorted(_secrets, key=len, reverse=True)
        _secret = re.compile("|".join(map(re.escape, longest_first)))


def redacted(text: str) -> str:
    """Return `text` without the secrets that were given to `hide`."""
    return _secret.sub(MASK, text)


def printable(text: str) -> str:
    r"""Return `text` redacted, with control characters spelled out: `\x1b` for an escape."""
    spelled = _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return redacted(spelled)


class LastingStream(io.TextIOBase):
    """A text stream whose writes do not fail.

    Text after the reader's end (a closed terminal, a killed `tee`) is dropped. Characters that the
    stream's encoding lacks are spelled out.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._ended = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return not self._ended and self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write the text, unless the reader has gone."""
        if not self._ended:
            known = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
            try:
                self._stream.write(known)
            except OSError as error:
                self._end(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless the reader has gone."""
        if not self._ended:
            try:
                self._stream.flush()
            except OSError as error:
                self._end(error)

    def _end(self, error: OSError) -> None:
        """Discard the stream's buffer, which would be flushed when the process ends."""
        self._ended = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        logger.warning("nothing is shown from here on, since the output was closed: %s", error)
