"""What a chat template writes around the contents of messages, rendered once and kept.

Most templates copy the content of a tool's or a user's message, and look at nothing in it: then
other contents stand in the same text. Whether a template does so is tried, with contents that have
its own words at their ends. Messages that it may treat otherwise are rendered one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from jinja2 import Environment

from rlcore.data.messages import Message
from rlcore.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rendered = tuple[int, str]  # the stop token before the text, and the text
Frame = tuple[int, list[str]]  # the stop token, and the text before, between and behind contents
Key = tuple[tuple[tuple[str, object], ...], ...]  # of each message, all but its content

MOST_KEPT = 1000  # frames
_MARKER = "9e4b7d"
_ROLES = ("tool", "user")
# What escaping, changes of case, work on lines and a limit of length would change.
_AWKWARD = "Aa\"'\\<&>é{1: [2]}\r\n\n \tz" * 100 + "."


class Frames:
    """Renders messages by putting their contents into texts that were rendered before.

    Args:
        tokenizer: its chat template tells which contents to try.
        render: asks the template itself. It must depend on the messages alone.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        render: Callable[[Sequence[Message]], Rendered],
    ) -> None:
        self._tokenizer = tokenizer
        self._render = render
        self._copies: dict[tuple[tuple[str, ...], ...], bool] = {}  # by the keys of messages
        self._frames: dict[Key, Frame | None] = {}

    def render(self, new: Sequence[Message]) -> Rendered:
        """Return what the template gives for `new`.

        Raises:
            UserError: the template refuses the messages.
        """
        contents = []
        for message in new:
            content = message.get("content")
            # many templates trim, and some leave out what is empty
            if not isinstance(content, str) or not content or content != content.strip():
                return self._render(new)
            contents.append(content)
        key = tuple([tuple([i for i in m.items() if i[0] != "content"]) for m in new])
        try:
            if key not in self._frames:
                self._keep(key, new)
            frame = self._frames[key]
        except TypeError:  # a value that cannot be a key
            frame = None
        return self._render(new) if frame is None else _filled(frame, contents)

    def _keep(self, key: Key, new: Sequence[Message]) -> None:
        if len(self._frames) >= MOST_KEPT:  # ids of calls may be random
            self._frames.clear()
        self._frames[key] = None
        texts = all(isinstance(value, str) for items in key for _, value in items)
        if texts and all(message["role"] in _ROLES for message in new):
            frame = self._frame(new)
            if frame is not None and self._does_copy(frame, new):
                self._frames[key] = frame

    def _frame(self, new: Sequence[Message]) -> Frame | None:
        """Return the text around contents; None if they do not stand there once each, in order."""
        markers = [f"{_MARKER}{i}." for i in range(len(new))]
        stop, text = self._render(_with_contents(new, markers))
        parts = []
        for marker in markers:
            before, _, text = text.partition(marker)
            parts.append(before)
        frame = (stop, [*parts, text])
        whole = not any(_MARKER in part for part in frame[1])
        return frame if whole and self._holds(frame, new, markers) else None

    def _does_copy(self, frame: Frame, new: Sequence[Message]) -> bool:
        """Whether all tried contents come out as they are; one is tried each time."""
        if not self._holds(frame, new, [_AWKWARD] * len(new)):
            return False
        kind = tuple((message["role"], *message) for message in new)
        if kind not in self._copies:
            self._copies[kind] = all(
                self._holds(frame, new, [content] * len(new)) for content in self._tried
            )
        return self._copies[kind]

    def _holds(self, frame: Frame, new: Sequence[Message], contents: Sequence[str]) -> bool:
        try:
            rendered = self._render(_with_contents(new, contents))
        except UserError:
            return False
        return rendered == _filled(frame, contents)

    @cached_property
    def _tried(self) -> list[str]:
        """Contents that are, or begin and end with, words that the template may look for."""
        source = Environment().lexer.tokenize(self._tokenizer.get_chat_template())
        words = [token.value for token in source if token.type == "string"]
        words += self._tokenizer.all_special_tokens
        ends = {*pairwise(words), *((word, word) for word in words)}
        tried = [*words, *(f"{before}a{behind}" for before, behind in sorted(ends))]
        return [content for content in tried if content and content == content.strip()]


def _with_contents(new: Sequence[Message], contents: Sequence[str]) -> list[Message]:
    return [{**message, "content": content} for message, content in zip(new, contents, strict=True)]


def _filled(frame: Frame, contents: Sequence[str]) -> Rendered:
    stop, parts = frame
    text = parts[0]
    for content, behind in zip(contents, parts[1:], strict=True):
        text += content + behind
    return stop, text
