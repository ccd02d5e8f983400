"""Compares what engines received over a process group with what was sent (digests.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import Tensor

from rlcore.weights import Bucket
from rollout.weight_sync.base import Engine, Failures, ask
from rollout.weight_sync.digests import digest, new_order

NOT_LOADED = "not loaded: "  # of SGLang's ranks, in place of a digest, before the reason
Wanted = Literal["auto", "sha256", "none"]  # of `rollout.engine.bucket_digests`


def digest_kind(wanted: Wanted, engine: Any, backend: str) -> str | None:
    """The kind of digest for an engine; None where it computes none, or none is wanted."""
    if wanted == "none" or not getattr(engine, "digests_buckets", False):
        return None
    if wanted == "sha256":
        return wanted
    return "linear" if backend == "nccl" else "xxh3"


class SentDigests:
    """The digests of the buckets of one publication, by kind."""

    def __init__(self) -> None:
        self._sent: dict[str, dict[int, str]] = {}

    @staticmethod
    def orders(kinds: Iterable[str | None]) -> dict[str | None, str | None]:
        """Make an order for the next bucket for each kind, and none for None."""
        return {kind: kind and new_order(kind) for kind in kinds}

    async def add(
        self, bucket: Bucket, flat: Tensor, orders: Mapping[str | None, str | None]
    ) -> None:
        """Compute the digests of a bucket, in threads, while it is sent."""
        for kind, order in orders.items():
            if kind and order:
                found = await asyncio.to_thread(digest, order, flat)
                self._sent.setdefault(kind, {})[bucket.index] = found

    async def compare(self, kinds: Mapping[Engine, str | None], timeout_s: float) -> Failures:
        """Ask engines what they received. Returns those that received something else, and why."""
        asked = [engine for engine, kind in kinds.items() if kind]
        answers = await ask(asked, "bucket_digests", lambda e: e.bucket_digests(), timeout_s)
        found = {
            engine: self.mismatch(str(kinds[engine]), received)
            for engine, received in answers.results.items()
        }
        wrong = {engine: f"engine {engine.name}: {why}" for engine, why in found.items() if why}
        return answers.failed | wrong

    def mismatch(self, kind: str, received: Mapping[int, str]) -> str | None:
        """Compare with the digests of an engine. Returns the difference, or None."""
        sent = self._sent.get(kind, {})
        wrong = [index for index, one in sorted(sent.items()) if received.get(index) != one]
        if not wrong:
            return None
        got = received.get(wrong[0], "none")
        _, not_loaded, why = got.partition(NOT_LOADED)
        if not_loaded:
            return f"bucket {wrong[0]} was received, but one of its ranks did not load it: {why}"
        return (
            f"{len(wrong)} of {len(sent)} buckets did not arrive as they were sent, so something"
            f" between trainer and engine changes the weights (bucket {wrong[0]}: {kind} sent"
            f" {sent[wrong[0]][:12]}, received {got[:12]})"
        )
