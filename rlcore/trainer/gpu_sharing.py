"""Whose turn it is on GPUs that trainer and engines share, and in which order their memory changes hands.

    GENERATING ----- release all, unpark -----> TRAINING        At most one side has its bulk on the device: in a handover
      ^    |                                       |            the engines have their weights alone, to be written to, and
      |    +- release all but weights, unpark -+   |            the trainer all that a checkpoint holds.
      |                                        v   v restore weights
      +------ park, restore the rest ------- HANDOVER

A turn is taken when it is needed and not before: a checkpoint right after a publication moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rlcore.interfaces import EngineMemory, MemoryTag, PolicyBackend
from rlcore.trainer.rank_sync import Control


class Turn(str, Enum):
    GENERATING = "generating"       # engines have weights and caches, the trainer is parked in host memory
    TRAINING = "training"           # the trainer is on the device, engines have nothing there: their weights are gone
    HANDOVER = "handover"           # the trainer is on the device, engines have their weights


@dataclass(frozen=True)
class Release:
    """The engines give memory back; they are idle then, and stay so."""

    tags: tuple[MemoryTag, ...]


@dataclass(frozen=True)
class Restore:
    """The engines take memory again."""

    tags: tuple[MemoryTag, ...]


class Trainer(str, Enum):
    PARK = "park"
    UNPARK = "unpark"
    TRIM = "trim"                   # what was kept of the last passes' memory


Move = Release | Restore | Trainer

CACHES: tuple[MemoryTag, ...] = ("kv_cache", "cuda_graph")
MOVES: Mapping[tuple[Turn, Turn], tuple[Move, ...]] = {
    (Turn.GENERATING, Turn.TRAINING): (Release((*CACHES, "weights")), Trainer.UNPARK),
    (Turn.GENERATING, Turn.HANDOVER): (Release(CACHES), Trainer.UNPARK),
    (Turn.TRAINING, Turn.HANDOVER): (Trainer.TRIM, Restore(("weights",))),
    (Turn.HANDOVER, Turn.GENERATING): (Trainer.PARK, Restore(CACHES)),
}


class Turns:
    """One object a rank; `take` is called by all ranks in the same order.

    It begins with the engines' turn: the trainer is parked at once, and they may start when every rank has come so far.

    Args:
        memory: on rank 0.
        timeout_s: how long one side waits for the other.
    """

    def __init__(
        self, control: Control, backend: PolicyBackend, memory: EngineMemory | None, *, timeout_s: float
    ) -> None:
        self._control, self._backend, self._memory, self._timeout_s = control, backend, memory, timeout_s
        self.turn = Turn.GENERATING
        backend.park()

    def take(self, turn: Turn) -> None:
        """Make it `turn`; nothing moves where it is already.

        Raises:
            ValueError: engines would generate with weights that are gone, as nothing was published: a defect of ours.
        """
        if turn is self.turn:
            return
        self._pass_on(turn)
        if turn is Turn.HANDOVER and not self._anyone():
            self._pass_on(Turn.GENERATING)      # engines start again, where the trainer is not in their way
            self._pass_on(Turn.HANDOVER)        # ... or none does, as the publication will say

    def _pass_on(self, turn: Turn) -> None:
        if (self.turn, turn) not in MOVES:
            raise ValueError(f"{turn.value} cannot follow {self.turn.value}")
        for move in MOVES[self.turn, turn]:
            self._make(move)
        self.turn = turn

    def _anyone(self) -> bool:
        """Whether there is an engine to hand over to; every rank learns it."""
        answer = self._control.decide(
            "whether an engine runs", lambda: str(self._engines.anyone()), timeout_s=self._timeout_s
        )
        return answer == str(True)

    def _make(self, move: Move) -> None:
        """Rank 0 assembles the others before it lets an engine take what they give back."""
        match move:
            case Release(tags):
                what = f"the engines to release {' and '.join(tags)}"
                self._control.main(what, lambda: self._engines.release(tags), timeout_s=self._timeout_s)
            case Restore(tags):
                what = f"the engines to restore {' and '.join(tags)}"
                self._control.main(what, lambda: self._engines.restore(tags), timeout_s=self._timeout_s)
            case Trainer.UNPARK:
                self._backend.unpark()
            case Trainer.PARK:
                self._backend.park()
                self._control.assemble("parking the trainer", timeout_s=self._timeout_s)
            case Trainer.TRIM:
                self._backend.trim()
                self._control.assemble("trimming the trainer", timeout_s=self._timeout_s)

    @property
    def _engines(self) -> EngineMemory:
        assert self._memory is not None, "only rank 0 reaches the engines"
        return self._memory
