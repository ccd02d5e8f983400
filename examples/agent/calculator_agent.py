"""A calculator agent, written against the `openai` package and nothing of rlcore.

`run` is called once for each rollout, by `rollout.workflow: {name: agent, run: ...}`.
As a command, `[python, examples/agent/calculator_agent.py]`, the same program reads its row from
standard input and prints its outcome.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from openai import AsyncOpenAI

MOST_TURNS = 4


def tool(name: str, description: str) -> dict[str, Any]:
    numbers = {
        "a": {"type": "integer", "description": "the first number"},
        "b": {"type": "integer", "description": "the second number"},
    }
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool("add", "Add two numbers."),
    tool("subtract", "Subtract the second number from the first."),
]


def use(name: str, arguments: str) -> str:
    """Call a tool; what goes wrong is told to the model."""
    known = {"add": lambda a, b: a + b, "subtract": lambda a, b: a - b}
    if name not in known:
        return f"error: there is no tool {name!r}; there is {', '.join(known)}"
    try:
        return str(known[name](**json.loads(arguments)))
    except (TypeError, ValueError) as error:
        return f"error: {name}: {error}"


async def answer(client: AsyncOpenAI, model: str, question: str, *, stream: bool = False) -> str:
    """Let the model calculate until it answers."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MOST_TURNS):
        asked = {"model": model, "messages": messages, "tools": TOOLS}
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                async for _ in events:  # a program with a screen would show them
                    pass
                reply = events.current_completion_snapshot.choices[0].message
        else:
            reply = (await client.chat.completions.create(**asked)).choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            return reply.content or ""
        for call in reply.tool_calls:
            content = use(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return ""


def judged(said: str, label: Any) -> dict[str, float]:
    right = float(said == str(label))
    return {"reward": right, "correct": right}


async def run(task: Any, endpoint: Any, *, stream: bool = False) -> dict[str, float]:
    """Make one rollout."""
    question = task.messages[-1]["content"]
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        said = await answer(client, endpoint.model, question, stream=stream)
    return judged(said, task.row["label"])


async def main() -> None:
    """Make one rollout, as a command: the client takes URL and key from the environment."""
    task = json.load(sys.stdin)
    async with AsyncOpenAI() as client:
        said = await answer(client, os.environ["OPENAI_MODEL"], task["messages"][-1]["content"])
    print(json.dumps(judged(said, task["row"]["label"])))


if __name__ == "__main__":
    asyncio.run(main())
