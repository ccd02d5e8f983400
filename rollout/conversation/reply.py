"""The model's reply in a turn, as a message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.data.messages import Message
from rlcore.data.sample import FinishReason


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. A call with an error is not run, and its result is the error.

    Attributes:
        raw: its full text, as the model wrote it.
        arguments: None if they are unreadable. Arguments that the tool's schema refuses, or of an
            unknown tool, are as the model wrote them.
        id: the `own_id`, or the number of the call within the reply.
        own_id: the id that the model wrote, if the format has ids that chat templates take.
        as_texts: the values were written as texts, and the tool's schema gives their types; this is
            the language of those that are not strings.
    """

    raw: str
    name: str = ""
    arguments: dict[str, Any] | None = None
    error: str = ""
    id: str = ""
    own_id: str = ""
    as_texts: Literal["", "json", "python"] = ""


@dataclass
class Turn:
    """The parts of a turn."""

    said: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class Reply:
    """A turn of the model.

    Attributes:
        text: the text without reasoning and calls.
        finish_reason: "stop", or the budget that ended the turn.
        tokens_left: tokens left in the smallest budget of the rollout.
        raw: the full text without the stop token.
    """

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    tokens_left: int
    raw: str = ""
    message: Message = field(default_factory=dict)
