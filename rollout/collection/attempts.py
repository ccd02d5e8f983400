"""Tries of a rollout, each with a deadline, and what counts as its failure.

A try calls the workflow anew, under the same address (seed, draw, index): so it makes the same
tokens. What engines answered in a try is kept for the next one, which gets the same answers to the
same requests; in lock-step no batch of an engine looks any different for a failure.

A failure is a matter of this rollout alone: an exception of the workflow, a time-out, nonsense in
place of samples. Not so UserError, which says that the configuration is wrong, an engine's failure
that the dispatcher could not heal, and a turn that an engine aborted: its draw is made again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.data.generation import Completion, Generate, GenerateRequest
from rlcore.data.sample import Sample
from rlcore.deadlines import CANCEL_S, MAX_RETRY_S, RETRY_S
from rlcore.errors import RlcoreError, RolloutFailed, UserError
from rollout.plugins import failure_of, place_of, place_of_task

logger = logging.getLogger(__name__)

MAX_WARNINGS = 20  # places whose first failure is logged; all are counted
CLOCK_S = 0.05  # between two looks at a clock that has nearly run out and stands

Make = Callable[[Generate], Awaitable[Any]]
"""Calls the workflow, which asks for completions by the given function."""


@dataclass(frozen=True)
class Failure:
    """Why a rollout was given up."""

    kind: str  # see `RolloutFailed`
    workflow: str
    where: str  # prompt and draw
    reason: str
    place: str  # ` (file:line in name)`, or empty

    def __str__(self) -> str:
        return f"workflow {self.workflow} failed on {self.where}: {self.reason}{self.place}"

    @property
    def alike(self) -> Hashable:
        """What failures with the same cause have in common."""
        return self.kind, self.place or self.reason


def commonest(failures: Iterable[Failure]) -> tuple[Failure, int]:
    """Return the first of the failures that occur most often, and how often they do."""
    found = list(failures)
    ((alike, count),) = Counter(failure.alike for failure in found).most_common(1)
    return next(failure for failure in found if failure.alike == alike), count


class GivenUp(Exception):
    """A rollout failed in its last try."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Aborted(GivenUp):
    """A rollout failed after an engine had given up one of its turns."""


class Attempts:
    """Makes the rollouts of a workflow, each in up to 1 + `retries` tries."""

    def __init__(self, settings: WorkflowConfig) -> None:
        self._name = settings.name
        self._timeout_s = settings.timeout_s
        self._retries = settings.retries
        self.failed: Counter[str] = Counter()  # tries so far, by the kind of their failure
        self._known: set[Hashable] = set()  # failures of which one was logged

    async def run(
        self,
        make: Make,
        generate: Generate,
        check: Callable[[Any], list[Sample]],
        *,
        of: object,
        where: str,
        withdraw: Callable[[], None] = lambda: None,
    ) -> list[Sample]:
        """Return the samples of the first try that does not fail.

        Args:
            check: passes samples on; raises RolloutFailed for anything else.
            of: the workflow; its place is named where the user's line is not known.
            where: prompt and draw, for messages.
            withdraw: takes back requests that a try left behind.

        Raises:
            GivenUp: all tries failed.
            Aborted: a try failed behind a turn that an engine aborted.
            RlcoreError: an engine failed, or the workflow says that the configuration is wrong.
        """
        answers: dict[Hashable, list[Completion]] = {}
        pause = RETRY_S
        for retries_left in range(self._retries, -1, -1):
            attempt = _Attempt(generate, answers if self._retries else None)
            found: list[Sample] | RolloutFailed
            try:
                found = check(await self._result(make, attempt))
            except RolloutFailed as error:
                found = error
            finally:
                attempt.ended = True
                withdraw()
            if attempt.engine_error is not None:  # whatever the workflow made of it
                raise attempt.engine_error
            if isinstance(found, list):
                return _aborted(found) if attempt.aborted else found
            place = found.place or place_of(of)
            failure = Failure(found.kind, self._name, where, found.message, place)
            if attempt.aborted:
                raise Aborted(failure) from found
            self._note(failure, found, retries_left)
            if not retries_left:
                raise GivenUp(failure) from found
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_S)
        raise AssertionError("the last try returns or raises")

    async def _result(self, make: Make, attempt: _Attempt) -> Any:
        """Return what the workflow returned. Raises RolloutFailed, or what is none of its own."""
        task = asyncio.ensure_future(_call(make, attempt.generate))
        try:
            while not task.done() and (left := self._timeout_s - attempt.clock.seconds()) > 0:
                await asyncio.wait({task}, timeout=max(left, CLOCK_S))
        except asyncio.CancelledError:  # the group is given up
            await _end(task, attempt)
            raise
        if not task.done():
            place = place_of_task(task)
            await _end(task, attempt)
            raise RolloutFailed(
                "timeout",
                f"it took more than {self._timeout_s:g} s (rollout.workflow.timeout_s)",
                place,
            )
        if task.cancelled():
            raise RolloutFailed("error", "it was cancelled from within")
        return task.result()

    def _note(self, failure: Failure, error: RolloutFailed, retries_left: int) -> None:
        """Count a failure, and log the first of each place."""
        self.failed[failure.kind] += 1
        if failure.alike in self._known or len(self._known) == MAX_WARNINGS:
            return
        self._known.add(failure.alike)
        logger.warning(
            "%s; %s; more failures of this kind are only counted",
            failure,
            f"{retries_left} tries are left" if retries_left else "its group is given up",
            exc_info=error.__cause__,  # the user's own exception keeps its traceback
        )


class _Attempt:
    """One try: passes its requests on, or answers them as they were answered before."""

    def __init__(
        self, generate: Generate, answers: dict[Hashable, list[Completion]] | None
    ) -> None:
        self.clock = _Clock()
        self.ended = False
        self.aborted = False  # by an engine, a turn at least
        self.engine_error: RlcoreError | None = None
        self._generate = generate
        self._answers = answers  # of this try and those before; None keeps none

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return the completions of a request. Time spent here is not the workflow's."""
        if self.ended:
            raise RolloutFailed("timeout", "this try of the rollout has ended")
        key = None if self._answers is None else _address(request)
        if self._answers is not None and key in self._answers:
            return self._answers[key]
        self.clock.stop()
        try:
            found = await self._generate(request)
        except RlcoreError as error:
            if not self.ended:
                self.engine_error = self.engine_error or error
            raise
        finally:
            self.clock.go_on()
        if any(completion.finish_reason == "abort" for completion in found):
            self.aborted = True
        elif self._answers is not None:
            self._answers[key] = found
        return found


class _Clock:
    """Counts the seconds in which no engine was waited for."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._counted = 0.0
        self._stops = 0  # requests that are being answered

    def stop(self) -> None:
        self._counted = self.seconds()
        self._stops += 1

    def go_on(self) -> None:
        self._stops -= 1
        self._since = self._loop.time()

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._counted + (0.0 if self._stops else self._loop.time() - self._since)


async def _call(make: Make, generate: Generate) -> Any:
    """Call the workflow; an exception of its own becomes RolloutFailed.

    That happens in here, since asyncio would let SystemExit out of a task and so out of the loop.
    """
    try:
        return await make(generate)
    except (RolloutFailed, UserError):
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise failure_of(error) from error


def _address(request: GenerateRequest) -> Hashable:
    """Return what the answer to a request depends on."""
    prompt = hashlib.blake2b(request.prompt.tobytes(), digest_size=16).digest()
    return request.rid, request.n, request.sampling, prompt


def _aborted(samples: list[Sample]) -> list[Sample]:
    """Have the draw made again, though the workflow took the turn that was cut for whole."""
    for sample in samples:
        sample.finish_reason = "abort"
    return samples


async def _end(task: asyncio.Task[Any], attempt: _Attempt) -> None:
    """Cancel a try. One that goes on all the same gets no answer any more."""
    attempt.ended = True
    task.add_done_callback(_forget)
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_S)


def _forget(task: asyncio.Task[Any]) -> None:
    """Take the exception of a task that was given up, which asyncio would log."""
    if not task.cancelled():
        task.exception()
