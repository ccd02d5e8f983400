"""Workflows, filters and a reward of a user, good and bad."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlcore.data.sample import Sample
from rlcore.protocols import Generate, GenerateRequest, Prompt
from rollout.workflows.base import WorkflowContext, make_sample


class TwoTries:
    """Asks again, under turn 1, and answers with the second try; prompts that start with 1 dawdle first."""

    def __init__(self, context: WorkflowContext) -> None:
        self.context = context

    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        for turn in (0, 1):
            if prompt.text.startswith("1"):
                await asyncio.sleep(0.01)
            request = GenerateRequest(prompt.tokens, self.context.sampling, draw, turn=turn, seed=self.context.seed)
            (completion,) = await generate(request)
        return [make_sample(prompt, draw, 0, completion)]


class Broken(TwoTries):
    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        raise KeyError("tool")


class Empty(TwoTries):
    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        return []


class Stuck(TwoTries):
    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        if draw == 1:
            await asyncio.sleep(600)
        return await super().__call__(prompt, draw, generate)


def even_draws(group: Sequence[Sample]) -> bool:
    return group[0].draw % 2 == 0


def broken_filter(group: Sequence[Sample]) -> bool:
    raise ZeroDivisionError("no groups")


def vague_filter(group: Sequence[Sample]) -> bool:
    return None  # type: ignore[return-value]


def nan(sample: Sample) -> float:
    return float("nan")
