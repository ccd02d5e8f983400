"""The rollout service in its process, as rank 0 uses it: samples, and the engines' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.config.derived import all_engines_timeout_s
from rlcore.data.batch import StepRollouts
from rlcore.data.generation import MemoryTag
from rlcore.data.sample import Sample
from rlcore.deadlines import SERVICE_GRACE_S
from rlcore.launch.service.client import ServiceClient
from rlcore.launch.service.process import ServiceLost


class RemoteSource:
    """Implements `rlcore.interfaces.RolloutSource`."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._limit_s = client.config.rollout.timeout_s + SERVICE_GRACE_S

    def start(self) -> None:
        """Start the service's engines and reward workers."""
        self._client.start()

    def next_step(self, step: int) -> StepRollouts | None:
        """Implements the protocol; None also where the service was replaced."""
        found: tuple[StepRollouts, Mapping[str, Any]] | None = self._work("next_step", step)
        if found is None:
            return None
        rollouts, state = found
        self._client.remember("restore", state)
        return rollouts

    def evaluate(
        self, sets: Sequence[str] | None = None
    ) -> tuple[dict[str, float], list[Sample]] | None:
        """Implements the protocol; None also where the service was replaced."""
        scored: tuple[dict[str, float], list[Sample]] | None
        scored = self._work("source", "evaluate", sets)
        return scored

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Implements the protocol."""
        self._client.replay("published", step, version, incarnation)

    def snapshot(self) -> dict[str, Any]:
        """The state of the newest hand-over, which came with it."""
        return dict(self._client.state or self._client.call("source", "snapshot"))

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Implements the protocol."""
        self._client.replay("restore", state)

    def keep_ledger(self, path: Path) -> None:
        """Implements the protocol."""
        self._client.replay("keep_ledger", path.absolute())

    def close(self) -> None:
        """Do nothing: whoever made its process closes the service."""

    def _work(self, part: str, *arguments: Any) -> Any:
        """Make a call that takes as long as generation; None where the service was replaced."""
        try:
            return self._client.call(
                part, *arguments, limit_s=self._limit_s, key="rollout.timeout_s"
            )
        except ServiceLost:
            self._client.reopen()
            return None


class RemoteMemory:
    """Implements `rlcore.interfaces.EngineMemory`."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._limit_s = all_engines_timeout_s(client.config) + SERVICE_GRACE_S

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Implements the protocol."""
        self._call("release", tags)

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        """Implements the protocol."""
        self._call("restore", tags)

    def any_running(self) -> bool:
        """Implements the protocol."""
        return bool(self._call("any_running"))

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._client.call(
            "memory",
            method,
            *arguments,
            limit_s=self._limit_s,
            key="rollout.engine.update_timeout_s",
        )
