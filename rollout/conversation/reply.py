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
        arguments: None if they cannot be read. Those that the tool's schema refuses, or that call
            no tool there is, are as the model wrote them.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    problem: str = ""
    raw: str = ""  # as the model wrote it


@dataclass(frozen=True)
class Reply:
    """A turn of the model.

    Attributes:
        text: what is neither reasoning nor a call.
        finish_reason: "stop", or the budget that ended it.
        tokens_left: of the smallest budget of the rollout.
    """

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    tokens_left: int
    raw: str = ""  # all of it, stop token excluded
    message: Message = field(default_factory=dict)
