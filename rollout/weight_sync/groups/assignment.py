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

from rlcore.interfaces import RankAddress
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

    def __init__(self, senders: int | None, rails: int | None) -> None:
        self._senders = senders
        self._rails = rails
        self.served: dict[Engine, Served] = {}
        self._reach_rank0: set[Engine] = set()  # and no other rank

    def assign(
        self, engine: Engine, gpu: str | None, engines: int, ranks: Sequence[RankAddress]
    ) -> Served:
        """Assign an engine to the ranks with the fewest engines, of those that reach it.

        Args:
            gpu: what identifies the engine's; None where it has none of its own.
            engines: that there are, this one and those that were assigned before included.
            ranks: the addresses of all ranks.

        Raises EngineFailed where the engine has no address any more.
        """
        if engine in self._reach_rank0:
            self.served[engine] = Served(0)
        if engine in self.served:
            return self.served[engine]
        count = self._senders or (1 if ranks[0].gpu is None else engines)
        usable = [_on_one_host(share, ranks) for share in shares(len(ranks), count)]
        if is_loopback(urlsplit(engine.url).hostname or ""):
            usable = [share for share in usable if ranks[share[0]].host == ranks[0].host]
        # earlier engines may have been assigned to ranges that were cut otherwise
        assigned = [{served.sender, *served.helpers} for served in self.served.values()]
        busy = [sum(not used.isdisjoint(share) for used in assigned) for share in usable]
        chosen = busy.index(min(busy))
        members = [] if busy[chosen] else self._members(engine, gpu, usable[chosen], ranks)
        self.served[engine] = _served(members or usable[chosen][:1])
        return self.served[engine]

    def _members(
        self, engine: Engine, gpu: str | None, share: Sequence[int], ranks: Sequence[RankAddress]
    ) -> Sequence[int]:
        """The ranks that can be in a group with this engine, the most that are wanted."""
        if self._rails is not None:
            return share[: self._rails]
        on_nccl = [rank for rank in share if choose_backend(ranks[rank].gpu, gpu) == "nccl"]
        return on_nccl[: engine.group_ranks]

    def keep_only(self, engines: Collection[Engine]) -> None:
        """Forget engines that are gone: their ranks are free for others."""
        self.served = {one: ranks for one, ranks in self.served.items() if one in engines}

    def leave_to_rank0(self, engine: Engine) -> None:
        """Have rank 0 alone serve an engine that did not get to its ranks, also after a restart."""
        self._reach_rank0.add(engine)
        self.served[engine] = Served(0)


def _served(ranks: Sequence[int]) -> Served:
    """Let the first rank send, but not rank 0, which has other work, if there is another."""
    first, *others = sorted(ranks, key=lambda rank: rank == 0)
    return Served(first, tuple(others))


def _on_one_host(share: range, ranks: Sequence[RankAddress]) -> list[int]:
    """Those of the ranks that are on the machine of the first."""
    return [rank for rank in share if ranks[rank].host == ranks[share[0]].host]


def shares(world_size: int, count: int) -> list[range]:
    """Cut the ranks of a world into `count` ranges, or into single ranks where these are fewer.

    The first of each are as far apart as they can be: on as many machines as there are.
    """
    count = min(count, world_size)
    starts = [i * world_size // count for i in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
