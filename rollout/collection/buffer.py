"""Groups that are finished and that no step was trained on yet, and how the run checkpoint keeps
them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

from rlcore.runs.rollouts import decode_samples, encode_samples
from rollout.accounting.prompt_queue import PromptQueue
from rollout.collection.group_runner import Group
from rollout.collection.published_versions import Publication

STALE = "stale"  # why groups are given up that no step may train on any more
# why groups are given up whose tokens come from weights that the run has gone back behind
ROLLED_BACK = "rolled_back"


@dataclass(frozen=True)
class BufferedGroup:
    """A finished group, with the policy steps of its oldest and of its newest token."""

    group: Group
    oldest: int
    newest: int

    @cached_property
    def encoded(self) -> dict[str, Any]:
        """JSON-able; see `decode`. BufferedGroup with the group, since each hand-over may ask:
        about as much memory again.
        """
        samples = base64.b64encode(encode_samples(self.group.samples)).decode()
        return {
            "draw": self.group.draw,
            "policy_steps": [self.oldest, self.newest],
            "samples": samples,
        }


class GroupBuffer:
    """By draw."""

    def __init__(self) -> None:
        self._kept: dict[int, BufferedGroup] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, draw: int) -> bool:
        return draw in self._kept

    def __iter__(self) -> Iterator[BufferedGroup]:
        """In the order of draws."""
        return (self._kept[draw] for draw in sorted(self._kept))

    def put(self, kept: BufferedGroup) -> None:
        """Raises ValueError for a draw that is there already."""
        if kept.group.draw in self._kept:
            raise ValueError(f"draw {kept.group.draw} is in the buffer already")
        self._kept[kept.group.draw] = kept

    def take(self, draw: int) -> BufferedGroup:
        """Out of the buffer. Raises ValueError for a draw that is not there."""
        if draw not in self._kept:
            raise ValueError(f"draw {draw} is not in the buffer")
        return self._kept.pop(draw)

    def clear(self) -> None:
        self._kept.clear()

    def ages(self) -> list[list[Any]]:
        """[policy step of the oldest token, its draws], the oldest first: what `Scheduler.restore`
        takes as `finished`.
        """
        ages: dict[int, list[int]] = {}
        for kept in self:
            ages.setdefault(kept.oldest, []).append(kept.group.draw)
        return [[oldest, draws] for oldest, draws in sorted(ages.items())]


def encode(groups: Iterable[BufferedGroup]) -> list[dict[str, Any]]:
    """JSON-able; see `decode`."""
    return [kept.encoded for kept in groups]


def decode(states: Sequence[Mapping[str, Any]]) -> list[BufferedGroup]:
    """What `encode` gave. Greedy responses are not kept: their reward is in the samples by then."""
    return [
        BufferedGroup(
            Group(state["draw"], decode_samples(base64.b64decode(state["samples"]))),
            *state["policy_steps"],
        )
        for state in states
    ]


def settle(
    draws: PromptQueue, buffer: GroupBuffer, saved: Sequence[BufferedGroup], *, step: int
) -> list[int]:
    """After `draws` went back to the cut of `step`: which finished groups count. All other
    unsettled draws are given back.

    Those that were saved with the cut, and those in `buffer` that were finished since, count unless
    a token of theirs was made by weights that the run has gone back behind: of a policy step above
    `step`. The draws of these are returned.
    """
    living = {kept.group.draw: kept for kept in buffer}
    buffer.clear()
    rolled_back = []
    for draw, kept in sorted((living | {kept.group.draw: kept for kept in saved}).items()):
        draws.adopt(draw)
        if kept.newest > step:
            rolled_back.append(draw)
        else:
            buffer.put(kept)
    draws.follow()
    for draw in draws.ledger.unsettled():
        if draw not in buffer:
            draws.give_back(draw, ROLLED_BACK if draw in rolled_back else "")
    return rolled_back


@dataclass(frozen=True)
class Snapshot:
    """A moment between two steps. Cheap to take, since nothing in it changes any more; encoded
    where it is saved.
    """

    draws: dict[str, Any]
    finished: Sequence[BufferedGroup] = ()  # and not trained on
    publications: Sequence[Publication] = ()

    def encoded(self) -> dict[str, Any]:
        """JSON-able, with the publications that the groups' versions need."""
        made_by = [
            span.version
            for kept in self.finished
            for one in kept.group.samples
            for span in one.versions
        ]
        needed = [
            astuple(one) for one in self.publications if made_by and one.version >= min(made_by)
        ]
        return {**self.draws, "ahead": {"groups": encode(self.finished), "versions": needed}}
