"""Faults of engines during a run: killed and stopped processes, and a proxy that lies."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import psutil
import pytest
from aiohttp import web

from rollout.engines.embedded.factory import EmbeddedServer
from rollout.engines.sglang.server_process import ManagedServer
from rollout.fleet.engine_states import State
from rollout.service import RolloutService

Fault = Literal["SIGKILL", "SIGSTOP", "500", "garbage", "slow"]
HIT_S = 0.02  # into a step's generation, for signals
UNLIMITED = aiohttp.ClientTimeout(total=None)
UP_S = 240.0  # for all engines to run again before the next fault


class Proxy:
    """Passes every call on to `target`, but answers /generate itself while `fault` is set."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.fault = ""

    async def start(self) -> str:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _serve(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.fault and request.path == "/generate":
            if self.fault == "500":
                return web.Response(status=500, text="Internal Server Error")
            if self.fault == "garbage":
                return web.Response(text='{"result": [{"tokens": "!!", "meta_info": 7')
            await asyncio.sleep(3600)
        headers = {
            name: request.headers[name]
            for name in ("Authorization", "Content-Type")
            if name in request.headers
        }
        try:
            async with aiohttp.request(
                request.method,
                self.target + request.path_qs,
                data=body,
                headers=headers,
                timeout=UNLIMITED,
            ) as answer:
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type=answer.content_type
                )
        except aiohttp.ClientError:
            assert request.transport is not None
            request.transport.abort()  # as the server behind would have
            raise


@dataclass
class FaultInjector:
    """Injects faults by step: each hits one engine, or all, during the step's generation.

    All engines serve when a fault happens.
    """

    plan: dict[int, tuple[int | None, Fault]]
    settle: int = 0  # a further step whose generation waits for all engines
    hit_s: float = HIT_S  # 0: before the generation begins, however fast it is
    done: list[Fault] = field(default_factory=list)
    proxies: dict[str, Proxy] = field(default_factory=dict)  # by engine, of its present process
    hits: list[threading.Timer] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)  # steps

    def install(
        self, patch: pytest.MonkeyPatch, servers: type[EmbeddedServer] | type[ManagedServer]
    ) -> None:
        """Patch the service and the start of `servers`: a proxy stands before each."""
        original_next = RolloutService.next_step
        original_start: Callable[[Any], Awaitable[str]] = servers.start

        async def started(server: Any) -> str:
            proxy = self.proxies[server.name] = Proxy(await original_start(server))
            return await proxy.start()

        def next_step(service: RolloutService, step: int) -> Any:
            if step not in self.asked:  # a fault hits the step that it was planned for
                self.asked.add(step)
                for hit in self.hits:
                    hit.join()
            if (step in self.plan or step == self.settle) and not self._all_serve(service):
                return None  # bring them the weights first
            if step in self.plan:
                self._inject(service, *self.plan.pop(step))
            return original_next(service, step)

        patch.setattr(servers, "start", started)
        patch.setattr(RolloutService, "next_step", next_step)

    def _all_serve(self, service: RolloutService) -> bool:
        deadline = time.monotonic() + UP_S
        while any(m.health.state in (State.DEAD, State.STARTING) for m in service.fleet.members):
            assert time.monotonic() < deadline, [
                (m.name, str(m.health.state), m.health.why) for m in service.fleet.members
            ]
            time.sleep(0.05)
        return all(m.health.state is State.SERVING for m in service.fleet.members)

    def _inject(self, service: RolloutService, number: int | None, fault: Fault) -> None:
        self.done.append(fault)
        engines: list[Any] = service.fleet.engines
        for engine in engines if number is None else [engines[number]]:
            if fault in ("SIGKILL", "SIGSTOP"):
                pid = getattr(engine, "server", engine).pid
                hit = threading.Timer(self.hit_s, signal_all, (pid, signal.Signals[fault]))
                hit.start()
                self.hits.append(hit)
            else:
                self.proxies[engine.name].fault = fault
        if not self.hit_s:
            for hit in self.hits:
                hit.join()


def signal_all(pid: int, number: signal.Signals) -> None:
    """Signal a process. Its children are stopped with it, but a kill leaves them to us."""
    if number is signal.SIGSTOP:
        for child in psutil.Process(pid).children(recursive=True):
            child.send_signal(number)
    os.kill(pid, number)
