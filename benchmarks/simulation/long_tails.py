"""Imitates slow generation with a long tail: the embedded engine with delayed answers."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from rlcore.data.generation import Completion, GenerateRequest
from rollout.collection import group_runner
from rollout.collection.group_runner import GroupRunner
from rollout.engines.embedded.engine import EmbeddedEngine

GATHER_S = 0.005  # what is asked within it is decoded together

Delay = Callable[[int], float]
"""Seconds that the responses to a draw take longer than they do."""


def log_normal(median_s: float, *, sigma: float = 1.0, longest: float = 10.0) -> Delay:
    """The same for a draw in every run. `longest`: where the tail is cut, in medians."""

    def delay(draw: int) -> float:
        return median_s * min(longest, math.exp(random.Random(draw).gauss(0.0, sigma)))

    return delay


class LongTailed(EmbeddedEngine):
    """Answers each request by itself, as SGLang does. Tokens are made first and held back then:
    they are as old as can be.

    What is asked at temperature 0, the evaluations, is not held back.
    """

    def __init__(self, *arguments: Any, delay: Delay, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._delay = delay
        self._batch: list[GenerateRequest] | None = None
        self._answers: asyncio.Future[list[list[Completion]]]

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        if self._batch is None:
            self._batch = []
            self._answers = asyncio.ensure_future(self._decoded(self._batch))
        answers = self._answers
        first = len(self._batch)
        self._batch += requests
        found = (await asyncio.shield(answers))[first : first + len(requests)]
        await asyncio.sleep(
            max(self._delay(one.draw) if one.sampling.temperature else 0.0 for one in requests)
        )
        return found

    async def _decoded(self, batch: list[GenerateRequest]) -> list[list[Completion]]:
        await asyncio.sleep(GATHER_S)
        self._batch = None
        return await super().generate(batch)


@contextmanager
def long_tailed(delay: Delay) -> Iterator[None]:
    """Give all runs of this process such an engine, which gets a request when it has room."""

    def one_by_one(*arguments: Any, **options: Any) -> GroupRunner:
        runner = GroupRunner(*arguments, **options)
        runner.batched = False
        return runner

    def engine(*arguments: Any, **options: Any) -> LongTailed:
        return LongTailed(*arguments, delay=delay, **options)

    with (
        patch("rollout.engines.embedded.factory.EmbeddedEngine", engine),
        patch.object(group_runner, "GroupRunner", one_by_one),
    ):
        yield
