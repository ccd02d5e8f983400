"""The assignment of trainer ranks to engines.

sender   the rank that sends every bucket to the engine
helpers  other ranks of its machine that are also in the engine's process group, and send
         nothing themselves. NCCL spreads a broadcast over the network cards of all of them,
         up to the number of the engine's own cards
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from urllib.parse import urlsplit

from rlcore.interfaces import RankAddress
from rollout.weight_sync.base import Engine
from rollout.weight_sync.process_group import choose_backend, is_loopback


class SenderAssignment:
    """Assigns engines to ranks, each for as long as it stays in the run.

    Args:
        senders: the number of ranks that engines are assigned to. None means one for each engine on
            GPUs, and rank 0 alone on the CPU.
        rails: the most ranks in the group of an engine. None means one for each GPU of the engine
            with NCCL, and one rank otherwise.
    """

    def __init__(self, senders: int | None, rails: int | None) -> None:
        self._senders = senders
        self._rails = rails
        # The trainer's ranks in the process group of each engine, the sender first.
        self.served: dict[Engine, tuple[int, ...]] = {}
        # engines that reach no other rank
        self._reach_rank0: set[Engine] = set()

    def assign(
        self, engine: Engine, gpu: str | None, engines: int, ranks: Sequence[RankAddress]
    ) -> tuple[int, ...]:
        """Assign an engine to the ranks with the fewest engines, among those that reach it.

        The sender comes first. It is rank 0, which has other work, only if that is alone.

        Args:
            gpu: the identity of the engine's GPU; None without a GPU of its own.
            engines: the number of all engines, including this one and the assigned ones.
            ranks: the addresses of all ranks.

        Raises EngineFailed if the engine has lost its address.
        """
        if engine in self._reach_rank0:
            self.served[engine] = (0,)
        if engine in self.served:
            return self.served[engine]
        count = self._senders or (1 if ranks[0].gpu is None else engines)
        usable = [
            [rank for rank in share if ranks[rank].host == ranks[share[0]].host]
            for share in shares(len(ranks), count)
        ]
        if is_loopback(urlsplit(engine.url).hostname or ""):
            usable = [share for share in usable if ranks[share[0]].host == ranks[0].host]
        # The ranges of earlier engines may have been cut differently.
        share_of = {rank: number for number, share in enumerate(usable) for rank in share}
        busy = [0] * len(usable)
        for served in self.served.values():
            for number in {share_of[rank] for rank in served if rank in share_of}:
                busy[number] += 1
        chosen = busy.index(min(busy))
        members = [] if busy[chosen] else self._members(engine, gpu, usable[chosen], ranks)
        members = members or usable[chosen][:1]
        self.served[engine] = tuple(sorted(members, key=lambda rank: rank == 0))
        return self.served[engine]

    def _members(
        self, engine: Engine, gpu: str | None, share: Sequence[int], ranks: Sequence[RankAddress]
    ) -> Sequence[int]:
        """The ranks for a group with this engine, up to the wanted number."""
        if self._rails is not None:
            return share[: self._rails]
        on_nccl = [rank for rank in share if choose_backend(ranks[rank].gpu, gpu) == "nccl"]
        return on_nccl[: engine.group_ranks]

    def keep_only(self, engines: Collection[Engine]) -> None:
        """Drop engines that have left, which frees their ranks."""
        self.served = {one: ranks for one, ranks in self.served.items() if one in engines}

    def leave_to_rank0(self, engine: Engine) -> None:
        """Have rank 0 alone serve an engine that cannot reach its ranks, also after a restart."""
        self._reach_rank0.add(engine)
        self.served[engine] = (0,)


def shares(world_size: int, count: int) -> list[range]:
    """Cut the ranks of a world into `count` ranges, or into single ranks if there are fewer ranks.

    The first ranks of the ranges are spread evenly, over as many machines as possible.
    """
    count = min(count, world_size)
    starts = [i * world_size // count for i in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
