"""Environments and a workflow that fail in the ways that users' code does."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from rlcore.data.generation import Generate
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rollout.workflows.context import WorkflowContext

over = threading.Event()  # set by a test that has seen enough of what hangs
resets: Counter[str] = Counter()  # by what fails
began: dict[str, float] = {}


def raises() -> None:
    raise KeyError("door")


def hangs() -> None:
    over.wait(120)


def exits() -> None:
    sys.exit(3)


def no_sandbox() -> None:
    raise ConnectionError("the sandbox is down")


BETWEEN: dict[str, Callable[[], Any]] = {
    "raises": raises,
    "hangs": lambda: asyncio.sleep(600),
    "hangs in a thread": lambda: asyncio.to_thread(hangs),
    "exits": exits,
    "nonsense": lambda: {"reward": 1.0},
}


class Faulty:
    """Asks twice; the first tries of every third rollout fail between the turns, as `how` says."""

    def __init__(self, context: WorkflowContext, *, how: str, failing: int = 1) -> None:
        self.context = context
        self.how = how
        self.failing = failing
        self.tries: Counter[tuple[int, int]] = Counter()

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        conversation = self.context.conversation(prompt, draw, index, generate)
        await conversation.generate(3)
        self.tries[draw, index] += 1
        if (draw + index) % 3 == 0 and self.tries[draw, index] <= self.failing:
            given = BETWEEN[self.how]() if self.how in BETWEEN else None
            if asyncio.iscoroutine(given):
                await given
            elif given is not None:
                return given  # type: ignore[no-any-return]
        conversation.append_tokens(prompt.tokens[:2])
        await conversation.generate()
        return conversation.samples()


class SomeDrawsFail(Faulty):
    """A rollout of each of the draws 1, 6, 11, ... fails, in all of its tries."""

    def __init__(self, context: WorkflowContext, *, how: str) -> None:
        super().__init__(context, how=how, failing=0)

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        if draw % 5 == 1 and index == 2:
            BETWEEN[self.how]()
        return await super().rollout(prompt, draw, index, generate)


class Environment:
    """Every fifth `reset` fails, or `reward`, as `how` says; with "down", all of a while do."""

    def __init__(self, *, how: str) -> None:
        self.how = how
        self.fails = False

    def reset(self, row: dict[str, Any]) -> None:
        self.label = str(row["label"])
        resets[self.how] += 1
        self.fails = resets[self.how] % 5 == 2
        now = time.monotonic()
        if self.how == "down" and now - began.setdefault("down", now) < 0.2:
            no_sandbox()
        acts = {"raises": raises, "hangs": hangs, "exits": exits}
        if self.fails and self.how in acts:
            acts[self.how]()
        if self.how == "leaks":
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()

    async def reward(self, conversation: Any) -> Any:
        if self.fails and self.how == "nan":
            return float("nan")
        if self.fails and self.how == "no number":
            return "one"
        return float(len(str(conversation.messages)) % 7)

    async def close(self) -> None:
        if self.fails and self.how == "hangs at its end":
            await asyncio.sleep(600)


class Broken(Environment):
    """Nothing ever works."""

    def reset(self, row: dict[str, Any]) -> None:
        raises()
