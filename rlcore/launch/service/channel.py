"""The seam between rank 0's client of the rollout service and what carries its calls."""

from __future__ import annotations

from typing import Any, Protocol

from rlcore.errors import PartLost


class ServiceLost(PartLost):
    """The service's process or its node died; its replacement has no state."""


class Channel(Protocol):
    """Carries calls to the process of the service. Any thread may use it."""

    def send(self, part: str, *arguments: Any) -> Any:
        """Begin a call of a method of the host, and return it; never waits for an answer."""

    def get(self, call: Any, *, limit_s: float, what: str, key: str) -> Any:
        """Wait for the result of a call.

        Args:
            what: names the call in messages.
            key: the configuration key that sets the limit.

        Raises:
            DeadlineExceeded: after `limit_s`.
            ServiceLost: the service's process died.
            RlcoreError: what the call itself raised.
        """

    async def answer(self, call: Any, *, what: str) -> Any:
        """As `get`, without a limit of its own."""

    def open(self, *, greedy_baseline: bool, limit_s: float, what: str, key: str) -> Any:
        """Call `open` of the host, of a new process where the one before has died."""
