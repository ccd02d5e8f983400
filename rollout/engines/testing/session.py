"""One engine under test: calls with deadlines, requests, publications, and how a failure reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlcore.algorithms.testing import ContractError
from rlcore.algorithms.testing.contract import Rule
from rlcore.config import Config
from rlcore.config.derived import max_request_s
from rlcore.config.engine_registry import EngineKind
from rlcore.data.generation import Completion, GenerateRequest, Prefix, SamplingParams
from rlcore.deadlines import TRANSPORT_GRACE_S
from rlcore.errors import RlcoreError, RunFailed
from rlcore.interfaces import BucketSender, RankAddress, RolloutEngine
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.engines.checks import check_completion, check_versions, folder_vocab_size
from rollout.weight_sync.base import describe
from rollout.weight_sync.choose import choose_transport, make_sender
from rollout.weight_sync.process_group import gpu_identity, node_identity

T = TypeVar("T")
SPECS_A_BUCKET = 3  # small enough for several buckets in every update

COMPLETIONS = Rule(
    "completions",
    "generate returns n whole completions a request, in order: tokens, log-probs, version spans",
    "return new tokens only, int32 in the vocabulary and at most max_new_tokens, a float32 log-prob"
    " of logits / temperature for each, and the versions that made them",
)
DEADLINES = Rule(
    "deadlines",
    "every call ends within its limit in rollout.engine, with an error if need be",
    "give up after start_timeout_s, health_timeout_s or update_timeout_s, and raise EngineHangs",
)


class Session:
    """An engine with the calls that a trainer and a rollout service make to it.

    Args:
        weights: a whole set of the model's weights, by Hugging Face name.
        long: tokens of a response that is still being made when the engine is paused.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        config: Config,
        kind: EngineKind,
        weights: Mapping[str, Tensor],
        *,
        long: int,
    ) -> None:
        self.engine = engine
        self.config = config
        self.kind = kind
        self.weights = dict(weights)
        self.vocab_size = folder_vocab_size(config.model.path)
        self.long = long
        # The newest published version.
        self.version = 0
        # The rule that is being checked.
        self.rule = DEADLINES
        self.buckets = cut_buckets(
            (
                TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in weights.items()
            ),
            max(1, sum(tensor.nbytes for tensor in weights.values()) // SPECS_A_BUCKET),
        )
        self._transport: Any = None
        self._sender = BucketSender()

    def broken(self, got: object, expected: str, *, rule: Rule | None = None) -> ContractError:
        """The error of an engine that breaks the current rule."""
        example = f"got {got}\nexpected {expected}"
        return ContractError(f"engine {self.engine.name!r}", rule or self.rule, example)

    def expect(self, holds: bool, got: object, expected: str) -> None:
        """Raise ContractError unless it holds."""
        if not holds:
            raise self.broken(got, expected)

    async def call(self, what: str, work: Awaitable[T], seconds: float | None = None) -> T:
        """Await a call that must succeed, within its limit."""
        try:
            return await self._within(what, work, seconds)
        except RlcoreError as error:
            raise self.broken(f"{what} raised {_name(error)}", f"{what} to succeed") from error

    async def refused(
        self, what: str, work: Awaitable[Any], error_type: type[RlcoreError] = RunFailed
    ) -> None:
        """Await a call that must raise an error of this type."""
        name = "EngineFailed" if error_type is RunFailed else error_type.__name__
        expected = f"{what} to raise {name}"
        try:
            result = await self._within(what, work)
        except error_type:
            return
        except RlcoreError as error:
            raise self.broken(f"{what} raised {_name(error)}", expected) from error
        raise self.broken(f"{what} returned {result!r}", expected)

    async def _within(self, what: str, work: Awaitable[T], seconds: float | None = None) -> T:
        if seconds is None:
            update_s = self.config.rollout.engine.update_timeout_s
            seconds = max(max_request_s(self.config), update_s)
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=seconds + TRANSPORT_GRACE_S)
        if done:
            return task.result()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task}, timeout=1.0)
        expected = f"an answer, or an error, within {seconds:g} s"
        raise self.broken(f"{what} still runs", expected, rule=DEADLINES)

    async def start(self) -> None:
        """Start the engine."""
        await self.call("start", self.engine.start(), self.config.rollout.engine.start_timeout_s)

    async def health(self) -> dict[str, Any]:
        """Return the engine's own report."""
        return await self.call("health", self.engine.health())

    async def version_in_force(self) -> Any:
        """The version in the engine's report; 0 if the report has none."""
        return (await self.health()).get("version", 0)

    def request(
        self,
        draw: int = 0,
        *,
        n: int = 1,
        first: int = 0,
        prefixes: Sequence[Prefix] = (),
        **sampling: Any,
    ) -> GenerateRequest:
        """A request for `n` responses to a prompt of its own."""
        prompt = np.array([(3 + 7 * draw + k) % self.vocab_size for k in range(5)], dtype=np.int32)
        settings = SamplingParams(**{"max_new_tokens": 6, **sampling})
        return GenerateRequest(prompt, settings, draw, n, first, prefixes=tuple(prefixes))

    async def generate(self, *requests: GenerateRequest) -> list[list[Completion]]:
        """The completions of requests that can be served, made in one call."""
        oldest = self.version
        answers = await self.call("generate", self.engine.generate(requests))
        wanted = [request.n for request in requests]
        try:
            if (lengths := [len(completions) for completions in answers]) != wanted:
                raise ValueError(f"{lengths} completions, expected {wanted}, n a request, in order")
            for request, completions in zip(requests, answers):
                for place, completion in enumerate(completions):
                    check_completion(completion, request, place, vocab_size=self.vocab_size)
            check_versions(self.engine.name, answers, oldest, self.version)
        except (ValueError, RlcoreError) as error:
            expected = "what the request asks for"
            raise self.broken(str(error), expected, rule=COMPLETIONS) from error
        return answers

    async def one(self, request: GenerateRequest) -> Completion:
        """The completion of a request for one."""
        return (await self.generate(request))[0][0]

    async def publish(self) -> None:
        """Pause, bring a whole version, and resume."""
        await self.call("pause", self.engine.pause("drain"))
        await self.update()

    async def update(self) -> None:
        """Bring the paused engine a whole version, and resume."""
        await self.bring(len(self.buckets))
        await self.call("end_update", self.engine.end_update())
        self.version += 1
        await self.call("set_version", self.engine.set_version(self.version))
        await self.call("resume", self.engine.resume())

    async def bring(self, count: int) -> None:
        """Open an update, and send its first `count` buckets."""
        await self.call("begin_update", self.engine.begin_update(self.buckets))
        if self._transport is None:
            device = next(iter(self.weights.values())).device
            self._transport = choose_transport(self.config, [self.engine])
            self._transport.ranks = [RankAddress(node_identity(), gpu_identity(device))]
            self._sender = make_sender(self._transport.name, self.config, device)
        # The engine is not called for further buckets.
        brought = self.buckets[:count]
        await self._took("opening the transport", self._transport.open([self.engine], brought))
        orders = self._transport.orders()
        answers = {0: await asyncio.to_thread(self._sender.open, orders.ranks[0], brought)}
        if orders.joins:
            await self._took("joining the trainer", self._transport.join(answers))
        for bucket in brought:
            await self._took(f"receiving bucket {bucket.index}", self._send(bucket))
        if count == len(self.buckets):
            result = await asyncio.to_thread(self._sender.finish)
            await self._took("completing the transport", self._transport.complete(result))

    async def _send(self, bucket: Bucket) -> dict[Any, str]:
        flat = torch.cat(
            [self.weights[spec.name].reshape(-1).view(torch.uint8) for spec in bucket.tensors]
        )
        packed = {0: await asyncio.to_thread(self._sender.pack, bucket, flat)}
        call = asyncio.ensure_future(self._transport.send(bucket.index, packed))

        def stopped() -> Any:
            return {} if call.done() and call.result() else None

        await asyncio.to_thread(self._sender.send, bucket, flat, stopped)
        failed: dict[Any, str] = await call
        return failed

    async def _took(self, what: str, work: Awaitable[dict[Any, str]]) -> None:
        failed = await self.call(what, work)
        self.expect(not failed, f"{what} failed: {'; '.join(failed.values())}", "no failure")

    async def close(self) -> None:
        """Clean up, in whatever state the engine is."""
        if self._transport is not None:
            self._sender.close()
            await self._transport.close()
        await self.call("close", self.engine.close())


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {describe(error)}"
