"""What rank 0 holds instead of a rollout service of its own: the seams of `rlcore.interfaces`, over calls of the service actor.

Weights do not go this way: rank 0 sends them itself, in its process group with each engine. Where the service died, the one
that Ray starts in its place is given the newest state that rank 0 has seen, and asks for the weights: what was drawn since
is drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import Config
from rlcore.data.sample import Sample
from rlcore.interfaces import MemoryTag, StepRollouts
from rlcore.launch.compose import OpenService, RolloutHandles, patience_with_engines
from rlcore.launch.process import Process
from rlcore.launch.ray.calls import ActorLost
from rlcore.launch.ray.members import RemoteParticipants
from rlcore.launch.ray.service_client import GRACE_S, ServiceClient
from rollout.asyncio_utils import LoopThread
from rollout.weight_sync.publication import WeightPublication

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def opener(actor: Any) -> OpenService:
    """Opens the service that is `actor` (a Ray handle), for rank 0."""

    def open_service(
        config: Config, process: Process, tokenizer: PreTrainedTokenizerBase, stack: ExitStack, *, greedy_baseline: bool
    ) -> RolloutHandles:
        line = ServiceClient(actor, config, greedy_baseline=greedy_baseline)
        opened = line.open()
        thread = LoopThread("publication")
        stack.callback(thread.close)
        sink = WeightPublication(config, RemoteParticipants(line), thread.loop, device=process.device)
        stack.callback(sink.close)
        return RolloutHandles(RemoteSource(line), sink, opened.num_prompts, opened.prompt_lengths, RemoteMemory(line))

    return open_service


class RemoteSource:
    """`rlcore.interfaces.RolloutSource`."""

    def __init__(self, line: ServiceClient) -> None:
        self._line = line
        rollout = line.config.rollout
        self._limit_s = rollout.timeout_s + GRACE_S

    def start(self) -> None:
        self._line.start()

    def next_step(self, step: int) -> StepRollouts | None:
        """None, too, where the service had to be made anew."""
        found: tuple[StepRollouts, Mapping[str, Any]] | None = self._work("next_step", step)
        if found is None:
            return None
        rollouts, self._line.state = found
        return rollouts

    def evaluate(self) -> tuple[dict[str, float], list[Sample]] | None:
        scored: tuple[dict[str, float], list[Sample]] | None = self._work("source", "evaluate")
        return scored

    def published(self, step: int, version: int, incarnation: int) -> None:
        self._line.published = (step, version, incarnation)
        self._recovered(lambda: self._line.ask("source", "published", step, version, incarnation))

    def snapshot(self) -> dict[str, Any]:
        """That of the newest hand-over, which is here already."""
        return dict(self._line.state or self._line.ask("source", "snapshot"))

    def restore(self, state: Mapping[str, Any] | None) -> None:
        self._line.state = state
        self._recovered(self._line.restore)

    def keep_ledger(self, path: Path) -> None:
        self._line.ledger = path.absolute()
        self._recovered(self._line.keep_ledger)

    def close(self) -> None:
        """The service belongs to the driver."""

    def _work(self, part: str, *arguments: Any) -> Any:
        """What takes as long as generation does; None where the service is another one now."""
        try:
            return self._line.ask(part, *arguments, limit_s=self._limit_s, key="rollout.timeout_s")
        except ActorLost:
            self._line.revive()
            return None

    def _recovered(self, say: Callable[[], Any]) -> None:
        try:
            say()
        except ActorLost:
            self._line.revive()     # which says it


class RemoteMemory:
    """`rlcore.interfaces.EngineMemory`."""

    def __init__(self, line: ServiceClient) -> None:
        self._line = line
        self._limit_s = patience_with_engines(line.config) + GRACE_S

    def release(self, tags: Sequence[MemoryTag]) -> None:
        self._ask("release", tags)

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        self._ask("restore", tags)

    def anyone(self) -> bool:
        return bool(self._ask("anyone"))

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._line.ask("memory", method, *arguments, limit_s=self._limit_s, key="rollout.engine.update_timeout_s")
