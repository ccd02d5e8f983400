"""Measures requests/s and CPU time of the client of SGLang servers, beside aiohttp and httpx.

The server is a process of its own that answers at once (workers/null_server.py). Each side keeps so
many requests in flight; the sides take turns, round after round. The bare loop sends the same bytes
and parses the answer's JSON, but checks nothing. GOAL is the share of its requests/s that
training's path, through the dispatcher, should reach.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import orjson
from process import busy_seconds
from report import QUIET_CORES, machine

from rlcore.config.sections.rollout import EngineConfig
from rlcore.data.generation import GenerateRequest, SamplingParams
from rollout.engines.factories import Keys
from rollout.engines.server_client import ServerClient
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.generation import Generation, encode
from rollout.fleet.dispatcher import Dispatcher
from rollout.fleet.fleet import Fleet

VOCAB = 1000
PROMPT_TOKENS = 48
GOAL = 0.7  # of the bare loop
KEYS = Keys("api-key", "admin-key")
# httpx is given so many times fewer requests, and the fewest in flight: it would take minutes
HTTPX_SHARE = 20

Send = Callable[[int], Awaitable[object]]
"""One request, by its number."""


@dataclass
class Side:
    """One client at one number of requests in flight."""

    what: str
    in_flight: int
    rates: list[float] = field(default_factory=list)  # requests/s of each round
    cpu_us: list[float] = field(default_factory=list)  # of this process, a request

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    async def run(self, send: Send, requests: int) -> None:
        # not timed: connections that idled through the others' turns are made anew
        await self._drive(send, self.in_flight)
        wall = time.perf_counter()
        cpu = time.process_time()
        await self._drive(send, requests)
        self.cpu_us.append((time.process_time() - cpu) / requests * 1e6)
        self.rates.append(requests / (time.perf_counter() - wall))

    async def _drive(self, send: Send, requests: int) -> None:
        numbers = iter(range(requests))

        async def worker() -> None:
            for number in numbers:
                await send(number)

        await asyncio.gather(*(worker() for _ in range(self.in_flight)))


def request(number: int) -> GenerateRequest:
    return GenerateRequest(
        PROMPT, SamplingParams(max_new_tokens=64, stop_token_ids=(2,)), draw=number
    )


PROMPT = np.arange(PROMPT_TOKENS, dtype=np.int32)


# --- the clients ----------------------------------------------------------------------------------


@asynccontextmanager
async def bare(url: str, config: EngineConfig) -> AsyncIterator[Send]:
    body = orjson.loads(orjson.dumps(encode(request(0), "0"), option=orjson.OPT_SERIALIZE_NUMPY))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def send(_: int) -> object:
            headers = {"Authorization": f"Bearer {KEYS.api}", "Content-Type": "application/json"}
            async with session.post(
                f"{url}/generate", data=orjson.dumps(body), headers=headers
            ) as response:
                return orjson.loads(await response.read())

        yield send


@asynccontextmanager
async def httpx(url: str, config: EngineConfig) -> AsyncIterator[Send]:
    import httpx

    body = orjson.loads(orjson.dumps(encode(request(0), "0"), option=orjson.OPT_SERIALIZE_NUMPY))
    limits = httpx.Limits(max_connections=config.max_in_flight)
    async with httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None)) as client:

        async def send(_: int) -> object:
            return (await client.post(f"{url}/generate", json=body)).json()

        yield send


@asynccontextmanager
async def client(url: str, config: EngineConfig) -> AsyncIterator[Send]:
    """Check requests, make ids and seeds, check and decode answers."""
    server = ServerClient("null", url, KEYS, config=config)
    generation = await Generation.connect(server, str(model_folder()))
    try:
        yield lambda number: generation.one(request(number), cache_key="1")
    finally:
        await server.close()


class Standing:
    """Replaces `ExternalServer`, whose checks the null server would not pass."""

    name = "null"
    managed = False
    pid = None
    ended = None

    def __init__(self, url: str) -> None:
        self._url = url

    async def start(self) -> str:
        return self._url

    async def stop(self) -> None: ...

    async def kill(self) -> None: ...


@asynccontextmanager
async def dispatcher(url: str, config: EngineConfig) -> AsyncIterator[Send]:
    """Ask as training does: through the fleet's router, with retries, deadlines and pauses."""
    engine = SGLangEngine(
        Standing(url), config=config, keys=KEYS, model_path=str(model_folder()), mark=""
    )
    fleet = Fleet([engine], config)
    await fleet.start()
    try:
        fleet.draining(engine)
        await engine.pause("drain")
        await engine.begin_update([])
        await engine.end_update()
        await engine.set_version(1)
        await engine.resume()
        fleet.published(engine, 1)
        ask = Dispatcher(fleet, config, vocab_size=VOCAB)
        yield lambda number: ask.one(request(number))
    finally:
        await fleet.close()
        await engine.close()


SIDES = {"bare aiohttp": bare, "our client": client, "dispatcher": dispatcher, "httpx": httpx}


def model_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / "rlcore-null-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "model_type": "qwen3"}))
    return folder


# --- the measurement ------------------------------------------------------------------------------


async def measure(
    url: str, in_flight: int, requests: int, rounds: int, names: list[str]
) -> list[Side]:
    sides = {name: Side(name, in_flight) for name in names}
    # Nobody is there to publish to an engine that a busy machine made miss its health check.
    config = EngineConfig(kind="sglang", max_in_flight=in_flight, urls=[url], health_every_s=3600)
    async with AsyncExitStack() as stack:
        sends = {name: await stack.enter_async_context(SIDES[name](url, config)) for name in names}
        for round_ in range(rounds + 1):
            for name, side in sides.items():
                await side.run(
                    sends[name], max(in_flight, requests // (HTTPX_SHARE if name == "httpx" else 1))
                )
                if round_ == 0:  # connections are made, code is warm
                    side.rates.clear()
                    side.cpu_us.clear()
    return list(sides.values())


def table(sides: list[Side]) -> str:
    lines = [
        "| client | in flight | requests/s | of bare aiohttp | CPU a request, us |",
        "|---|---:|---:|---:|---:|",
    ]
    for side in sides:
        of_bare = side.rate / bare_rate(sides, side.in_flight)
        cpu = statistics.median(side.cpu_us)
        lines.append(
            f"| {side.what} | {side.in_flight} | {side.rate:.0f} | {of_bare:.2f} | {cpu:.0f} |"
        )
    return "\n".join(lines)


def bare_rate(sides: list[Side], in_flight: int) -> float:
    return next(
        side.rate for side in sides if side.what == "bare aiohttp" and side.in_flight == in_flight
    )


def main() -> None:
    """Print a table and the goals. Exits with 0 whether or not they are reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--requests", type=int, default=10_000, help="of each side and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--only", choices=SIDES, action="append", help="beside the bare loop; may be repeated"
    )
    options = parser.parse_args()

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the server inherits it
    names = [
        "bare aiohttp",
        *(name for name in SIDES if name != "bare aiohttp" and name in (options.only or SIDES)),
    ]
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
        sides = []
        for n in options.in_flight:
            asked = [name for name in names if name != "httpx" or n == min(options.in_flight)]
            sides += asyncio.run(measure(url, n, options.requests, options.rounds, asked))
    finally:
        server.communicate(timeout=10)
    mine = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    own = sum(usage.ru_utime + usage.ru_stime for usage in mine)
    others = max(0.0, (busy_seconds() - busy - own) / (time.monotonic() - started))

    where = machine()
    print(
        f"{where['cpu']}, {where['cores']} cores; one process each side; medians of"
        f" {options.rounds} rounds\n"
    )
    print(table(sides))
    goals = {
        f"{s.what} at {s.in_flight}": s.rate / bare_rate(sides, s.in_flight)
        for s in sides
        if s.what == "dispatcher"
    }
    for text, measured in goals.items():
        verdict = "reached" if measured >= GOAL else "MISSED"
        print(f"\n{text}: {measured:.2f} of bare aiohttp, goal {GOAL}: {verdict}", end="")
    remark = ": too many for numbers to count" if others > QUIET_CORES else ""
    print(f"\n\nMeanwhile other programs kept {others:.2f} cores busy{remark}.")
    if options.json is not None:
        rows = [
            {
                "client": s.what,
                "in_flight": s.in_flight,
                "requests_per_s": s.rates,
                "cpu_us": s.cpu_us,
            }
            for s in sides
        ]
        options.json.write_text(
            json.dumps(
                {"machine": where, "other_cores": others, "goals": goals, "rows": rows}, indent=1
            )
        )


if __name__ == "__main__":
    main()
