"""What the model said in a turn, as a message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlcore.data.messages import Message
from rlcore.data.sample import FinishReason


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; one with a problem is not run, and the problem is the tool's answer.

    Attributes:
        raw: all of its text, as the model wrote it.
        arguments: None if they cannot be read. Those that the tool's schema refuses, or that call
            no tool there is, are as the model wrote them.
        id: counts the calls of the reply.
        as_texts: the values were written as texts, and the tool's schema says of which type they
            are.
    """

    raw: str
    name: str = ""
    arguments: dict[str, Any] | None = None
    problem: str = ""
    id: str = ""
    as_texts: bool = False


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
        text: what is neither reasoning nor a call.
        finish_reason: "stop", or the budget that ended it.
        tokens_left: of the smallest budget of the rollout.
        raw: all of it, stop token excluded.
    """

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    tokens_left: int
    raw: str = ""
    message: Message = field(default_factory=dict)
