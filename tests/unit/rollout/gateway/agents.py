"""Runs agent programs against a model whose answers a test writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.data.generation import GenerateRequest
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rollout.workflows.registry import build_workflow
from tests.unit.rollout.conversation.kit import (
    ScriptedModel,
    by_turn,
    make_context,
    make_prompt,
    make_tokenizer,
)
from tests.unit.rollout.patient_loop import run_steadily

__all__ = ["by_turn"]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]
CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
USER = {"role": "user", "content": "1+2?"}

program: Callable[..., Any]  # of the test that runs


async def agent(task: Any, endpoint: Any) -> Any:
    """The program of every test."""
    return await program(task, endpoint)


def held_agent(task: Any, endpoint: Any) -> Any:
    """The same, of a test whose program is not async."""
    return program(task, endpoint)


def play(
    run: Callable[..., Any],
    script: Callable[[str, GenerateRequest], str],
    *,
    model: Callable[..., Any] | None = None,
    workflow: Mapping[str, Any] | None = None,
    after: Callable[[], Awaitable[None]] | None = None,
    **given: Any,
) -> tuple[list[Sample], ScriptedModel]:
    """Samples of one rollout, and the model with its requests.

    Args:
        run: the program; async, or not.
        model: answers instead, given the scripted one.
        after: runs when the rollout is over, in its event loop.
    """
    tokenizer = given.pop("tokenizer", None) or make_tokenizer()
    scripted = ScriptedModel(tokenizer, script)
    built = build(run, tokenizer, workflow or {}, **given)

    async def rollout() -> list[Sample]:
        answer = scripted if model is None else model(scripted)
        work = built.rollout(make_task(tokenizer), 4, 0, answer)
        try:
            samples: list[Sample] = await asyncio.wait_for(work, 60)
        finally:
            if after is not None:
                await after()
        return samples

    return run_steadily(rollout()), scripted


def play_many(
    run: Callable[..., Any], script: Callable[[str, GenerateRequest], str], count: int
) -> list[Sample]:
    """The samples of rollouts that run together."""
    tokenizer = make_tokenizer()
    built = build(run, tokenizer, {})
    prompt = make_task(tokenizer)

    async def rollouts() -> list[list[Sample]]:
        models = [ScriptedModel(tokenizer, script) for _ in range(count)]
        work = (built.rollout(prompt, draw, 0, m) for draw, m in enumerate(models))
        return await asyncio.wait_for(asyncio.gather(*work), 120)

    return [sample for samples in asyncio.run(rollouts()) for sample in samples]


def build(
    run: Callable[..., Any] | None, tokenizer: Any, workflow: Mapping[str, Any], **given: Any
) -> Any:
    """The workflow, whose program is `run`."""
    global program
    options = {"name": "agent", **workflow}
    if run is not None:
        program = run
        name = "agent" if asyncio.iscoroutinefunction(run) else "held_agent"
        options = {"run": f"{__name__}:{name}", **options}
    settings = WorkflowConfig.model_validate(options)
    return build_workflow(make_context(tokenizer, settings=settings, **given))


def make_task(tokenizer: Any) -> Prompt:
    return make_prompt(tokenizer, USER["content"], {"label": "3", "level": 7})


def client(endpoint: Any, **given: Any) -> Any:
    """OpenAI's own client."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, **given)


def body(messages: list[Any], **more: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": messages, "tools": TOOLS, **more}).encode()


async def post(endpoint: Any, data: bytes, *, attempt: int | None = None) -> tuple[int, Any]:
    """Ask as a client that is not OpenAI's. Returns the status and the answer."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    if attempt is not None:
        headers["x-stainless-retry-count"] = str(attempt)
    url = f"{endpoint.base_url}/chat/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=data, headers=headers) as response,
    ):
        return response.status, await response.json()


async def turn(endpoint: Any, messages: list[Any], **more: Any) -> Any:
    """Ask for a turn of the model; returns the only choice of the answer."""
    _, answer = await post(endpoint, body(messages, **more))
    (choice,) = answer["choices"]
    return choice


def trained(samples: list[Sample], model: ScriptedModel) -> list[str]:
    """What is trained of each sample, by turn; all that the model wrote is trained once."""
    found = []
    numbers: list[float] = []
    for sample in samples:
        own = sample.tokens[sample.loss_mask == 1].tolist()
        found.append(
            "|".join(model.tokenizer.decode(own[s.start : s.end]) for s in sample.turn_spans)
        )
        numbers += (-sample.rollout_logprobs).tolist()
    assert sorted(numbers) == list(range(model.made))
    return found
