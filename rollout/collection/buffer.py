"""Finished groups that no step was trained on yet, and how the run checkpoint keeps them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

from rlcore.runs.rollouts import decode_samples, encode_samples
from rollout.accounting.prompt_queue import PromptQueue
from rollout.collection.group_runner import Group
from rollout.collection.published_versions import Publication

# Reasons for which groups are given up:
STALE = "stale"  # no step may train on the group any more
ROLLED_BACK = "rolled_back"  # a token comes from weights that the run has gone back behind


@dataclass(frozen=True)
class BufferedGroup:
    """A finished group, with the policy steps of its oldest and of its newest token."""

    group: Group
    oldest: int
    newest: int

    @cached_property
    def encoded(self) -> dict[str, Any]:
        """The group as JSON; see `decode`.

        It is kept, since each hand-over may ask for it, and takes about as much memory again.
        """
        samples = base64.b64encode(encode_samples(self.group.samples)).decode()
        return {
            "draw": self.group.draw,
            "policy_steps": [self.oldest, self.newest],
            "samples": samples,
        }


class GroupBuffer:
    """The finished groups, by draw."""

    def __init__(self) -> None:
        self._groups: dict[int, BufferedGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, draw: int) -> bool:
        return draw in self._groups

    def __iter__(self) -> Iterator[BufferedGroup]:
        """The groups in the order of their draws."""
        return (self._groups[draw] for draw in sorted(self._groups))

    def put(self, buffered: BufferedGroup) -> None:
        """Add a group. Raises ValueError for a draw that is there already."""
        draw = buffered.group.draw
        if draw in self._groups:
            raise ValueError(f"draw {draw} is in the buffer already")
        self._groups[draw] = buffered

    def take(self, draw: int) -> BufferedGroup:
        """Take a group out of the buffer. Raises ValueError for a draw that is not there."""
        if draw not in self._groups:
            raise ValueError(f"draw {draw} is not in the buffer")
        return self._groups.pop(draw)

    def clear(self) -> None:
        """Forget all groups."""
        self._groups.clear()

    def ages(self) -> list[list[Any]]:
        """[policy step of the oldest token, its draws], the oldest first.

        `Scheduler.restore` takes this as `finished`.
        """
        ages: dict[int, list[int]] = {}
        for buffered in self:
            ages.setdefault(buffered.oldest, []).append(buffered.group.draw)
        return [[oldest, draws] for oldest, draws in sorted(ages.items())]


def decode(states: Sequence[Mapping[str, Any]]) -> list[BufferedGroup]:
    """The groups of their `encoded` forms, without greedy responses.

    The reward of those is in the samples already.
    """
    return [
        BufferedGroup(
            Group(state["draw"], decode_samples(base64.b64decode(state["samples"]))),
            *state["policy_steps"],
        )
        for state in states
    ]


def settle(
    queue: PromptQueue, buffer: GroupBuffer, saved: Sequence[BufferedGroup], *, step: int
) -> list[int]:
    """Decide which finished groups count after `queue` went back to the snapshot of `step`.

    The groups that were saved with the snapshot and those in `buffer` that were finished since
    count, unless a token was made by weights that the run has gone back behind: of a policy step
    above `step`. All other unsettled draws are given back.

    Returns:
        The draws of the groups that do not count.
    """
    groups = {buffered.group.draw: buffered for buffered in (*buffer, *saved)}
    buffer.clear()
    rolled_back = []
    for draw, buffered in sorted(groups.items()):
        queue.adopt(draw)
        if buffered.newest > step:
            rolled_back.append(draw)
        else:
            buffer.put(buffered)
    queue.follow()
    for draw in queue.ledger.unsettled():
        if draw not in buffer:
            queue.give_back(draw, ROLLED_BACK if draw in rolled_back else "")
    return rolled_back


@dataclass(frozen=True)
class Snapshot:
    """The service's state between two steps.

    Taking it is cheap, since nothing in it changes any more; it is encoded where it is saved.
    """

    queue: dict[str, Any]  # `PromptQueue.snapshot`
    finished: Sequence[BufferedGroup] = ()  # and not trained on
    publications: Sequence[Publication] = ()

    def encoded(self) -> dict[str, Any]:
        """The snapshot as JSON, with the publications that the groups' versions need."""
        made_by = [
            span.version
            for buffered in self.finished
            for sample in buffered.group.samples
            for span in sample.versions
        ]
        needed = [
            astuple(publication)
            for publication in self.publications
            if made_by and publication.version >= min(made_by)
        ]
        groups = [buffered.encoded for buffered in self.finished]
        return {**self.queue, "ahead": {"groups": groups, "versions": needed}}
