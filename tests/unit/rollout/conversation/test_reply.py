"""A turn of the model as it ended."""

from __future__ import annotations

from dataclasses import replace

from rollout.conversation.reply import Reply, ToolCall


def test_a_turn_that_ended_is_the_same_turn() -> None:
    reply = Reply(
        "text",
        "reasoning",
        (ToolCall("1", "add", {"a": 1}),),
        "stop",
        9,
        raw="all of it",
        message={"role": "assistant", "content": "text"},
    )
    assert reply.ended("turns", 3) == replace(reply, finish_reason="turns", tokens_left=3)
