"""Workflows, filters and a reward of a user, good and bad."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

import numpy as np

from rlcore.data.generation import Completion, Generate, GenerateRequest
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample, VersionSpan
from rollout.conversation.samples import make_sample
from rollout.workflows.context import WorkflowContext
from rollout.workflows.single_turn import SingleTurn


class TwoTries:
    """Answers with the second try, under turn 1; prompts that start with 1 dawdle first."""

    def __init__(self, context: WorkflowContext) -> None:
        self.context = context

    async def ask(self, prompt: Prompt, draw: int, generate: Generate, **given: int) -> Completion:
        seed = self.context.seed
        request = GenerateRequest(prompt.tokens, self.context.sampling, draw, seed=seed, **given)
        (completion,) = await generate(request)
        return completion

    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        for turn in (0, 1):
            if prompt.text.startswith("1"):
                await asyncio.sleep(0.01)
            completion = await self.ask(prompt, draw, generate, turn=turn)
        return [make_sample(prompt, draw, 0, completion)]


class BothTries(TwoTries):
    """Both tries as samples of one group; the second one is another sample."""

    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        return [
            make_sample(prompt, draw, i, await self.ask(prompt, draw, generate, first_sample=i))
            for i in (0, 1)
        ]


class Processed(SingleTurn):
    """A process reward of 0.5 for each token of the first sample, none for the others."""

    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        samples = await super().__call__(prompt, draw, generate)
        samples[0].token_rewards = np.full(samples[0].num_trainable, 0.5, np.float32)
        return samples


class WronglyProcessed(SingleTurn):
    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        samples = await super().__call__(prompt, draw, generate)
        samples[0].token_rewards = np.zeros(len(samples[0].tokens), np.float32)
        return samples


class Broken(TwoTries):
    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        raise KeyError("tool")


class Cancelled(TwoTries):
    """As one that awaits a task of its own which something of its own has cancelled."""

    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        task = asyncio.ensure_future(super().__call__(prompt, draw, generate))
        task.cancel()
        return await task


class FailsOnce:
    """Two turns; sample 1 of draw 2 fails between them for good, behind all other rollouts."""

    def __init__(self, context: WorkflowContext) -> None:
        self.context = context

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        conversation = self.context.conversation(prompt, draw, index, generate)
        await conversation.generate()
        if (draw, index) == (2, 1):
            await asyncio.sleep(0.05)
            raise KeyError("door")
        conversation.append_tokens(prompt.tokens)
        await conversation.generate()
        return conversation.samples()


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


def one_in_six(group: Sequence[Sample]) -> bool:
    return group[0].draw % 6 == 0


def stale(group: Sequence[Sample]) -> bool:
    return True


def no_draws(group: Sequence[Sample]) -> bool:
    return False


def pairs(group: Sequence[Sample]) -> bool:
    return len(group) == 2


def broken_filter(group: Sequence[Sample]) -> bool:
    raise ZeroDivisionError("no groups")


def vague_filter(group: Sequence[Sample]) -> bool:
    return None  # type: ignore[return-value]


def right_or_fails(sample: Sample) -> float:
    if sample.response_text != sample.label:
        raise ValueError("wrong")
    return 1.0


def nan_for_odd(sample: Sample) -> float:
    return float("nan") if sample.index % 2 else 1.0


def nan(sample: Sample) -> float:
    return float("nan")


def half(sample: Sample) -> float:
    return 0.5


class Lies(SingleTurn):
    """The first draw's first try has values that no policy can have made."""

    def __init__(self, context: WorkflowContext, lie: str) -> None:
        super().__init__(context)
        self.lie = lie
        self.told = False

    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> list[Sample]:
        samples = await super().__call__(prompt, draw, generate)
        if not self.told:
            self.told = True
            LIES[self.lie](samples[0])
        return samples


def _lie(sample: Sample, name: str, place: int, value: float) -> None:
    array = getattr(sample, name).copy()
    array[place] = value
    setattr(sample, name, array)


def _versions(sample: Sample) -> None:
    sample.versions = (VersionSpan(999, 0, sample.num_trainable),)


LIES: dict[str, Callable[[Sample], None]] = {
    "negative token": lambda sample: _lie(sample, "tokens", -1, -7),
    "large token": lambda sample: _lie(sample, "tokens", 0, 2_000_000_000),
    "log-prob of nan": lambda sample: _lie(sample, "rollout_logprobs", 0, np.nan),
    "log-prob above 0": lambda sample: _lie(sample, "rollout_logprobs", 0, 5.0),
    "version": _versions,
}


def leaves(group: Sequence[Sample]) -> bool:
    """A filter that ends its process."""
    sys.exit(0)


def contains_label(sample: Sample) -> float:
    """Pay for the label anywhere in the response."""
    return float(str(sample.label) in sample.response_text)
