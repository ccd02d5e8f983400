"""Trainer and engines on the same GPUs: the phases, and the order in which memory changes hands.

    GENERATING ----- release all, onload -----> TRAINING
      ^    |                                       |
      |    +- release all but weights, onload -+   |
      |                                        v   v restore weights
      +------ offload, restore the rest ------- HANDOVER

At most one side has all its memory on the device. During a handover the engines hold only their
weights, as write targets, and the trainer holds everything that a checkpoint needs. A phase begins
only when it is needed: a checkpoint right after a publication moves nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from rlcore.data.generation import MemoryTag
from rlcore.interfaces import EngineMemory, PolicyBackend
from rlcore.trainer.rank_sync import RankSync, on_rank0


class GpuPhase(StrEnum):
    """The side that has the GPUs."""

    # The engines have weights and caches; the trainer is offloaded to host memory.
    GENERATING = "generating"
    # The trainer is on the device; the engines hold nothing there, not even weights.
    TRAINING = "training"
    # The trainer is on the device; the engines have their weights.
    HANDOVER = "handover"


CACHES: tuple[MemoryTag, ...] = ("kv_cache", "cuda_graph")
WEIGHTS: tuple[MemoryTag, ...] = ("weights",)


class GpuSharing:
    """Shares the GPUs. Every rank has one; all call `switch_to` in the same order.

    The first phase is GENERATING: construction offloads the trainer. Engines may start once every
    rank has constructed this object.

    Args:
        memory: given on rank 0 only.
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
        # Engines size their caches by the memory that is free when they start.
        backend.connect()
        backend.offload()

    def switch_to(self, phase: GpuPhase) -> None:
        """Begin `phase`; nothing moves if it is the current phase.

        Raises:
            ValueError: an internal error: engines would generate although nothing was published
                since they released their weights.
        """
        if phase is self.phase:
            return
        self._change_to(phase)
        if phase is not GpuPhase.HANDOVER:
            return
        runs = self._sync.broadcast(
            "whether an engine runs",
            lambda: "yes" if on_rank0(self._memory).any_running() else "",
            timeout_s=self._timeout_s,
        )
        if not runs:
            # Engines restart only while the trainer is offloaded. If none does, the
            # next publication reports it.
            self._change_to(GpuPhase.GENERATING)
            self._change_to(GpuPhase.HANDOVER)

    def _change_to(self, phase: GpuPhase) -> None:
        """Move memory. All ranks release theirs before an engine takes it."""
        match self.phase, phase:
            case GpuPhase.GENERATING, GpuPhase.TRAINING:
                self._move_engines("release", (*CACHES, *WEIGHTS))
                self._backend.onload()
            case GpuPhase.GENERATING, GpuPhase.HANDOVER:
                self._move_engines("release", CACHES)
                self._backend.onload()
            case GpuPhase.TRAINING, GpuPhase.HANDOVER:
                self._backend.release_cache()
                self._sync.barrier("releasing the trainer's cache", timeout_s=self._timeout_s)
                self._move_engines("restore", WEIGHTS)
            case GpuPhase.HANDOVER, GpuPhase.GENERATING:
                self._backend.offload()
                self._sync.barrier("offloading the trainer", timeout_s=self._timeout_s)
                self._move_engines("restore", CACHES)
            case _:
                raise ValueError(f"{phase.value} cannot follow {self.phase.value}")
        self.phase = phase

    def _move_engines(
        self, action: Literal["release", "restore"], tags: tuple[MemoryTag, ...]
    ) -> None:
        """Let the engines, which stay idle throughout, release or reclaim memory."""
        self._sync.run_on_rank0(
            f"the engines to {action} {' and '.join(tags)}",
            lambda: getattr(on_rank0(self._memory), action)(tags),
            timeout_s=self._timeout_s,
        )
