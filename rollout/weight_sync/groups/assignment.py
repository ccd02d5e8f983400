"""Which ranks of the trainer bring weights to which engine.

sender   the one that sends the engine every bucket
helpers  other ranks of its machine that are in the engine's process group, too, and send to
         nobody. NCCL passes a broadcast on through the network cards of all of them, as far as
         the engine has as many
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import urlsplit

from rlcore.interfaces import RankPlace
from rollout.weight_sync.base import Engine
from rollout.weight_sync.process_group import choose_backend, is_loopback


@dataclass(frozen=True)
class Served:
    """The ranks of the trainer that are in the process group of an engine."""

    sender: int
    helpers: tuple[int, ...] = ()


class SenderAssignment:
    """Assigns engines to ranks, each for as long as it is there.

    Args:
        senders: the ranks that engines are assigned to; None: on GPUs as many as there are engines,
            on the CPU rank 0 alone.
        rails: the ranks in the group of an engine, at most; None: where it is NCCL's, as many as
            the engine has GPUs, and else one.
    """

    def __init__(self, senders: int | None, rails: int | None, *, on_gpu: bool) -> None:
        self._senders = senders
        self._rails = rails
        self._on_gpu = on_gpu
        self.served: dict[Engine, Served] = {}
        self._reach_rank0: set[Engine] = set()  # and no other rank

    def assign(
        self, engine: Engine, gpu: str | None, engines: int, places: Sequence[RankPlace]
    ) -> Served:
        """Assign an engine to the ranks with the fewest engines, of those that reach it.

        Args:
            gpu: what identifies the engine's; None where it has none of its own.
            engines: that there are, this one and those that were assigned before included.
            places: of all ranks; none where rank 0 alone can send.

        Raises EngineFailed where the engine has no address any more.
        """
        if engine in self._reach_rank0:
            self.served[engine] = Served(0)
        if engine in self.served:
            return self.served[engine]
        count = self._senders or (engines if self._on_gpu else 1)
        usable = [_on_one_host(share, places) for share in shares(len(places) or 1, count)]
        if is_loopback(urlsplit(engine.url).hostname or ""):
            usable = [ranks for ranks in usable if _share_a_host(ranks[0], 0, places)]
        # earlier engines may have been assigned to ranges that were cut otherwise
        assigned = [{served.sender, *served.helpers} for served in self.served.values()]
        busy = [sum(not used.isdisjoint(ranks) for used in assigned) for ranks in usable]
        chosen = busy.index(min(busy))
        ranks = [] if busy[chosen] else self._rails_of(engine, gpu, usable[chosen], places)
        self.served[engine] = _served(ranks or usable[chosen][:1])
        return self.served[engine]

    def _rails_of(
        self, engine: Engine, gpu: str | None, ranks: Sequence[int], places: Sequence[RankPlace]
    ) -> Sequence[int]:
        """The ranks that can be in a group with this engine, the most that are wanted."""
        if self._rails is not None:
            return ranks[: self._rails]
        on_nccl = [
            rank for rank in ranks if places and choose_backend(places[rank].gpu, gpu) == "nccl"
        ]
        return on_nccl[: engine.group_ranks]

    def keep_only(self, engines: Collection[Engine]) -> None:
        """Forget engines that are gone: their ranks are free for others."""
        self.served = {one: ranks for one, ranks in self.served.items() if one in engines}

    def leave_to_rank0(self, engine: Engine) -> None:
        """Have rank 0 alone serve an engine that did not get to its ranks, also after a restart."""
        self._reach_rank0.add(engine)
        self.served[engine] = Served(0)


def _served(ranks: Sequence[int]) -> Served:
    """Let the first rank send, but not rank 0, who also calls engines, if there is another."""
    first, *others = sorted(ranks, key=lambda rank: rank == 0)
    return Served(first, tuple(others))


def _on_one_host(ranks: range, places: Sequence[RankPlace]) -> list[int]:
    """Those of the ranks that are on the machine of the first."""
    return [rank for rank in ranks if _share_a_host(rank, ranks[0], places)]


def _share_a_host(one: int, other: int, places: Sequence[RankPlace]) -> bool:
    return one == other or places[one].host == places[other].host


def shares(world_size: int, count: int) -> list[range]:
    """Cut the ranks of a world into `count` ranges, or into single ranks where these are fewer.

    The first of each are as far apart as they can be: on as many machines as there are.
    """
    count = min(count, world_size)
    starts = [i * world_size // count for i in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
