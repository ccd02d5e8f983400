"""The calls of one rollout's program: each is made once, however often it is asked for."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rlcore.data.messages import Message
from rlcore.deadlines import CANCEL_S
from rlcore.errors import ConfigError, DataError, ModelError, UserError
from rollout.conversation.conversation import Conversation
from rollout.conversation.parsing import as_json
from rollout.conversation.reply import Reply
from rollout.gateway.matching import Matcher, answered
from rollout.gateway.wire import Answer, ChatRequest, Refused

MODEL = "policy"  # the name of the model, whatever it is
OVER = "the rollout that this key belongs to is over"


@dataclass(slots=True)
class Call:
    """A request of the program, and its repetitions."""

    task: asyncio.Task[Answer]
    attempt: int  # the highest x-stainless-retry-count so far
    waiting: int = 0  # clients
    delivered: bool = False


@dataclass
class Session:
    """One rollout: its key, its calls, and the conversation that they make.

    Attributes:
        key: the API key that its program has.
        failed: done, with an error, once a call was lost for a reason that is not the program's. A
            rollout that lost a call is not trained on. Its result is None where an engine has given
            a turn up, and the draw is to be made again.
    """

    conversation: Conversation
    key: str
    held: Mapping[str, Any]  # see `wire.held_values`
    stops: tuple[str, ...]  # of the run
    failed: asyncio.Future[None]
    model_calls: int = 0
    repeated_calls: int = 0
    closed: bool = False
    _calls: dict[bytes, list[Call]] = field(default_factory=dict)  # by body
    _numbers: Iterator[int] = field(default_factory=count)  # of calls of tools

    def __post_init__(self) -> None:
        self._matcher = Matcher(self.conversation)

    @property
    def abandoned_calls(self) -> int:
        """Calls whose client went away and did not come back for the answer."""
        return sum(not call.delivered for calls in self._calls.values() for call in calls)

    async def answer(self, body: bytes, request: ChatRequest, attempt: int) -> Answer:
        """Return the turn of the model that the request asks for.

        A repeated request gets the answer of the first. If the client goes away, the turn is made
        nevertheless.

        Args:
            attempt: how often the client says that it has asked before.

        Raises:
            Refused: the request is at fault, or the rollout is over.
        """
        if self.closed:
            raise Refused(410, OVER, code="rollout_over")
        digest = hashlib.blake2b(body, digest_size=16).digest()
        same = self._calls.setdefault(digest, [])
        call = _first_of(same, attempt)
        if call is None:
            call = Call(asyncio.ensure_future(self._turn(request)), attempt)
            # its exception is taken: nobody may wait for it
            call.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            same.append(call)
        else:
            call.attempt = max(call.attempt, attempt)
            self.repeated_calls += 1
        call.waiting += 1
        try:
            answer = await asyncio.shield(call.task)
        except Refused:
            call.delivered = True
            raise
        except asyncio.CancelledError:
            if call.task.cancelled():
                raise Refused(410, OVER, code="rollout_over") from None
            raise  # the client is gone
        finally:
            call.waiting -= 1
        call.delivered = True
        return answer

    async def close(self, *, drain: bool) -> None:
        """Take no more calls, and end those in flight.

        Args:
            drain: wait for their turns, each of which has the deadline of its engine request: what
                the model writes belongs to the rollout, even if nobody reads it.
        """
        self.closed = True
        left = {c.task for calls in self._calls.values() for c in calls if not c.task.done()}
        while drain and left and not self.failed.done():
            awaited: set[asyncio.Future[Any]] = {*left, self.failed}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            left = {task for task in left if not task.done()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCEL_S)

    async def _turn(self, request: ChatRequest) -> Answer:
        """Find the branch that the request continues, and let the model take its turn."""
        try:
            state, point = await self._matcher.branch(request.messages, request.tools)
            conversation = state.conversation
            reply = await conversation.generate(request.limit, stop=request.stop)
        except DataError as error:  # messages that the chat template refuses, say
            raise Refused(400, str(error), param="messages") from error
        except Refused:
            raise
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, ConfigError | ModelError):
                # what no engine takes, as too many stop strings
                raise Refused(400, str(error)) from error
            raise self._failed_by(error) from error  # the rollout raises it
        if reply.finish_reason == "abort":
            if not self.failed.done():
                self.failed.set_result(None)
            raise Refused(500, "an engine has given the turn up, and the rollout with it")
        self.model_calls += 1
        calls = reply.calls if request.tool_choice == "auto" else ()
        conversation.measure("tool_calls", len(calls))
        conversation.measure("tool_errors", sum(bool(call.problem) for call in calls))
        message = self._message(reply, request)
        completion = conversation.completion if reply.message else None
        size = 0 if completion is None else len(completion.tokens)
        if completion is not None:
            answered(point, state, message)
        tokens = conversation.tokens
        ended = "tool_calls" if "tool_calls" in message else "stop"
        reason = ended if reply.finish_reason == "stop" else "length"
        return Answer(
            id=f"chatcmpl-{self.key[-8:]}-{self.model_calls}",
            created=int(time.time()),
            model=MODEL,
            message=message,
            finish_reason=reason,
            prompt=tokens[: len(tokens) - size],
            completion=completion,
        )

    def _failed_by(self, error: Exception) -> Refused:
        """End the rollout by this error; returns the answer to its program."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # retrieved, in case that the rollout is given up
        return Refused(500, f"the rollout has failed: {error}")

    def _message(self, reply: Reply, request: ChatRequest) -> Message:
        """Return the turn as the program sees it.

        Where a call has a problem all calls stay in the text, as they were written, and so they do
        where the request wants none.
        """
        calls = reply.calls if request.tool_choice == "auto" else ()
        runnable = not any(call.problem for call in calls)
        plain = not runnable or len(calls) < len(reply.calls)
        text = reply.raw if plain else reply.text
        for stop in (*self.stops, *request.stop):  # what lies before the first, as OpenAI does
            text = text.partition(stop)[0]
        message: Message = {"role": "assistant", "content": text, "refusal": None}
        if reply.reasoning and not plain:
            message["reasoning_content"] = reply.reasoning
        if calls and runnable:
            message["content"] = text or None
            message["tool_calls"] = [
                {
                    # unique in the rollout: nine letters and digits, as Mistral wants
                    "id": f"call{next(self._numbers):05d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": as_json(call.arguments)},
                }
                for call in calls
            ]
        return message


def _first_of(same: list[Call], attempt: int) -> Call | None:
    """Return the call that a request with an equal body repeats; None if it is one of its own.

    Clients give their attempts no id. One that counts them has asked before. One that does not may
    come back for the answer of a call whose client went away; while the first is still there, the
    second is another call.
    """
    if attempt:
        # who has its answer asks no more: of those that are answered the last is meant
        earlier = [call for call in reversed(same) if call.attempt < attempt]
        return min(earlier, key=lambda call: (call.delivered, call.waiting), default=None)
    return next((call for call in same if not call.delivered and not call.waiting), None)
