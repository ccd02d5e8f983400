"""Agent programs that treat their history as real ones do, some of them badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import aiohttp
from calculator_agent import TOOLS, use
from openai import AsyncOpenAI

MOST_TURNS = 3
KINDS = ("echoes", "drops thoughts", "rewrites results", "in parallel", "retries", "abandons")
number = count()  # of the rollout
kinds: list[tuple[str, dict[str, float]]] = []  # what ran, and what came of it


async def run(task: Any, endpoint: Any, *, stream: bool = False) -> dict[str, float]:
    """Make a rollout of the next kind."""
    kind = KINDS[next(number) % len(KINDS)]
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        agent = Agent(client, endpoint, stream, kind)
        await agent.play([*task.messages])
    kinds.append((kind, agent.seen))
    return {"reward": float(next(number) % 3)}


class Agent:
    def __init__(self, client: AsyncOpenAI, endpoint: Any, stream: bool, kind: str) -> None:
        self.client = client
        self.endpoint = endpoint
        self.stream = stream
        self.kind = kind
        self.seen = {"thoughts": 0.0, "calls": 0.0}

    async def play(self, messages: list[Any]) -> None:
        if self.kind == "in parallel":
            replies = await asyncio.gather(*(self.ask(messages) for _ in range(2)))
            await asyncio.gather(*(self.loop([*messages], reply) for reply in replies))
            return
        if self.kind == "abandons":
            async with self.begun(self.body(messages)):
                pass  # nobody waits for its answer
            messages.append({"role": "user", "content": "1+1+1"})
        if self.kind == "retries":
            body = self.body(messages)
            async with self.begun(body):
                pass
            reply = await self.post(body, attempt=1)
        else:
            reply = await self.ask(messages)
        await self.loop(messages, reply)

    async def loop(self, messages: list[Any], reply: dict[str, Any]) -> None:
        for _ in range(MOST_TURNS - 1):
            self.seen["thoughts"] += bool(reply.get("reasoning_content"))
            self.seen["calls"] += len(reply.get("tool_calls") or ())
            if self.kind == "drops thoughts":
                reply.pop("reasoning_content", None)
            results = [
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": use(call["function"]["name"], call["function"]["arguments"]),
                }
                for call in reply.get("tool_calls") or ()
            ] or [{"role": "user", "content": "go on"}]
            if self.kind == "rewrites results":
                await self.ask([*messages, reply, *results])
                results = [{**result, "content": "7"} for result in results]
            messages += [reply, *results]
            reply = await self.ask(messages)

    async def ask(self, messages: list[Any]) -> dict[str, Any]:
        asked: Any = {"model": self.endpoint.model, "messages": messages, "tools": TOOLS}
        if self.stream:
            async with self.client.chat.completions.stream(**asked) as events:
                async for _ in events:
                    pass
                answer: Any = events.current_completion_snapshot
        else:
            answer = await self.client.chat.completions.create(**asked)
        reply: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
        reply.pop("parsed", None)
        for call in reply.get("tool_calls") or ():
            call["function"].pop("parsed_arguments", None)
        return reply

    # --- a client of its own, which gives up ------------------------------------------------------

    def body(self, messages: list[Any]) -> bytes:
        asked = {"model": self.endpoint.model, "messages": messages, "tools": TOOLS}
        return json.dumps(asked).encode()

    async def post(self, body: bytes, *, attempt: int = 0) -> dict[str, Any]:
        headers = {
            "Authorization": f"Bearer {self.endpoint.api_key}",
            "x-stainless-retry-count": str(attempt),
        }
        url = f"{self.endpoint.base_url}/chat/completions"
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(url, data=body) as response,
        ):
            message: dict[str, Any] = (await response.json())["choices"][0]["message"]
            return message

    @asynccontextmanager
    async def begun(self, body: bytes) -> AsyncIterator[None]:
        """Ask, and go away behind the block."""
        host = self.endpoint.base_url.removeprefix("http://").partition("/")[0]
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
            f"Authorization: Bearer {self.endpoint.api_key}\r\n\r\n"
        )
        _, writer = await asyncio.open_connection(*host.split(":"))
        writer.write(head.encode() + body)
        await writer.drain()
        await self.client.models.list()  # answered behind what was sent before it
        yield
        writer.close()
        await writer.wait_closed()
        await self.client.models.list()
