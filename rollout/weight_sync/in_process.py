"""Engines in the trainer's own process take each bucket by copy."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlcore.weights import Bucket
from rollout.weight_sync.base import Engine, Failures, ask


class CopyTransport:
    """A `Transport` for embedded engines in this process."""

    name = "copy"

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._engines: list[Engine] = []

    async def open(self, engines: Sequence[Engine], buckets: Sequence[Bucket]) -> Failures:
        """Remember the engines."""
        self._engines = list(engines)
        return {}

    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        """Have every engine copy the bucket."""
        answers = await ask(
            self._engines,
            "receive_bucket",
            lambda e: e.receive_bucket(bucket.index, flat),
            self._timeout_s,
        )
        return answers.failed

    async def complete(self) -> Failures:
        """Do nothing: `send` returns when the bucket is in the model."""
        return {}

    async def close(self) -> None:
        """Forget the engines."""
        self._engines = []
