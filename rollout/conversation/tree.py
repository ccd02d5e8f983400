r"""The tree of a rollout: what was sent to the model and what it wrote, each token once.

    prompt (context) -> turn 0 -> results (context) -> turn 1
                              \-> results (context) -> turn 2        a branch

A node is never changed. A leaf's path gives a sample; a turn that several paths share is trained in
the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlcore.data.generation import Completion
from rlcore.data.messages import Message


@dataclass(eq=False, slots=True)
class Node:
    """Messages of the context, or one turn of the model."""

    parent: Node | None
    tokens: NDArray[np.int32]
    messages: tuple[Message, ...]  # that these tokens hold; one for a turn
    turn: int | None = None  # the number of the model's turn in the rollout; None: context
    completion: Completion | None = None  # of a turn
    reward: float | None = None  # of a turn, given by the environment
    untrained: str = ""  # of a turn: why it is not trained on
    children: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.parent.children.append(self)

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        found = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]


class Tree:
    """All nodes of a rollout, in the order in which they were made."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.turns = 0  # the next turn's number, over all branches

    def context(
        self, parent: Node | None, tokens: NDArray[np.int32], messages: Sequence[Message]
    ) -> Node:
        """Add context behind `parent`."""
        return self._add(Node(parent, tokens, tuple(messages)))

    def turn(self, parent: Node, number: int, completion: Completion, message: Message) -> Node:
        """Add a turn of the model behind `parent`."""
        return self._add(
            Node(parent, completion.tokens, (message,), turn=number, completion=completion)
        )

    def take_turn(self) -> int:
        """Take the next turn's number."""
        self.turns += 1
        return self.turns - 1

    def leaves(self) -> Iterator[Node]:
        """Yield the last trained turn of each path; nothing that counts stands behind it."""
        for node in self.nodes:
            if _is_trained(node) and not any(_has_trained(child) for child in node.children):
                yield node

    def _add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node


def _is_trained(node: Node) -> bool:
    return node.turn is not None and not node.untrained


def _has_trained(node: Node) -> bool:
    """Whether the node or one behind it is a turn that is trained on."""
    return _is_trained(node) or any(_has_trained(child) for child in node.children)
