"""The seam between a publication and the transports that carry its bytes.

A transport has two halves: a `Transport` on the engines' event loop, and a
`rlcore.interfaces.BucketSender` on each rank of the trainer that its `orders` name. It is chosen
once for a run. The methods of the engines' half run one at a time, in this order:

    open(engines, buckets)  once a transaction; every engine is paused and has its update open
    orders()                the orders for the ranks
    join(answers)           if the orders say so: the ranks have opened a rendezvous for engines
    send(index, packed)     for each bucket, always in the same order, as the ranks begin to send it
    stop()                  after a failure: the last buckets that the ranks still send
    complete(result)        returns when every engine holds all buckets; `end_update` comes next
    give_up()               instead, after a failure: returns when no engine takes a bucket any more
    close()                 at the end of the run

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
from rlcore.interfaces import BucketSender, Orders, RankAddress
from rlcore.weights import Bucket
from rollout.asyncio_utils import within

# The most unanswered calls at one engine: it loads a bucket, receives the next one, and holds the
# call for the bucket after that.
CALLS_AT_ONCE = 3

# An `rlcore.interfaces.RolloutEngine` with the methods that the transport needs.
Engine = Any
Failures = dict[Engine, str]  # failed engine -> reason


class Transport(ABC):
    """Makes the engines take the buckets of a publication.

    The methods return the failures of single engines, and raise PublicationFailed for any other
    failure.

    Args:
        timeout_s: the limit for one bucket (`rollout.engine.update_timeout_s`).
    """

    name: str

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # in the current transaction
        self._engines: list[Engine] = []
        self.ranks: Sequence[RankAddress] = ()
        # Whether the next transaction has all engines; a missing one has left or is restarting.
        self.has_all_engines = False

    async def open(self, engines: Sequence[Engine], buckets: Sequence[Bucket]) -> Failures:
        """Begin a publication to `engines`."""
        self._engines = list(engines)
        return {}

    def orders(self) -> Orders:
        """Return the orders for the trainer's ranks; by default rank 0 alone sends."""
        return Orders(self.name, {0: None})

    async def join(self, answers: Mapping[int, Any]) -> Failures:
        """Have engines join the groups of the ranks that serve them.

        Args:
            answers: the results of `BucketSender.open`, by rank.
        """
        return {}

    async def send(self, index: int, packed: Mapping[int, Any]) -> Failures:
        """Have the engines take a bucket, which the ranks begin to send.

        Args:
            packed: the results of `BucketSender.pack`, by rank.

        Returns the engines that failed at this or an earlier bucket.
        """
        return {}

    def stop(self) -> Any:
        """Return the last buckets that the ranks still send after a failure; JSON-able."""
        return {}

    @abstractmethod
    async def complete(self, result: Any) -> Failures:
        """Return when every engine holds all buckets.

        Args:
            result: rank 0's result of `BucketSender.finish`.
        """

    async def give_up(self) -> Failures:
        """End a failed publication: wait until the remaining engines have taken their buckets."""
        return {}

    async def close(self) -> None:
        """End the transport."""
        self._engines = []


def gpus_of(engine: Engine) -> tuple[str, ...]:
    """The names of an engine's GPUs, one for each tensor-parallel rank; () if unknown."""
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

    Each call has `seconds`, plus `TRANSPORT_GRACE_S` for the engine's own deadline to pass first.
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
    """The text of an RlcoreError; the type and text of any other error."""
    return str(error) if isinstance(error, RlcoreError) else f"{type(error).__name__}: {error}"


class CopyTransport(Transport):
    """Engines in the trainer's own process take each bucket by copy."""

    name = "copy"

    async def send(self, index: int, packed: Mapping[int, Any]) -> Failures:
        """Have every engine copy the bucket."""
        answers = await ask(
            self._engines,
            "receive_bucket",
            lambda e: e.receive_bucket(index, packed[0]),
            self._timeout_s,
        )
        return answers.failed

    async def complete(self, result: Any) -> Failures:
        """Do nothing: `send` has waited for the engines."""
        return {}


class CopySender(BucketSender):
    """Passes the bucket itself to the engines of its own process."""

    def pack(self, bucket: Bucket, flat: Tensor) -> Tensor:
        """Return the bytes."""
        return flat
