"""Carries the calls of rank 0's client to the service actor."""

from __future__ import annotations

from typing import Any

from rlcore.launch.ray.calls import answer, get, get_when_up


class ActorChannel:
    """Implements `rlcore.launch.service.channel.Channel` over a Ray handle."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def send(self, part: str, *arguments: Any) -> Any:
        """Implements the protocol."""
        return getattr(self._actor, part).remote(*arguments)

    def get(self, call: Any, *, limit_s: float, what: str, key: str) -> Any:
        """Implements the protocol."""
        return get(call, limit_s=limit_s, what=what, key=key)

    async def answer(self, call: Any, *, what: str) -> Any:
        """Implements the protocol."""
        return await answer(call, what=what)

    def open(self, *, greedy_baseline: bool, limit_s: float, what: str, key: str) -> Any:
        """Implements the protocol: Ray may be starting the actor again."""
        return get_when_up(
            lambda: self._actor.open.remote(greedy_baseline=greedy_baseline),
            limit_s=limit_s,
            what=what,
            key=key,
        )
