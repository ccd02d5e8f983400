"""Who has the GPUs that trainer and engines share, and in which order their memory changes hands.

    GENERATING ----- release all, onload -----> TRAINING        At most one side has its bulk on the device: in a handover
      ^    |                                       |            the engines have their weights alone, to be written to, and
      |    +- release all but weights, onload -+   |            the trainer all that a checkpoint holds.
      |                                        v   v restore weights
      +------ offload, restore the rest ------- HANDOVER

A phase begins when it is needed and not before: a checkpoint right after a publication moves
    nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rlcore.data.generation import MemoryTag
from rlcore.interfaces import EngineMemory, PolicyBackend
from rlcore.trainer.rank_sync import RankSync


class GpuPhase(str, Enum):
    # engines have weights and caches, the trainer is offloaded in host memory
    GENERATING = "generating"
    # the trainer is on the device, engines have nothing there: their weights are gone
    TRAINING = "training"
    HANDOVER = "handover"  # the trainer is on the device, engines have their weights


@dataclass(frozen=True)
class Release:
    """The engines give memory back; they are idle then, and stay so."""

    tags: tuple[MemoryTag, ...]


@dataclass(frozen=True)
class Restore:
    """The engines take memory again."""

    tags: tuple[MemoryTag, ...]


class Trainer(str, Enum):
    OFFLOAD = "offload"
    ONLOAD = "onload"
    RELEASE_CACHE = "release_cache"  # what was kept of the last passes' memory


Move = Release | Restore | Trainer

CACHES: tuple[MemoryTag, ...] = ("kv_cache", "cuda_graph")
MOVES: Mapping[tuple[GpuPhase, GpuPhase], tuple[Move, ...]] = {
    (GpuPhase.GENERATING, GpuPhase.TRAINING): (Release((*CACHES, "weights")), Trainer.ONLOAD),
    (GpuPhase.GENERATING, GpuPhase.HANDOVER): (Release(CACHES), Trainer.ONLOAD),
    (GpuPhase.TRAINING, GpuPhase.HANDOVER): (Trainer.RELEASE_CACHE, Restore(("weights",))),
    (GpuPhase.HANDOVER, GpuPhase.GENERATING): (Trainer.OFFLOAD, Restore(CACHES)),
}


class GpuSharing:
    """One object a rank; `switch_to` is called by all ranks in the same order.

    It begins with the engines' phase: the trainer is offloaded at once, and they may start when
    every rank has come so far.

    Args:
        memory: on rank 0.
        timeout_s: how long one side waits for the other.
    """

    def __init__(
        self,
        sync: RankSync,
        backend: PolicyBackend,
        memory: EngineMemory | None,
        *,
        timeout_s: float,
    ) -> None:
        self._sync = sync
        self._backend = backend
        self._memory = memory
        self._timeout_s = timeout_s
        self.phase = GpuPhase.GENERATING
        backend.offload()

    def switch_to(self, phase: GpuPhase) -> None:
        """Make it `phase`; nothing moves where it is already.

        Raises:
            ValueError: engines would generate with weights that are gone, as nothing was published:
                a defect of ours.
        """
        if phase is self.phase:
            return
        self._pass_on(phase)
        if phase is GpuPhase.HANDOVER and not self._anyone():
            # engines start again, where the trainer is not in their way
            self._pass_on(GpuPhase.GENERATING)
            self._pass_on(GpuPhase.HANDOVER)  # ... or none does, as the publication will say

    def _pass_on(self, phase: GpuPhase) -> None:
        if (self.phase, phase) not in MOVES:
            raise ValueError(f"{phase.value} cannot follow {self.phase.value}")
        for move in MOVES[self.phase, phase]:
            self._make(move)
        self.phase = phase

    def _anyone(self) -> bool:
        """Whether there is an engine to hand over to; every rank learns it."""
        answer = self._sync.broadcast(
            "whether an engine runs", lambda: str(self._engines.anyone()), timeout_s=self._timeout_s
        )
        return answer == str(True)

    def _make(self, move: Move) -> None:
        """Rank 0 assembles the others before it lets an engine take what they give back."""
        match move:
            case Release(tags):
                what = f"the engines to release {' and '.join(tags)}"
                self._sync.run_on_rank0(
                    what, lambda: self._engines.release(tags), timeout_s=self._timeout_s
                )
            case Restore(tags):
                what = f"the engines to restore {' and '.join(tags)}"
                self._sync.run_on_rank0(
                    what, lambda: self._engines.restore(tags), timeout_s=self._timeout_s
                )
            case Trainer.ONLOAD:
                self._backend.onload()
            case Trainer.OFFLOAD:
                self._backend.offload()
                self._sync.barrier("offloading the trainer", timeout_s=self._timeout_s)
            case Trainer.RELEASE_CACHE:
                self._backend.release_cache()
                self._sync.barrier("releasing the trainer's cache", timeout_s=self._timeout_s)

    @property
    def _engines(self) -> EngineMemory:
        assert self._memory is not None, "only rank 0 reaches the engines"
        return self._memory
