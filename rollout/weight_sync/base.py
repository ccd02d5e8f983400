"""The seam between a publication (publication.py) and the transports that carry its bytes.

A transport is chosen once for a run. Its methods run on the engines' event loop, one at a time, in
this order:

    open(engines, buckets)  once a transaction; every engine is paused and has its update open
    meet(places)            if ranks other than rank 0 send: they have opened places for engines
    send(bucket, flat)      for each bucket, always in the same order
    send_called(bucket, flat)
                            instead, after a failure, for each bucket that is left
    complete()              returns when every engine holds all buckets; `end_update` comes next
    give_up()               instead, after a failure: returns when no engine takes a bucket any more
    close()                 drops the connections at the end of the run

After a failure the next `open` cleans up. No transport retries: it returns the engines that failed,
and the publication excludes them and runs again with the others.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlcore.deadlines import TRANSPORT_GRACE_S
from rlcore.errors import RlcoreError
from rlcore.interfaces import RankPlace
from rlcore.weights import Bucket
from rollout.asyncio_utils import within

# The calls at one engine that are not answered, at most: it loads a bucket, receives the next, and
# has the call of the one after that.
CALLS_AT_ONCE = 3

# an `rlcore.interfaces.RolloutEngine` with the methods that the transport needs
Engine = Any
Failures = dict[Engine, str]  # the engines that failed, and why


class Transport(ABC):
    """Carries the buckets of one publication after the other to the engines.

    The methods return the failures of single engines. They raise PublicationFailed for a failure
    that is no engine's.

    Args:
        timeout_s: for one bucket (`rollout.engine.update_timeout_s`).
    """

    name: str

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._engines: list[Engine] = []  # in the current transaction
        # the GPUs on which a rank of the trainer can make handles
        self.trainer_gpus: Sequence[str] = ()
        # where the trainer's ranks are, if others than rank 0 may send
        self.trainer_ranks: Sequence[RankPlace] = ()
        # whether the next transaction has all engines: another one has left, or is started again
        self.has_all_engines = False

    async def open(self, engines: Sequence[Engine], buckets: Sequence[Bucket]) -> Failures:
        """Begin a publication to `engines`."""
        self._engines = list(engines)
        return {}

    @abstractmethod
    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        """Send one bucket. `flat`, uint8 [num_bytes], does not change until this returns.

        Returns the engines that failed at this bucket or at one before it.
        """

    async def send_called(self, bucket: Bucket, flat: Tensor) -> Failures:
        """Send a bucket after a failure, to engines that were called for it before."""
        return {}

    @property
    def orders(self) -> Mapping[int, str]:
        """What the ranks that serve engines of this transaction beside rank 0 are told, by rank."""
        return {}

    async def meet(self, places: Mapping[int, str]) -> Failures:
        """Bring engines to the ranks that serve them.

        Args:
            places: what those ranks answered to `orders`.
        """
        return {}

    @property
    def stop_order(self) -> str:
        """What those ranks are told when an engine has failed, and no bucket follows."""
        return ""

    @property
    def by_handle(self) -> bool:
        """Whether the engines of this transaction take handles of memory on their own GPUs."""
        return False

    async def send_handles(self, bucket: Bucket, handles: Mapping[str, str]) -> Failures:
        """Send one bucket by its handles: of the memory on each engine's GPUs."""
        raise NotImplementedError(f"{self.name} sends bytes")

    async def complete(self) -> Failures:
        """Return when every engine holds all buckets: at once where `send` waits for that."""
        return {}

    async def give_up(self) -> Failures:
        """End a publication that failed: wait for what the engines that are left still take."""
        return {}

    async def close(self) -> None:
        """Drop all connections."""
        self._engines = []


def gpus_of(engine: Engine) -> tuple[str, ...]:
    """The names of an engine's GPUs, one a tensor-parallel rank; () where we do not know them."""
    return tuple(getattr(engine, "gpus", ()))


@dataclass
class Answers:
    """The result of each engine, or its error."""

    results: dict[Engine, Any] = field(default_factory=dict)
    failed: Failures = field(default_factory=dict)
    slowest: str = ""  # the engine that answered last


async def ask(
    engines: Sequence[Engine], what: str, call: Callable[[Any], Awaitable[Any]], seconds: float
) -> Answers:
    """Await `call(engine)` for all engines at once.

    Each has `seconds`, and `TRANSPORT_GRACE_S` more so that its own deadline passes first.
    """
    answers = Answers()

    async def one(engine: Engine) -> None:
        late = f"engine {engine.name} did not answer {what} within {seconds:g} s"
        work = within(seconds + TRANSPORT_GRACE_S, call(engine), lambda: late)
        outcomes: Any = await asyncio.gather(work, return_exceptions=True)
        [outcome] = outcomes
        answers.slowest = engine.name
        if isinstance(outcome, BaseException):
            answers.failed[engine] = describe(outcome)
        else:
            answers.results[engine] = outcome

    await asyncio.gather(*(one(engine) for engine in engines))
    return answers


def describe(error: BaseException) -> str:
    """The text of an error of ours; the kind and text of any other."""
    return str(error) if isinstance(error, RlcoreError) else f"{type(error).__name__}: {error}"


class CopyTransport(Transport):
    """Engines in the trainer's own process take each bucket by copy."""

    name = "copy"

    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        """Have every engine copy the bucket."""
        answers = await ask(
            self._engines,
            "receive_bucket",
            lambda e: e.receive_bucket(bucket.index, flat),
            self._timeout_s,
        )
        return answers.failed
