"""A rendering that begins as the model saw and wrote it goes on from its last turn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlcore.data.generation import Completion
from rlcore.data.sample import VersionSpan
from rollout.conversation.tree import Node, Tree

from .kit import ScriptedModel, make_context, make_prompt, make_tokenizer

USER = {"role": "user", "content": "1+2?"}
SAID = {"role": "assistant", "content": "a"}


def tokens(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def made(*ids: int) -> Completion:
    size = len(ids)
    return Completion(tokens(*ids), np.zeros(size, np.float32), "stop", (VersionSpan(0, 0, size),))


def two_turns() -> tuple[Tree, Node, Node]:
    """A user's 1 2, the model's 3, a user's 4, the model's 5; and a branch with 6 for the 5."""
    tree = Tree()
    root = tree.context(None, tokens(1, 2), [USER])
    first = tree.turn(root, 0, made(3), SAID)
    between = tree.context(first, tokens(4), [USER])
    tree.turn(between, 1, made(6), SAID)
    return tree, first, tree.turn(between, 2, made(5), SAID)


def test_the_last_turn_that_the_tokens_begin_with_is_found() -> None:
    tree, first, second = two_turns()
    assert tree.last_turn_in(tokens(1, 2, 3, 4, 5, 7), 5) is second
    assert tree.last_turn_in(tokens(1, 2, 3, 4, 9, 7), 5) is first
    assert tree.last_turn_in(tokens(1, 2, 3, 9), 3) is first


def test_what_is_no_turn_or_nothing_new_is_not_gone_on_from() -> None:
    tree, first, _ = two_turns()
    assert tree.last_turn_in(tokens(1, 2, 9), 2) is None  # the context alone
    assert tree.last_turn_in(tokens(1, 2, 3), 3) is None  # nothing behind it
    assert tree.last_turn_in(tokens(1, 2, 3, 4, 5), 5) is first
    # the same tokens in fewer messages: nothing is left to stand behind the turn
    assert tree.last_turn_in(tokens(1, 2, 3, 4, 5, 7), 4) is first
    assert tree.last_turn_in(tokens(1, 2, 3, 9), 2) is None


async def test_its_sample_has_each_message_and_turn_once() -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, lambda *_: "a")

    conversation = make_context(tokenizer).conversation(make_prompt(tokenizer, "1+2?"), 0, 0, model)
    await conversation.generate()
    quoted = conversation.fork([USER, SAID, {"role": "user", "content": "on"}])
    await quoted.generate()
    (sample,) = conversation.samples()
    assert conversation.branches == 0
    assert [m["content"] for m in sample.messages or ()] == ["1+2?", "a", "on", "a"]
    assert [(span.turn, span.message) for span in sample.turn_spans] == [(0, 1), (1, 3)]
    assert sample.tokens[: len(model.requests[1].prompt)].tolist() == (
        model.requests[1].prompt.tolist()
    )
