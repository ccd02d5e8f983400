"""Repeats work: continues aborted responses from their tokens, and retries failed rollouts.

A publication with `rollout.on_update: abort` aborts the responses in flight, and so may other
clients of an engine. Aborted responses are requested again with their tokens as a prefix until they
end regularly, so a workflow sees whole completions.

    aborted     a b c           made by version 4
    the rest          d e       made by version 5 from prompt a b c, with max_new_tokens - 3
    whole       a b c d e       versions 4 4 4 5 5; each token has the log-prob of its drawing

Each try of a rollout has a deadline. A try calls the workflow again with the same address (seed,
draw, index), so it makes the same tokens. Answers of engines are kept between tries, so the same
requests get the same answers; in lock-step a failure leaves the batches of an engine unchanged.

A failure concerns one rollout alone: an exception of the workflow, a time-out, an invalid return
value. Three errors are no such failure: UserError (the configuration is wrong), an engine failure
that the dispatcher could not recover from, and an aborted turn, whose draw is made again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Hashable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.data.generation import (
    Completion,
    Generate,
    GenerateRequest,
    Prefix,
    SamplingParams,
    StopStrings,
)
from rlcore.data.sample import Sample, SamplingMasks, VersionSpan, join_experts
from rlcore.deadlines import CANCEL_S, MAX_RETRY_S, RETRY_S
from rlcore.errors import DataError, RlcoreError, RolloutFailed, UserError
from rlcore.import_paths import location_of
from rollout.failures import Failure
from rollout.plugins import failure_of, task_location

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

# limit of consecutive aborts of a request before any of its responses has a token
MAX_WITHOUT_TOKENS = 8
MAX_WARNINGS = 20  # code locations whose first failure is logged; all failures are counted
CLOCK_S = 0.05  # polling interval of a clock that has nearly run out and stands still


class PartialRollouts:
    """Completes aborted responses, also at stop strings that an abort has cut, and counts them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # continued responses
        self.resumed_responses = 0
        # tokens of continued responses that did not have to be made again
        self.resumed_tokens = 0

    async def whole(self, generate: Generate, request: GenerateRequest) -> list[Completion]:
        """The whole completions of `request`.

        A completion says "abort" only if engines abort it repeatedly without a new token.
        """
        if request.prefixes:
            raise ValueError(
                "a workflow gets whole responses; leave GenerateRequest.prefixes empty"
            )
        found = [
            self._with_final_reason(request.sampling, part) for part in await generate(request)
        ]
        without_tokens = 0
        while without_tokens < MAX_WITHOUT_TOKENS and (
            aborted := [i for i, one in enumerate(found) if one.finish_reason == "abort"]
        ):
            rest = await generate(
                request.continued([Prefix(request.samples[i], found[i].tokens) for i in aborted])
            )
            for i, part in zip(aborted, rest, strict=True):
                if len(part.tokens):
                    self.resumed_responses += 1
                    self.resumed_tokens += len(found[i].tokens)
                found[i] = self._with_final_reason(
                    request.sampling, self._joined(request, found[i], part)
                )
            without_tokens = 0 if any(len(part.tokens) for part in rest) else without_tokens + 1
        return found

    def _with_final_reason(self, sampling: SamplingParams, found: Completion) -> Completion:
        """Set the real finish reason if the last token before the abort ended the response.

        SGLang checks that only after the abort.
        """
        made = len(found.tokens)
        if found.finish_reason != "abort" or not made:
            return found
        if int(found.tokens[-1]) in sampling.stop_token_ids or self._first_stop(
            sampling, found.tokens, made - 1
        ):
            return replace(found, finish_reason="stop")
        return replace(found, finish_reason="length") if made == sampling.max_new_tokens else found

    def _joined(self, request: GenerateRequest, head: Completion, tail: Completion) -> Completion:
        """Join both parts, and end the result at a stop string that begins in the head.

        An engine looks for stop strings only in the tokens that it makes.
        """
        whole = join(head, tail)
        end = self._first_stop(request.sampling, whole.tokens, len(head.tokens))
        return whole if end is None else shorten(whole, end, prompt=len(request.prompt))

    def _first_stop(
        self, sampling: SamplingParams, tokens: NDArray[np.int32], seam: int
    ) -> int | None:
        """The smallest token count above `seam` whose text ends in a stop string begun before."""
        if not sampling.stop:
            return None
        strings = StopStrings(sampling.stop, self._tokenizer)
        for end in range(seam + 1, min(seam + strings.window, len(tokens)) + 1):
            if strings.hit(tokens[max(0, end - strings.window) : end].tolist()):
                return end
        return None


def join(head: Completion, tail: Completion) -> Completion:
    """Join both parts as one completion.

    If a token's experts are known twice, keep those used when its successor was first drawn.
    """
    size = len(head.tokens)
    spans = list(head.versions)
    for span in tail.versions:
        start = span.start + size
        if spans and spans[-1].version == span.version:
            start = spans.pop().start
        spans.append(VersionSpan(span.version, start, span.end + size))
    sets = [part.sampling_mask for part in (head, tail) if part.sampling_mask is not None]
    routed = [part.routed_experts for part in (head, tail) if part.routed_experts is not None]
    drafts = [part.drafts for part in (head, tail) if part.drafts is not None]
    return Completion(
        tokens=np.concatenate([head.tokens, tail.tokens]),
        logprobs=np.concatenate([head.logprobs, tail.logprobs]),
        finish_reason=tail.finish_reason,
        versions=tuple(spans),
        sampling_mask=SamplingMasks.joined(sets) if sets else None,
        routed_experts=join_experts(routed) if routed else None,
        cached_tokens=head.cached_tokens,
        drafts=sum(drafts[1:], drafts[0]) if drafts else None,
    )


def shorten(whole: Completion, length: int, *, prompt: int) -> Completion:
    """The first `length` tokens, ended by a stop string. `prompt`: length of the prompt."""
    sets = whole.sampling_mask
    if sets is not None:
        counts = sets.counts[:length]
        sets = SamplingMasks(sets.tokens[: counts.sum()], counts)
    routed = whole.routed_experts
    return replace(
        whole,
        tokens=whole.tokens[:length],
        logprobs=whole.logprobs[:length],
        finish_reason="stop",
        versions=tuple(
            VersionSpan(s.version, s.start, min(s.end, length))
            for s in whole.versions
            if s.start < length
        ),
        sampling_mask=sets,
        routed_experts=None if routed is None else routed[: prompt + length - 1],
    )


Make = Callable[[Generate], Awaitable[Any]]
Stage = Literal["start", "generation", "workflow", "reward", "done"]


class GivenUp(Exception):
    """The last try of a rollout failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Aborted(GivenUp):
    """A rollout failed after an engine aborted one of its turns."""


class Attempts:
    """Makes the rollouts of a workflow, each in up to 1 + `retries` tries."""

    def __init__(self, settings: WorkflowConfig, partial: PartialRollouts) -> None:
        self._name = settings.name
        self._timeout_s = settings.timeout_s
        self._retries = settings.retries
        self.partial = partial
        # number of failed tries by kind of failure
        self.failed: Counter[str] = Counter()
        # causes of failures that were logged already
        self._known: set[Hashable] = set()

    async def run(
        self,
        make: Make,
        generate: Generate,
        check: Callable[[Any, Container[int]], list[Sample]],
        *,
        where: str,
        of: object,
        enter: Callable[[Stage], None] = lambda stage: None,
        withdraw: Callable[[], None] = lambda: None,
    ) -> list[Sample]:
        """The samples of the first successful try.

        Args:
            make: calls the workflow with the function that generates completions.
            check: validates the result, given the versions of the tokens that the workflow got;
                raises RolloutFailed if it is no list of samples.
            where: prompt and draw, for messages.
            of: the workflow; its location is named if the failing line is unknown.
            enter: is called when the workflow begins and ends to wait for engines.
            withdraw: cancels requests that a try left behind.

        Raises:
            GivenUp: all tries failed.
            Aborted: a try failed after an engine aborted one of its turns.
            RlcoreError: an engine failed, or the workflow reports a wrong configuration.
        """
        answers: dict[Hashable, list[Completion]] | None = {} if self._retries else None
        versions: set[int] = set()
        pause = RETRY_S
        for retries_left in range(self._retries, -1, -1):
            ask = partial(self.partial.whole, generate)
            attempt = _Attempt(ask, answers, versions, enter)
            found: list[Sample] | RolloutFailed
            try:
                found = check(await self._result(make, attempt), versions)
            except RolloutFailed as error:
                found = error
            finally:
                attempt.ended = True
                withdraw()
            # an engine's error counts, even if the workflow handled it
            if attempt.engine_error is not None:
                raise attempt.engine_error
            if isinstance(found, list):
                # repeat the draw, although the workflow took the aborted turn for a whole one
                for sample in found if attempt.aborted else ():
                    sample.finish_reason = "abort"
                return found
            place = found.place or location_of(of)
            failure = Failure(found.kind, f"workflow {self._name}", where, found.message, place)
            if attempt.aborted:
                raise Aborted(failure) from found
            self._count_failure(failure, found, retries_left)
            if not retries_left:
                raise GivenUp(failure) from found
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_S)
        raise AssertionError("the last try returns or raises")

    async def _result(self, make: Make, attempt: _Attempt) -> Any:
        """The workflow's result. Its errors become RolloutFailed; others propagate."""
        task = asyncio.ensure_future(_call(make, attempt.generate))
        # retrieve its exception, which asyncio would log otherwise
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            while not task.done() and (left := self._timeout_s - attempt.seconds()) > 0:
                await asyncio.wait({task}, timeout=max(left, CLOCK_S))
            if not task.done():
                raise RolloutFailed(
                    "timeout",
                    f"it took more than {self._timeout_s:g} s (rollout.workflow.timeout_s)",
                    task_location(task),
                )
        finally:
            # too late, or the group is given up: end the try
            if not task.done():
                # requests of a try that resists its cancellation are refused
                attempt.ended = True
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_S)
        if task.cancelled():
            raise RolloutFailed("error", "it was cancelled from within")
        return task.result()

    def _count_failure(self, failure: Failure, error: RolloutFailed, retries_left: int) -> None:
        """Count a failure, and log the first one from each code location."""
        self.failed[failure.kind] += 1
        if failure.alike in self._known or len(self._known) == MAX_WARNINGS:
            return
        self._known.add(failure.alike)
        logger.warning(
            "%s; %s; more failures of this kind are only counted",
            failure,
            f"{retries_left} tries are left" if retries_left else "its group is given up",
            # log the traceback of the user's own exception
            exc_info=error.__cause__,
        )


class _Attempt:
    """One try: forwards its requests to engines, or replays earlier answers."""

    def __init__(
        self,
        generate: Generate,
        answers: dict[Hashable, list[Completion]] | None,
        versions: set[int],
        enter: Callable[[Stage], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        # seconds up to `_since` without a pending engine request
        self._seconds = 0.0
        # number of pending requests
        self._waiting = 0
        self.ended = False
        # whether an engine aborted at least one turn
        self.aborted = False
        self.engine_error: RlcoreError | None = None
        # versions that made a token of an answer of this try and earlier ones
        self._versions = versions
        self._generate = generate
        # answers of this try and earlier ones; None: keep none
        self._answers = answers
        self._enter = enter

    def seconds(self) -> float:
        """Seconds so far without a pending engine request."""
        return self._seconds + (0.0 if self._waiting else self._loop.time() - self._since)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """The completions of a request. Time spent here does not count as the workflow's."""
        if self.ended:
            raise RolloutFailed("timeout", "this try of the rollout has ended")
        # everything that determines the answer to a request; its id names the policy
        prompt = hashlib.blake2b(request.prompt.tobytes(), digest_size=16).digest()
        key = (request.rid, request.n, request.sampling, prompt)
        found = None if self._answers is None else self._answers.get(key)
        if found is None:
            found = await self._ask(request)
            if any(completion.finish_reason == "abort" for completion in found):
                self.aborted = True
            elif self._answers is not None:
                self._answers[key] = found
        self._versions.update(span.version for one in found for span in one.versions)
        return found

    async def _ask(self, request: GenerateRequest) -> list[Completion]:
        self._seconds = self.seconds()
        self._waiting += 1
        self._enter("generation")
        try:
            found = await self._generate(request)
            self._enter("workflow")
            return found
        except UserError:
            # the request is wrong; no engine has failed
            raise
        except RlcoreError as error:
            if not self.ended:
                self.engine_error = self.engine_error or error
            raise
        finally:
            self._waiting -= 1
            self._since = self._loop.time()


async def _call(make: Make, generate: Generate) -> Any:
    """Call the workflow; turn its own exceptions into RolloutFailed.

    SystemExit must be caught inside the task: asyncio would let it out of the event loop.
    """
    try:
        return await make(generate)
    except DataError as error:
        # for example text of a tool result that the tokenizer cannot encode
        raise failure_of(error) from error
    except (RolloutFailed, UserError):
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise failure_of(error) from error
