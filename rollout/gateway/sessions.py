"""The calls of one rollout's program; a repeated call is made only once."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rlcore.config.sections.rollout import TRAINED
from rlcore.data.messages import Message
from rlcore.deadlines import CANCEL_S
from rlcore.errors import ConfigError, DataError, ModelError, UserError
from rollout.conversation.conversation import Conversation
from rollout.conversation.reply import Reply, ToolCall
from rollout.conversation.reply_parser import as_json
from rollout.gateway.matching import Matcher, answered
from rollout.gateway.wire import Answer, ChatRequest, Refused, held_values

OVER = "the rollout that this key belongs to is over"


@dataclass(slots=True)
class Call:
    """A request of the program, with its repetitions."""

    task: asyncio.Task[Answer]
    attempt: int  # the highest x-stainless-retry-count so far
    waiting: int = 0  # number of waiting clients
    delivered: bool = False


@dataclass
class Session:
    """One rollout: its key, its calls, and the conversation that they make.

    Attributes:
        key: the API key of its program.
        failed: set to an error once a call was lost through no fault of the program. A rollout
            that lost a call is not trained on. The result None says that an engine aborted a
            turn, so the draw is made again.
    """

    conversation: Conversation
    key: str
    model_calls: int = 0
    repeated_calls: int = 0
    closed: bool = False
    _calls: dict[bytes, list[Call]] = field(default_factory=dict)  # by request body
    _numbers: Iterator[int] = field(default_factory=count)  # numbers of tool calls
    _own_ids: set[str] = field(default_factory=set)  # of calls with the model's own ids

    def __post_init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.held = held_values(self.conversation.sampling)
        self.models = {TRAINED: None, **{name: name for name in self.conversation.policies}}
        self._matcher = Matcher(self.conversation)

    @property
    def abandoned_calls(self) -> int:
        """Number of calls whose client left and did not return for the answer."""
        return sum(not call.delivered for calls in self._calls.values() for call in calls)

    async def answer(self, body: bytes, request: ChatRequest, attempt: int) -> Answer:
        """The turn of the model that the request asks for.

        A repeated request gets the first one's answer. If the client leaves, the turn is made
        nevertheless.

        Args:
            attempt: number of earlier attempts that the client reports.

        Raises:
            Refused: the request is invalid, or the rollout is over.
        """
        if self.closed:
            raise Refused(410, OVER, code="rollout_over")
        digest = hashlib.blake2b(body, digest_size=16).digest()
        same = self._calls.setdefault(digest, [])
        call = _first_of(same, attempt)
        if call is None:
            call = Call(asyncio.ensure_future(self._turn(request)), attempt)
            # retrieve its exception, since no client may be left to do so
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
            # the client has left
            raise
        finally:
            call.waiting -= 1
        call.delivered = True
        return answer

    async def close(self, *, drain: bool) -> None:
        """Refuse new calls, and end those in flight.

        Args:
            drain: wait for their turns, each limited by the deadline of its engine request: the
                model's text belongs to the rollout, even if no client reads it.
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
            reply = await conversation.generate(
                request.limit, stop=request.stop, policy=request.policy
            )
        except DataError as error:
            # for example messages that the chat template refuses
            raise Refused(400, str(error), param="messages") from error
        except Refused:
            raise
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, ConfigError | ModelError):
                # the request exceeds a limit of the engines, for example of stop strings
                raise Refused(400, str(error)) from error
            # the rollout raises the same error
            if not self.failed.done():
                self.failed.set_exception(error)
                # retrieve the exception, in case the rollout is given up
                self.failed.exception()
            raise Refused(500, f"the rollout has failed: {error}") from error
        if reply.finish_reason == "abort":
            if not self.failed.done():
                self.failed.set_result(None)
            raise Refused(500, "an engine has aborted the turn, and the rollout with it")
        self.model_calls += 1
        calls = reply.calls if request.tool_choice == "auto" else ()
        conversation.measure("tool_calls", len(calls))
        conversation.measure("tool_errors", sum(bool(call.error) for call in calls))
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
            model=request.policy or TRAINED,
            message=message,
            finish_reason=reason,
            prompt=tokens[: len(tokens) - size],
            completion=completion,
        )

    def _message(self, reply: Reply, request: ChatRequest) -> Message:
        """The turn as the program sees it.

        If a call has an error, or the request disables calls, all calls stay in the text as they
        were written.
        """
        calls = reply.calls if request.tool_choice == "auto" else ()
        runnable = not any(call.error for call in calls)
        plain = not runnable or len(calls) < len(reply.calls)
        text = reply.raw if plain else reply.text
        # keep the text before the first stop string, as OpenAI does
        for stop in (*self.conversation.sampling.stop, *request.stop):
            text = text.partition(stop)[0]
        message: Message = {"role": "assistant", "content": text, "refusal": None}
        if reply.reasoning and not plain:
            message["reasoning_content"] = reply.reasoning
        if calls and runnable:
            message["content"] = text or None
            message["tool_calls"] = [
                {
                    "id": self._id_of(call),
                    "type": "function",
                    "function": {"name": call.name, "arguments": as_json(call.arguments)},
                }
                for call in calls
            ]
        return message

    def _id_of(self, call: ToolCall) -> str:
        """An id that is unique in the rollout.

        It is the model's own, or has nine letters and digits, as Mistral's chat template requires.
        """
        own = "" if call.own_id in self._own_ids else call.own_id
        self._own_ids.add(own)
        return own or f"call{next(self._numbers):05d}"


def _first_of(same: list[Call], attempt: int) -> Call | None:
    """The call that a request with an equal body repeats; None if the request is new.

    Clients do not identify their attempts. A client that counts attempts has asked before. A client
    that does not may return for the answer of a call whose client left; while the first client is
    still connected, the second request is a new call.
    """
    if attempt:
        # an answered client does not ask again
        earlier = [call for call in reversed(same) if call.attempt < attempt]
        return min(earlier, key=lambda call: (call.delivered, call.waiting), default=None)
    return next((call for call in same if not call.delivered and not call.waiting), None)
