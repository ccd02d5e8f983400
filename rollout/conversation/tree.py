r"""The tree of a rollout: the tokens sent to the model and the tokens it wrote, each once.

    prompt (context) -> turn 0 -> results (context) -> turn 1
                              \-> results (context) -> turn 2        a branch

Nodes are immutable. The path to a leaf gives a sample; a turn that several paths share is trained
in the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlcore.data.generation import Completion
from rlcore.data.messages import Message


@dataclass(eq=False, slots=True)
class Node:
    """Messages of the context, or one turn of the model."""

    parent: Node | None
    tokens: NDArray[np.int32]
    messages: tuple[Message, ...]  # the messages in these tokens; a single one for a turn
    turn: int | None = None  # number of the model's turn in the rollout; None: context
    completion: Completion | None = None  # the engine's completion, for a turn
    reward: float | None = None  # the environment's reward, for a turn
    dropped: str = ""  # why a turn is not trained on

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        found = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]


class Tree:
    """All nodes of a rollout, in the order in which they were made."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        # number of the next turn, over all branches
        self.turns = 0

    def context(
        self, parent: Node | None, tokens: NDArray[np.int32], messages: Sequence[Message]
    ) -> Node:
        """Add context after `parent`."""
        return self._add(Node(parent, tokens, tuple(messages)))

    def turn(self, parent: Node, number: int, completion: Completion, message: Message) -> Node:
        """Add a turn of the model after `parent`."""
        return self._add(
            Node(parent, completion.tokens, (message,), turn=number, completion=completion)
        )

    def take_turn(self) -> int:
        """Take the next turn's number."""
        self.turns += 1
        return self.turns - 1

    def last_turn_in(self, tokens: NDArray[np.int32], messages: int) -> Node | None:
        """The last turn whose path is a proper prefix of `tokens`.

        Args:
            messages: number of messages in `tokens`; the path must have fewer.
        """
        found = None
        following: dict[Node | None, list[Node]] = {}
        for node in self.nodes:
            following.setdefault(node.parent, []).append(node)
        # the first of equals wins, so that a resumed run agrees
        level = [(node, 0, 0) for node in following.get(None, ())]
        while level:
            below: list[tuple[Node, int, int]] = []
            for node, start, said in level:
                end = start + len(node.tokens)
                said += len(node.messages)
                if end >= len(tokens) or said >= messages:
                    continue
                if not np.array_equal(tokens[start:end], node.tokens):
                    continue
                if node.turn is not None and (found is None or end > found[1]):
                    found = (node, end)
                below += [(child, end, said) for child in following.get(node, ())]
            level = below
        return None if found is None else found[0]

    @property
    def branches(self) -> int:
        """Number of turns without a later turn on their path, minus one."""
        return max(0, len(self._last(lambda node: node.turn is not None)) - 1)

    def leaves(self) -> list[Node]:
        """The last trained turn of each path."""
        return self._last(lambda node: node.turn is not None and not node.dropped)

    def _last(self, counts: Callable[[Node], bool]) -> list[Node]:
        """The matching nodes without a matching descendant."""
        followed: set[Node | None] = set()
        found = []
        # visit children before their parents
        for node in reversed(self.nodes):
            if counts(node) and node not in followed:
                found.append(node)
            if counts(node) or node in followed:
                followed.add(node.parent)
        return found[::-1]

    def _add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node
