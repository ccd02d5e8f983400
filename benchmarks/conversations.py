"""What the bookkeeping of conversations costs: 1024 of 6 turns at once, over an engine that answers
at once.

    python benchmarks/conversations.py             # all of it
    python benchmarks/conversations.py --quick     # small; numbers mean little

Two comparisons, each of sides that take turns in one process:

- a conversation over HTTP requests of tokens, beside the same requests by a bare aiohttp client
  that keeps no books: milliseconds a turn;
- the gateway, beside a bare aiohttp server that parses each request and answers a constant, with an
  aiohttp client in the same process: turns a second.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import statistics
import string
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from aiohttp import web
from process import busy_seconds
from report import machine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlcore.data.generation import Completion, GenerateRequest, SamplingParams
from rlcore.data.prompts import Prompt
from rlcore.data.sample import VersionSpan
from rlcore.launch.commands.init_model import CHATML_TEMPLATE, TURN_END, TURN_START
from rollout.conversation.conversation import Conversation
from rollout.gateway.server import Gateway
from rollout.workflows.context import WorkflowContext

TURNS = 6
MOST_TIMES = 2.0  # the time of the bare side
MOST_CPU_MS = 1.0  # a turn
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
    }
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
QUESTION = "How much is 1 and 2? Use the tool."


def result(number: int, turn: int) -> str:
    """A text that no other turn has: nothing that was kept of others helps."""
    return f"The result is {number * TURNS + turn}."


def tool_message(number: int, turn: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call00000", "content": result(number, turn)}


Talk = Callable[[int], Awaitable[object]]
"""One conversation of `TURNS` turns, by its number."""


@dataclass
class Side:
    """One way to hold the conversations."""

    what: str
    wall_ms: list[float] = field(default_factory=list)  # a turn, of each round
    cpu_ms: list[float] = field(default_factory=list)  # of this process, a turn

    async def run(self, talk: Talk, conversations: int) -> None:
        gc.collect()
        wall = time.perf_counter()
        cpu = time.process_time()
        await asyncio.gather(*(talk(number) for number in range(conversations)))
        turns = conversations * TURNS
        self.cpu_ms.append((time.process_time() - cpu) * 1e3 / turns)
        self.wall_ms.append((time.perf_counter() - wall) * 1e3 / turns)

    @property
    def wall(self) -> float:
        return statistics.median(self.wall_ms)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_ms)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, words of roles and ends of turns."""
    symbols = ["<unk>", TURN_START, TURN_END, *string.printable]
    backend = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token=TURN_END
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN_START, TURN_END]})
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer


class Task:
    """The prompt, and what the engine answers to each turn."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()
        stop = int(self.tokenizer.convert_tokens_to_ids(TURN_END))
        sampling = SamplingParams(256, stop_token_ids=(stop,))
        self.context = WorkflowContext(sampling, 1, 0, self.tokenizer)
        messages = [{"role": "user", "content": QUESTION}]
        text = str(
            self.tokenizer.apply_chat_template(
                messages, tools=TOOLS, tokenize=False, add_generation_prompt=True
            )
        )
        tokens = np.array(self._ids(text), dtype=np.int32)
        self.prompt = Prompt("rows:1", tokens, text, messages=messages, tools=TOOLS)
        made = np.array(self._ids(CALL + TURN_END), dtype=np.int32)
        logprobs = np.full(len(made), -0.5, dtype=np.float32)
        self.completion = Completion(made, logprobs, "stop", (VersionSpan(1, 0, len(made)),))
        # as long as what a conversation appends, but for the digits of the result
        told = [tool_message(0, 0)]
        suffix = self.context.template.suffix(told, TOOLS, last_token=stop)
        self.suffix: list[int] = suffix.tolist()

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    async def at_once(self, request: GenerateRequest) -> list[Completion]:
        return [self.completion]


# --- a conversation over requests of tokens -------------------------------------------------------


class TokenClient:
    """Asks the null server for tokens. Both sides of the first comparison ask through it."""

    def __init__(self, url: str, session: aiohttp.ClientSession, task: Task) -> None:
        self._url = f"{url}/generate"
        self._session = session
        self._task = task

    async def ask(self, tokens: Any) -> Any:
        body = orjson.dumps({"input_ids": tokens}, option=orjson.OPT_SERIALIZE_NUMPY)
        async with self._session.post(self._url, data=body) as response:
            return orjson.loads(await response.read())

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        await self.ask(request.prompt)
        return [self._task.completion]


async def bare_talk(client: TokenClient, task: Task) -> None:
    tokens = task.prompt.tokens.tolist()
    made = task.completion.tokens.tolist()
    for _ in range(TURNS):
        await client.ask(tokens)
        tokens = [*tokens, *made, *task.suffix]


async def our_talk(client: TokenClient, task: Task, number: int) -> None:
    conversation = task.context.conversation(task.prompt, number, 0, client.generate)
    for turn in range(TURNS):
        if turn:
            await conversation.append([tool_message(number, turn)])
        await conversation.generate()
    assert len(conversation.samples(1.0)) == 1


async def measure_conversations(url: str, conversations: int, rounds: int) -> list[Side]:
    task = Task()
    sides = [Side("bare aiohttp client"), Side("Conversation")]
    # by no more connections than an engine has
    connector = aiohttp.TCPConnector(limit=256)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = TokenClient(url, session, task)
        talks: list[Talk] = [
            lambda _: bare_talk(client, task),
            lambda number: our_talk(client, task, number),
        ]
        await in_turns(sides, talks, conversations, rounds)
    return sides


# --- the gateway ----------------------------------------------------------------------------------


@asynccontextmanager
async def bare_server() -> Any:
    """Serve a constant to every request, whose body is parsed."""
    call = {"id": "call00000", "type": "function"}
    call["function"] = {"name": "add", "arguments": '{"a":1}'}  # type: ignore[assignment]
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}

    async def handle(request: web.BaseRequest) -> web.Response:
        orjson.loads(await request.read())
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy"}
        body = orjson.dumps({**answer, "choices": [choice], "usage": usage})
        return web.Response(body=body, content_type="application/json")

    runner = web.ServerRunner(web.Server(handle, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def chat(session: aiohttp.ClientSession, base_url: str, key: str, number: int) -> None:
    """Talk as an agent program does, with all of the history in each request."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    for turn in range(TURNS):
        body = orjson.dumps({"model": "policy", "messages": messages, "tools": TOOLS})
        url = f"{base_url}/chat/completions"
        async with session.post(url, data=body, headers=headers) as response:
            reply = orjson.loads(await response.read())["choices"][0]["message"]
        call = reply["tool_calls"][0]["id"]
        messages += [reply, {"role": "tool", "tool_call_id": call, "content": result(number, turn)}]


async def measure_gateway(conversations: int, rounds: int) -> list[Side]:
    task = Task()
    gateway = Gateway(lambda token: "")
    sides = [Side("bare aiohttp server"), Side("gateway")]
    connector = aiohttp.TCPConnector(limit=256)
    async with aiohttp.ClientSession(connector=connector) as session, bare_server() as bare:

        async def ours(number: int) -> None:
            conversation: Conversation = task.context.conversation(
                task.prompt, number, 0, task.at_once
            )
            rollout, endpoint = await gateway.open(conversation)
            try:
                await chat(session, endpoint.base_url, endpoint.api_key, number)
            finally:
                await gateway.close(rollout, drain=True)
            assert len(conversation.samples(1.0)) == 1

        talks: list[Talk] = [lambda number: chat(session, bare, "key", number), ours]
        await in_turns(sides, talks, conversations, rounds)
    return sides


async def in_turns(sides: list[Side], talks: list[Talk], conversations: int, rounds: int) -> None:
    """Run each side once to warm up, then in turn."""
    for round_ in range(rounds + 1):
        for side, talk in zip(sides, talks, strict=True):
            await side.run(talk, conversations)
            if round_ == 0:
                side.wall_ms.clear()
                side.cpu_ms.clear()


# --- the report -----------------------------------------------------------------------------------


def table(pairs: list[list[Side]]) -> str:
    lines = [
        "| side | ms a turn | times the bare one | CPU ms a turn | CPU ms above it | turns/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for bare, ours in pairs:
        for side in (bare, ours):
            times = side.wall / bare.wall
            own = side.cpu - bare.cpu
            lines.append(
                f"| {side.what} | {side.wall:.3f} | {times:.2f} | {side.cpu:.3f} | {own:.3f} |"
                f" {1e3 / side.wall:.0f} |"
            )
    return "\n".join(lines)


def goals(bare: Side, ours: Side) -> dict[str, tuple[float, float]]:
    """What is measured of `Conversation`, and the most that it may be; the gateway has no goal."""
    return {
        f"{ours.what}: times the bare side": (ours.wall / bare.wall, MOST_TIMES),
        f"{ours.what}: CPU ms a turn": (ours.cpu, MOST_CPU_MS),
    }


def main() -> None:
    """Print a table and the goals. Exits with 0 whether or not they are reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    parser.add_argument("--conversations", type=int, default=1024, help="at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="16 conversations, one round")
    options = parser.parse_args()
    if options.quick:
        options.conversations = 16
        options.rounds = 1
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the server inherits it
    started = time.monotonic()
    busy = busy_seconds()
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("workers") / "null_server.py")],
        stdin=-1,
        stdout=-1,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        pairs = [
            asyncio.run(measure_conversations(url, options.conversations, options.rounds)),
            asyncio.run(measure_gateway(options.conversations, options.rounds)),
        ]
    finally:
        server.communicate(timeout=10)
    mine = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    own = sum(usage.ru_utime + usage.ru_stime for usage in mine)
    others = max(0.0, (busy_seconds() - busy - own) / (time.monotonic() - started))
    where = machine()
    print(
        f"{where['cpu']}, {where['cores']} cores; {options.conversations} conversations of {TURNS}"
        f" turns at once; medians of {options.rounds} rounds\n"
    )
    print(table(pairs))
    for text, (measured, most) in goals(*pairs[0]).items():
        verdict = "reached" if measured <= most else "MISSED"
        print(f"\n{text}: {measured:.2f}, goal at most {most:g}: {verdict}", end="")
    print(f"\n\nMeanwhile other programs kept {others:.2f} cores busy.")
    if options.json is not None:
        sides = [side for pair in pairs for side in pair]
        rows = [{"side": s.what, "wall_ms": s.wall_ms, "cpu_ms": s.cpu_ms} for s in sides]
        options.json.write_text(
            json.dumps({"machine": where, "other_cores": others, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
