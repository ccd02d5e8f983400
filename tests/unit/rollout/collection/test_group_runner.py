"""Which room a runner finds, and what it waits for, while its workflows run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlcore.data.generation import GenerateRequest, SamplingParams
from rlcore.data.prompts import Prompt
from rollout.collection.group_runner import GroupRunner
from rollout.workflows.context import WorkflowContext


class Waits:
    """Asks for a generation once it may."""

    may_ask: asyncio.Event

    def __init__(self, context: WorkflowContext) -> None:
        self.context = context

    async def rollout(self, prompt: Prompt, draw: int, index: int, generate: Any) -> Any:
        await self.may_ask.wait()
        request = GenerateRequest(prompt.tokens, self.context.sampling, draw, first_sample=index)
        return await generate(request)


async def test_calls_that_have_not_asked_for_a_generation_take_room(make_config: Any) -> None:
    name = f"{__name__}:Waits"
    config = make_config(rollout={"workflow": name, "engine": {"kind": "sglang"}})
    fleet = SimpleNamespace(serving=1, describe_wait=lambda: "engine a (2 requests)")
    engine = SimpleNamespace(max_in_flight=8)
    dispatcher: Any = SimpleNamespace(fleet=fleet, config=engine, free_calls=8, one=None)
    settings = config.rollout.workflow
    context = WorkflowContext(SamplingParams(max_new_tokens=1), 2, 0, None, settings=settings)  # type: ignore[arg-type]
    scorer: Any = None
    runner = GroupRunner(config, dispatcher, scorer, context)
    runner.attempts.partial.whole = lambda *_: asyncio.sleep(600)  # type: ignore[method-assign]
    Waits.may_ask = asyncio.Event()
    assert (runner.room(2), runner.describe_wait()) == (4, "no prompt is unfinished")
    prompts = {draw: Prompt(f"rows:{draw}", np.zeros(1, np.int32), "") for draw in (3, 4)}
    made = asyncio.ensure_future(runner.run(prompts))
    await asyncio.sleep(0.01)
    assert runner.room(2) == (8 - 4) // 2
    waits = f"2 of the prompts wait for workflow {name}, the first is rows:3"
    assert runner.describe_wait() == waits
    assert runner.describe_wait({4}).endswith("the first is rows:4")
    Waits.may_ask.set()
    await asyncio.sleep(0.01)
    assert runner.room(2) == 4
    assert runner.describe_wait({3}).startswith("1 of the prompts wait for engine a (2 requests)")
    made.cancel()
    await asyncio.wait({made})
    assert (runner.room(2), runner.describe_wait()) == (4, "no prompt is unfinished")
