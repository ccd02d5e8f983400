"""A reward part whose scores come from a service."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import cast

from rlcore.config.sections.reward_services import RewardServiceConfig
from rlcore.data.sample import Sample
from rlcore.errors import DataError
from rollout.json_client import NoAnswer
from rollout.rewards.base import RewardFailure, RewardPart, Score, attempted, checked
from rollout.rewards.services.client import client_of, failure
from rollout.rewards.services.formats import texts, wire_format

_Call = tuple[Sample, "asyncio.Future[Score]"]


class ServicePart(RewardPart):
    """Sends samples to a service, those of different groups together in one request.

    Raises:
        ConfigError: see `client_of`.
        ModelError: `tokenizer` names a folder without a tokenizer that has a chat template.
    """

    def __init__(self, name: str, config: RewardServiceConfig) -> None:
        self._config = config
        self._where = f"reward.parts.{name}.service"
        self._client = client_of(self._where, config)
        rendered = texts(config.tokenizer, f"{self._where}.tokenizer")
        self._format = wire_format(config.format, config.key, rendered)
        self._waiting: deque[_Call] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """See `RewardPart`."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Score]] = [loop.create_future() for _ in samples]
        self._waiting.extend(zip(samples, futures))
        requests = -(-len(self._waiting) // self._config.batch_size)
        for _ in range(min(requests, self._config.concurrency - len(self._senders))):
            sender = loop.create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return list(await asyncio.gather(*futures))

    async def _send(self) -> None:
        try:
            await self._send_all()
        finally:  # in this iteration of the loop: `score` starts another one in the next
            self._senders.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _send_all(self) -> None:
        # groups that finish in this iteration of the loop join the first request
        await asyncio.sleep(0)
        while self._waiting:
            size = min(len(self._waiting), self._config.batch_size)
            calls = [self._waiting.popleft() for _ in range(size)]
            calls = [call for call in calls if not call[1].done()]
            if not calls:
                continue
            try:
                scores = await attempted(self._ask([sample for sample, _ in calls]))
            except asyncio.CancelledError:
                for _, future in calls:
                    future.cancel()
                raise
            if isinstance(scores, RewardFailure):
                scores = [scores] * len(calls)
            for (_, future), score in zip(calls, scores):
                if not future.done():
                    future.set_result(score)

    async def _ask(self, samples: list[Sample]) -> list[Score]:
        try:
            body = self._format.body(samples)
        except DataError as error:
            return [RewardFailure("error", str(error))] * len(samples)
        try:
            answer = await self._client.post(body)
            return [checked(value) for value in self._format.values(answer, samples)]
        except NoAnswer as error:
            return [failure(error, self._where, self._config)] * len(samples)
        except ValueError as error:
            return [RewardFailure("error", f"the service answered {error}")] * len(samples)

    async def close(self) -> None:
        """See `RewardPart`."""
        for sender in list(self._senders):
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        await self._client.close()
