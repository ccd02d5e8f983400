"""Rows with answers that people preferred or not, in the shapes that data sets have.

{prompt, chosen, rejected}     texts, or chats; answers may repeat the prompt's messages
{chosen, rejected}             the prompt is the beginning that both have (TRL's implicit one)
{prompt, completion, label}    one answer, good (true) or bad (false)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rlcore.data.messages import Message, check_messages
from rlcore.data.rows import shorten
from rlcore.errors import DataError

PREFERENCE = "preference"  # the format's name
CHOSEN = "chosen"
REJECTED = "rejected"
COMPLETION = "completion"
VERDICT = "label"  # whether a completion is good


@dataclass(frozen=True)
class Preference:
    """A prompt and its answers: texts, or the assistant's messages."""

    prompt: str | list[Message]
    answer: str | Message
    rejected: str | Message | None  # None: one answer alone
    is_good: bool  # of `answer`; a chosen one is


def read_preference(where: str, row: dict[str, Any], prompt: Any) -> Preference:
    """Read the prompt and the answers of a row.

    Args:
        where: the row, for messages.
        prompt: the column of the prompt: text, messages, or None where answers begin with it.

    Raises:
        DataError: an answer is missing or empty; answers that are no text and no list of messages,
            or that differ before the assistant's last message.
    """
    if CHOSEN not in row:
        verdict = row.get(VERDICT)
        if not isinstance(verdict, bool):
            raise DataError(
                f"{where}: {VERDICT!r} must be true or false, whether the {COMPLETION!r} is good;"
                f" got {shorten(verdict)}"
            )
        prompt, answer = _apart(where, prompt, _answer(where, row, COMPLETION))
        return Preference(prompt, answer, None, verdict)
    chosen = _answer(where, row, CHOSEN)
    rejected = _answer(where, row, REJECTED)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(
            f"{where}: {CHOSEN!r} and {REJECTED!r} must both be text, or both lists of messages"
        )
    if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        prompt, chosen, rejected = _implicit(where, chosen, rejected)
    before, answer = _apart(where, prompt, chosen)
    other, worse = _apart(where, prompt, rejected)
    if before != other:
        raise DataError(
            f"{where}: {CHOSEN!r} and {REJECTED!r} differ before the assistant's last message; a"
            " pair is two answers to one prompt"
        )
    return Preference(before, answer, worse, is_good=True)


def _answer(where: str, row: dict[str, Any], key: str) -> str | list[Message]:
    value = row.get(key)
    if isinstance(value, list) and value:
        return check_messages(where, key, value)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{where}: {key!r} must be text or a list of chat messages, and not empty; got"
            f" {type(value).__name__}: {shorten(value)}"
        )
    return value


def _implicit(where: str, chosen: str, rejected: str) -> tuple[str, str, str]:
    """Cut two texts behind the beginning that both have; a blank belongs to what follows it."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected)))
    prompt = chosen[:same].removesuffix(" ")
    if not prompt:
        raise DataError(f"{where}: no 'prompt', and no beginning that both answers have")
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _apart(
    where: str, prompt: Any, answer: str | list[Message]
) -> tuple[str | list[Message], str | Message]:
    """Return the prompt, with the messages that the answer repeats or adds, and the answer."""
    if isinstance(answer, str):
        if prompt is None:
            raise DataError(f"{where}: no 'prompt'")
        return prompt, answer
    if isinstance(prompt, list):
        repeats = answer[: len(prompt)] == prompt
        chat = answer if repeats else [*prompt, *answer]
    elif prompt is None or answer[0]["role"] != "assistant":
        # The chat itself has the prompt, as in UltraFeedback.
        chat = answer
    else:
        chat = [{"role": "user", "content": prompt}, *answer]
    if len(chat) < 2 or chat[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: an answer must end with the assistant's message, behind a prompt; got roles"
            f" {', '.join(message['role'] for message in chat)}"
        )
    return chat[:-1], chat[-1]
