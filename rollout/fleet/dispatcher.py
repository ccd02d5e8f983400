"""Sending requests to engines, with a deadline for each, and again when an engine fails.

A request has one future, its caller's. When its engine fails, a later answer of that engine is
dropped and the request goes to another engine (or the same, restarted), at most
`rollout.engine.retries` times. Each request is therefore answered exactly once.

An overdue request is aborted at its engine, which stays in service: it may be slow, or full. The
answer has the tokens made so far, and the caller continues from them. Without an answer the request
counts as failed and is sent again. The fleet decides by its progress whether an engine hangs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any

from rlcore.config.sections.rollout import EngineConfig
from rlcore.data.generation import Completion, Drafts, Generate, GenerateRequest
from rlcore.deadlines import ABORT_S, REQUEST_S
from rlcore.errors import EngineFailed, EngineHangs, InvalidAnswer, RlcoreError, RunFailed
from rlcore.timeline.recorder import RECORDER, TrackAllocator, group_key, now
from rollout.asyncio_utils import gather_or_cancel, within
from rollout.engines.checks import check_completion
from rollout.fleet.fleet import Fleet
from rollout.fleet.router import Lease
from rollout.weight_sync.base import describe

SHORT_WAIT_S = 0.001
logger = logging.getLogger(__name__)


class Dispatcher:
    """Spreads requests over the engines of a fleet and watches each call.

    Args:
        vocab_size: of the policy; an answer with other tokens is the engine's failure.
        limit_s: the time limit of a request, not counting pauses.
    """

    def __init__(
        self, fleet: Fleet, config: EngineConfig, *, vocab_size: int, limit_s: float = REQUEST_S
    ) -> None:
        self.fleet = fleet
        self.config = config
        self.vocab_size = vocab_size
        self.limit_s = limit_s
        # Requests so far that were sent again, and that passed their time limit.
        self.retried = 0
        self.overdue = 0
        # What draft models proposed in all valid answers so far.
        self.drafts = Drafts()
        self._aborts: set[asyncio.Task[None]] = set()
        # Timeline tracks of each engine.
        self._slots: dict[str, TrackAllocator] = {}
        # Calls in progress, and busy seconds up to the last idle moment.
        self._calls = 0
        self._busy_since = 0.0
        self._busy_s = 0.0

    async def one(self, request: GenerateRequest) -> list[Completion]:
        """Send a request to an engine that batches continuously.

        Prefers the engine that has the conversation, or in a first turn the prompt; otherwise picks
        the least loaded one.
        """
        prompt = (request.seed, request.draw)
        conversation = (*prompt, request.first_sample)
        keys = (conversation, prompt)
        [answer] = await self._answer([request], keys, room=self.config.max_in_flight)
        return answer

    async def batch(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """Send requests in calls of at most `max_batch` sequences, request i in share i mod n of n.

        The calls depend only on the requests, not on which engines are alive. So do the results of
        an engine that decodes call by call.
        """
        n = len(self.fleet.members)
        results: list[list[Completion]] = [[] for _ in requests]

        async def serve(share: int) -> None:
            calls: list[list[int]] = []
            size = 0
            for i in range(share, len(requests), n):
                if not calls or size + requests[i].n > self.config.max_batch:
                    calls.append([])
                    size = 0
                calls[-1].append(i)
                size += requests[i].n
            for call in calls:
                asked = [requests[i] for i in call]
                for i, made in zip(call, await self._answer(asked, [("share", share)], room=1)):
                    results[i] = made

        await gather_or_cancel(*(serve(share) for share in range(min(n, len(requests)))))
        return results

    async def _answer(
        self, requests: Sequence[GenerateRequest], keys: Sequence[Hashable], *, room: int
    ) -> list[list[Completion]]:
        """The answer of the first engine that does not fail.

        Raises:
            UserError: a request is invalid; no other engine is asked.
            EngineFailed: the last of `retries` + 1 engines failed.
            NoEngineLeft: no engine can be asked.
        """
        avoid = None
        for attempts_left in range(self.config.retries, -1, -1):
            asked = now()
            lease = await self.fleet.router.lease(*keys, room=room, avoid=avoid)
            lease.requests = requests
            try:
                if RECORDER.enabled:
                    return await self._recorded_call(lease, now() - asked)
                return await self._call(lease)
            except EngineFailed as error:
                if not lease.overdue:
                    self.fleet.lost(lease, error)
                if isinstance(error, InvalidAnswer):
                    avoid = lease.member
                if not attempts_left:
                    raise
                self.retried += len(requests)
            finally:
                self.fleet.router.release(lease)
        raise AssertionError("the last attempt returns or raises")

    async def _recorded_call(self, lease: Lease, waited_s: float) -> list[list[Completion]]:
        """Make a call and record it in the timeline, in a slot of its engine."""
        requests = lease.requests
        group = f"engine {lease.member.name}"
        slots = self._slots.setdefault(group, TrackAllocator(group, "slot"))
        slot = slots.take()
        # The times of a lease that is lost before its call begins.
        lease.began = lease.ended = now()
        args: dict[str, Any] = {
            "groups": [group_key(request.seed, request.draw) for request in requests],
            "samples": [(request.first_sample, request.n) for request in requests],
            "turn": requests[0].turn,
            "prompt_tokens": sum(len(request.prompt) for request in requests),
            "waited_s": round(waited_s, 6),
            "waited_for": "room at an engine" if waited_s > SHORT_WAIT_S else "nothing",
        }
        try:
            answers = await self._call(lease)
            args["tokens"] = sum(len(made.tokens) for answer in answers for made in answer)
            return answers
        except BaseException as error:
            args["failed"] = type(error).__name__
            raise
        finally:
            RECORDER.add(slots.track(slot), "request", lease.began, lease.ended, **args)
            slots.give_back(slot)

    async def _call(self, lease: Lease) -> list[list[Completion]]:
        # The lease may be lost between its grant and this call.
        if lease.lost is not None:
            raise EngineFailed(lease.lost)
        engine = lease.member.engine
        requests = lease.requests
        # A task and a `wait` for each request would double the cost of this function.
        lease.caller = asyncio.current_task()
        assert lease.caller is not None
        lease.held_before_s = lease.member.held_s
        self._set_alarm(lease, self.limit_s)
        lease.began = now()
        if not self._calls:
            self._busy_since = lease.began
        self._calls += 1
        answers: list[list[Completion]] | None = None
        try:
            answers = await engine.generate(requests)
        except asyncio.CancelledError:
            # Undo our own cancellation; another one may be left.
            if not lease.cancelled or lease.caller.uncancel() > 0:
                raise
        except RlcoreError:
            # A lost lease explains the error, and is raised below.
            if lease.lost is None:
                raise
        except Exception as error:
            raise RunFailed(
                f"engine {engine.name} failed: {type(error).__name__}: {error}"
            ) from error
        finally:
            lease.ended = now()
            self._calls -= 1
            if not self._calls:
                self._busy_s += lease.ended - self._busy_since
            if lease.alarm is not None:
                lease.alarm.cancel()
            lease.caller = None
        if lease.lost is not None:
            raise EngineFailed(lease.lost)
        if answers is None:
            raise EngineHangs(
                f"engine {engine.name} did not answer {len(requests)} requests (the first:"
                f" {requests[0].rid}) within {self.limit_s:g} s (rollout.engine.request_timeout_s),"
                f" nor their abort within {ABORT_S:g} s"
            )
        lease.member.answers += 1
        self._check(engine.name, requests, answers)
        lease.member.invalid_answers = 0
        for completion in (one for completions in answers for one in completions):
            if completion.drafts is not None:
                self.drafts += completion.drafts
        return answers

    def _check(
        self,
        engine: str,
        requests: Sequence[GenerateRequest],
        answers: Sequence[Sequence[Completion]],
    ) -> None:
        """Raise InvalidAnswer for missing or invalid completions."""
        if [len(a) for a in answers] != [r.n for r in requests]:
            raise InvalidAnswer(
                f"engine {engine} returned {[len(a) for a in answers]} completions, expected"
                f" {[r.n for r in requests]}"
            )
        for request, completions in zip(requests, answers):
            for index, completion in enumerate(completions):
                try:
                    check_completion(completion, request, index, vocab_size=self.vocab_size)
                except (ValueError, TypeError, AttributeError) as error:
                    raise InvalidAnswer(
                        f"engine {engine} returned an invalid completion for request"
                        f" {request.rid}: {error}"
                    ) from error

    def _set_alarm(self, lease: Lease, seconds: float) -> None:
        lease.alarm = asyncio.get_running_loop().call_later(seconds, self._time_is_up, lease)

    def _time_is_up(self, lease: Lease) -> None:
        """Abort an overdue call, or extend its time by the pauses that it waited for."""
        held = lease.member.held_s - lease.held_before_s
        if held > 0:
            lease.held_before_s += held
            self._set_alarm(lease, held)
            return
        lease.overdue = True
        self.overdue += len(lease.requests)
        abort = asyncio.ensure_future(self._abort(lease))
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)
        lease.alarm = asyncio.get_running_loop().call_later(ABORT_S, lease.cancel_call)

    async def _abort(self, lease: Lease) -> None:
        engine = lease.member.engine
        logger.warning(
            "engine %s: %d requests (the first: %s) took more than %g s"
            " (rollout.engine.request_timeout_s) and are aborted",
            engine.name,
            len(lease.requests),
            lease.requests[0].rid,
            self.limit_s,
        )
        abort = engine.abort(lease.rids)
        try:
            await within(ABORT_S, abort, lambda: f"no answer within {ABORT_S:g} s")
        except Exception as error:  # noqa: BLE001 - recovery: the alarm cancels an unanswered call
            logger.warning("engine %s did not abort: %s", engine.name, describe(error))

    @property
    def busy_seconds(self) -> float:
        """Seconds so far in which any engine had work."""
        return self._busy_s + (now() - self._busy_since if self._calls else 0.0)

    @property
    def free_calls(self) -> int:
        """Calls that engines with continuous batching would take now, minus waiting calls."""
        return self.fleet.router.free(self.config.max_in_flight)

    def engines_of(self, seed: int, draws: Iterable[int]) -> dict[int, str]:
        """The engine that last answered each draw; unknown for batches and behind a router."""
        if self.config.router_url is not None:
            return {}
        found = {draw: self.fleet.router.home((seed, draw)) for draw in draws}
        return {draw: name for draw, name in found.items() if name is not None}


# --- whole batches --------------------------------------------------------------------------------


Flush = Callable[[Sequence[GenerateRequest]], Awaitable[list[list[Completion]]]]
WaitingCall = tuple[GenerateRequest, "asyncio.Future[list[Completion]]"]


class LockstepBatcher:
    """Collects the generate calls of concurrent workflows into one batch, once all workflows wait.

    The batch is sorted by address (draw, turn, first sample; ties by which workflow entered first).
    It never depends on which call arrived first, so a resumed run sees the same batches. The cost:
    in each round all workflows wait for the slowest one.
    """

    def __init__(self, flush: Flush) -> None:
        self._flush = flush
        # The waiting calls of every active workflow.
        self._workflows: dict[Hashable, list[WaitingCall]] = {}
        self._running: asyncio.Task[None] | None = None

    def enter(self, key: Hashable) -> Generate:
        """The `generate` of workflow `key`. All must have entered before the first runs."""
        if key in self._workflows:
            raise ValueError(f"{key} has entered already")
        self._workflows[key] = []

        async def generate(request: GenerateRequest) -> list[Completion]:
            future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
            self._workflows[key].append((request, future))
            self._recheck()
            return await future

        return generate

    def withdraw(self, key: Hashable) -> None:
        """Cancel the waiting calls of workflow `key`; it may make others."""
        calls = self._workflows.get(key, [])
        for _, future in calls:
            future.cancel()
        calls.clear()

    def leave(self, key: Hashable) -> None:
        """Remove workflow `key`, so that no batch waits for it any more. May be called twice."""
        self.withdraw(key)
        if self._workflows.pop(key, None) is not None:
            self._recheck()

    def _recheck(self) -> None:
        # Deferred by one iteration of the loop, so that concurrent calls of one workflow join one
        # batch.
        asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        if self._running is not None or not self._workflows or not all(self._workflows.values()):
            return
        batch = [call for calls in self._workflows.values() for call in calls]
        for calls in self._workflows.values():
            calls.clear()
        batch.sort(key=lambda call: (call[0].draw, call[0].turn, call[0].first_sample))
        self._running = asyncio.get_running_loop().create_task(self._serve(batch))

    async def _serve(self, batch: list[WaitingCall]) -> None:
        try:
            results = await self._flush([request for request, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - the error belongs to the calls that wait
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), completions in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(completions)
        finally:
            self._running = None
        self._recheck()

    async def close(self) -> None:
        """Cancel the running batch, if any."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
