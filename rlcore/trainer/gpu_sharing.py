"""Trainer and engines on the same GPUs: the phases, and the order in which memory changes hands.

    GENERATING ----- release all, onload -----> TRAINING
      ^    |                                       |
      |    +- release all but weights, onload -+   |
      |                                        v   v restore weights
      +------ offload, restore the rest ------- HANDOVER

At most one side has all its memory on the device. In a handover the engines have their weights
alone, to be written to, and the trainer has all that a checkpoint holds. A phase begins when it is
needed and not before: a checkpoint right after a publication moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from rlcore.data.generation import MemoryTag
from rlcore.interfaces import EngineMemory, PolicyBackend
from rlcore.trainer.rank_sync import RankSync, on_rank0


class GpuPhase(str, Enum):
    """Which side has the GPUs."""

    # The engines have weights and caches; the trainer is offloaded to host memory.
    GENERATING = "generating"
    # The trainer is on the device; the engines have nothing there, not even their weights.
    TRAINING = "training"
    # The trainer is on the device; the engines have their weights.
    HANDOVER = "handover"


@dataclass(frozen=True)
class EngineMove:
    """The engines, which are idle and stay so, give memory back or take it again."""

    action: Literal["release", "restore"]
    tags: tuple[MemoryTag, ...]


class TrainerMove(str, Enum):
    """The trainer moves its state, or gives back the memory of its last passes."""

    OFFLOAD = "offload"
    ONLOAD = "onload"
    RELEASE_CACHE = "release_cache"


Move = EngineMove | TrainerMove

CACHES: tuple[MemoryTag, ...] = ("kv_cache", "cuda_graph")
MOVES: Mapping[tuple[GpuPhase, GpuPhase], tuple[Move, ...]] = {
    (GpuPhase.GENERATING, GpuPhase.TRAINING): (
        EngineMove("release", (*CACHES, "weights")),
        TrainerMove.ONLOAD,
    ),
    (GpuPhase.GENERATING, GpuPhase.HANDOVER): (EngineMove("release", CACHES), TrainerMove.ONLOAD),
    (GpuPhase.TRAINING, GpuPhase.HANDOVER): (
        TrainerMove.RELEASE_CACHE,
        EngineMove("restore", ("weights",)),
    ),
    (GpuPhase.HANDOVER, GpuPhase.GENERATING): (TrainerMove.OFFLOAD, EngineMove("restore", CACHES)),
}


class GpuSharing:
    """Shares the GPUs. Every rank has one; all call `switch_to` in the same order.

    The first phase is GENERATING: the trainer is offloaded at once. The engines may start when
    every rank has made this object.

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
        """Begin `phase`; nothing moves if it is the present one.

        Raises:
            ValueError: a defect of ours: engines would generate although nothing was published
                since they gave their weights back.
        """
        if phase is self.phase:
            return
        self._change_to(phase)
        if phase is GpuPhase.HANDOVER and not self._an_engine_runs():
            # Engines start again only while the trainer is offloaded. If none does, the
            # publication that follows reports it.
            self._change_to(GpuPhase.GENERATING)
            self._change_to(GpuPhase.HANDOVER)

    def _change_to(self, phase: GpuPhase) -> None:
        if (self.phase, phase) not in MOVES:
            raise ValueError(f"{phase.value} cannot follow {self.phase.value}")
        for move in MOVES[self.phase, phase]:
            self._apply(move)
        self.phase = phase

    def _an_engine_runs(self) -> bool:
        answer = self._sync.broadcast(
            "whether an engine runs",
            lambda: str(on_rank0(self._memory).any_running()),
            timeout_s=self._timeout_s,
        )
        return answer == str(True)

    def _apply(self, move: Move) -> None:
        """Make one move. All ranks have given memory back before an engine takes it."""
        match move:
            case EngineMove(action, tags):

                def move_engines() -> None:
                    memory = on_rank0(self._memory)
                    (memory.release if action == "release" else memory.restore)(tags)

                self._sync.run_on_rank0(
                    f"the engines to {action} {' and '.join(tags)}",
                    move_engines,
                    timeout_s=self._timeout_s,
                )
            case TrainerMove.ONLOAD:
                self._backend.onload()
            case TrainerMove.OFFLOAD:
                self._backend.offload()
                self._sync.barrier("offloading the trainer", timeout_s=self._timeout_s)
            case TrainerMove.RELEASE_CACHE:
                self._backend.release_cache()
                self._sync.barrier("releasing the trainer's cache", timeout_s=self._timeout_s)
