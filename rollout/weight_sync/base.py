"""How the bytes of one publication reach the engines: the seam between the transaction
(rollout/weight_sync/publication.py) and its transports.

A transport is chosen once for a run. Its methods run on the engines' event loop, one at a time, in
this order:

    open(engines, buckets)      once a transaction; every engine is paused and has its update open
    send(bucket, flat)          each bucket, in the one static order
    complete()                  when it returns, every engine holds all of them; `end_update` comes next
    close()                     connections are dropped, at the end of the run; what a failure left `open` drops

Nothing here retries. An engine that fails is named in the answer; the transaction puts it out and
runs again with the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from rlcore.errors import RlcoreError
from rlcore.weights import Bucket
from rollout.asyncio_utils import within

GRACE_S = 10.0  # an engine keeps its own deadlines, ours come a little later

# an `rlcore.interfaces.RolloutEngine` with the verbs that the transport at hand needs
Engine = Any
Failures = dict[Engine, str]  # who did not do its part, and why


class Transport(Protocol):
    """Raises PublicationFailed where it breaks by no engine's fault; an engine's fault is told in
    the answer.
    """

    name: str

    async def open(self, engines: Sequence[Engine], buckets: Sequence[Bucket]) -> Failures: ...

    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        """`flat`: uint8 [num_bytes] on the trainer's device; it stays as it is until this returns."""
        ...

    async def complete(self) -> Failures: ...

    async def close(self) -> None: ...


@dataclass
class Answers:
    """What each engine said: a result, or what went wrong."""

    results: dict[Engine, Any] = field(default_factory=dict)
    failed: Failures = field(default_factory=dict)


async def ask(
    engines: Sequence[Engine], what: str, call: Callable[[Any], Awaitable[Any]], seconds: float
) -> Answers:
    """`call(engine)` for every engine at once; each has `seconds`, and a little grace for its own
    deadline to speak first.
    """
    answers = Answers()

    async def one(engine: Engine) -> None:
        late = f"engine {engine.name} did not answer {what} within {seconds:g} s"
        work = within(seconds + GRACE_S, call(engine), lambda: late)
        outcomes: Any = await asyncio.gather(work, return_exceptions=True)
        [outcome] = outcomes
        if isinstance(outcome, BaseException):
            answers.failed[engine] = describe(outcome)
        else:
            answers.results[engine] = outcome

    await asyncio.gather(*(one(engine) for engine in engines))
    return answers


def describe(error: BaseException) -> str:
    return str(error) if isinstance(error, RlcoreError) else f"{type(error).__name__}: {error}"
