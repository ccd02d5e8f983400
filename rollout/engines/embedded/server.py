"""The embedded engine as a process: `python -m rollout.engines.embedded.server < config.json`.

A small HTTP server, JSON both ways, one route for each verb of `rlcore.interfaces.RolloutEngine`,
and `join_group`. Weights do not come over HTTP: `receive_bucket` takes them from the process group
(process_group.py) that `join_group` entered.

The process ends when its parent does. It reports its port on a pipe: only the kernel can pick a
free port without a race.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch
from aiohttp import web
from pydantic import TypeAdapter
from torch import Tensor

from rlcore.boundary.http_server import BodyRefused, HttpServer, bound, read_body
from rlcore.boundary.process_tree import die_with_parent
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.training import TLSConfig
from rlcore.errors import RlcoreError, RunFailed, UserError
from rlcore.tls import server_context
from rlcore.weights import Bucket
from rollout.engines.bucket_turns import BucketTurns, OutOfTurn
from rollout.engines.embedded.client import decode_request, encode_completion
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.weight_sync.digests import Digest
from rollout.weight_sync.process_group import GroupAddress, WeightGroup, gpu_identity

MAX_BODY = 1 << 30
PARENT_POLL_S = 0.5

logger = logging.getLogger("rollout.engines.embedded.server")
Verb = Callable[[dict[str, Any]], Awaitable[Any]]


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of a server process, JSON on its standard input."""

    name: str
    model_path: str
    engine: EngineConfig
    key: str  # carried by every request
    dtype: str
    tokenizer: str | None = None
    alpha: float | None = None  # `policy.lora.alpha`
    fp32_head: bool = False  # `policy.logprobs.fp32_head`
    policies: dict[str, str] = field(default_factory=dict)  # `rollout.policies`
    log: str = os.devnull
    tls: TLSConfig | None = None
    # Set when the process is started.
    ready_fd: int = -1  # gets {"port": ...} once the server serves
    parent_pid: int = -1  # the server ends with this process

    def to_json(self) -> bytes:
        """Write what `main` reads."""
        return TypeAdapter(ServerConfig).dump_json(self)


class EngineServer:
    """One engine behind HTTP."""

    def __init__(self, engine: EmbeddedEngine, key: str) -> None:
        self.engine = engine
        self._key = f"Bearer {key}"
        self._group: WeightGroup | None = None
        # bucket index -> bytes
        self._sizes: dict[int, int] = {}
        # Copies the newest bucket into the model, and computes its digest.
        self._applying: asyncio.Future[None] | None = None
        # of the current update's buckets
        self._digest: Digest | None = None
        self._turns = BucketTurns()
        self.verbs: dict[str, Verb] = {
            "generate": self._generate,
            "pause": lambda body: engine.pause(body["mode"]),
            "resume": lambda _: engine.resume(),
            "abort": lambda body: engine.abort(body["rids"]),
            "progress": lambda _: engine.progress(),
            "begin_update": self._begin_update,
            "receive_bucket": self._receive_bucket,
            "received_digest": lambda _: self._received_digest(),
            "end_update": lambda _: self._end_update(),
            "set_version": lambda body: engine.set_version(body["version"]),
            "release_memory": lambda body: engine.release_memory(body["tags"]),
            "resume_memory": lambda body: engine.resume_memory(body["tags"]),
            "join_group": self._join_group,
            "health": lambda _: self._health(),
        }

    async def serve(self, request: web.BaseRequest) -> web.Response:
        """Answer a request: POST, with a verb as its path."""
        if not hmac.compare_digest(
            request.headers.get("Authorization", "").encode(errors="surrogateescape"),
            self._key.encode(),
        ):
            return refused("the API key is missing or wrong", "UserError", 401)
        name = request.path.removeprefix("/")
        verb = self.verbs.get(name)
        if verb is None or request.method != "POST":
            error = f"no route {request.method} {request.path}; there are {', '.join(self.verbs)}"
            return refused(error, "UserError", 404)
        try:
            body = orjson.loads(await read_body(request, MAX_BODY) or b"{}")
            return reply({"result": await verb(body)}, 200)
        except RlcoreError as error:
            status = 400 if isinstance(error, UserError) else 500
            return refused(str(error), type(error).__name__, status)
        except BodyRefused as error:
            return refused(str(error), "UserError", error.status)
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
            logger.warning("/%s: bad request: %r", name, error)
            return refused(f"bad request: {type(error).__name__}: {error}", "UserError", 400)
        # An error of torch, such as out of memory; the caller decides what follows.
        except RuntimeError as error:
            logger.exception("/%s", name)
            return refused(f"{type(error).__name__}: {error}", "RunFailed", 500)

    async def _generate(self, body: dict[str, Any]) -> Any:
        results = await self.engine.generate(
            [decode_request(request) for request in body["requests"]]
        )
        return [
            [encode_completion(completion) for completion in completions] for completions in results
        ]

    async def _begin_update(self, body: dict[str, Any]) -> None:
        buckets = TypeAdapter(list[Bucket]).validate_python(body["buckets"])
        self._turns.begin()
        # The bucket belongs to a cancelled update.
        await asyncio.gather(self._applied(), return_exceptions=True)
        await self.engine.begin_update(buckets)
        self._sizes = {bucket.index: bucket.num_bytes for bucket in buckets}
        self._digest = None

    async def _join_group(self, body: dict[str, Any]) -> None:
        if self._group is not None:
            await asyncio.to_thread(self._group.close)
            self._group = None
        address = GroupAddress(**body["address"])
        self._group = await asyncio.to_thread(
            WeightGroup, address, body["rank"], device=self.engine.device
        )

    async def _receive_bucket(self, body: dict[str, Any]) -> None:
        """Answer when the bucket was received.

        The bucket is copied into the model, and its digest computed, while the next one arrives;
        the next call reports a failure of that. Calls may arrive before the last one was answered.
        """
        try:
            async with self._turns.take(index := body["index"]):
                if self._group is None:
                    raise RunFailed(
                        f"{self.engine.name}: is in no weight group; call join_group first"
                    )
                if index not in self._sizes:
                    raise RunFailed(
                        f"{self.engine.name}: bucket {index} is not in the layout of begin_update"
                    )
                flat = await asyncio.to_thread(self._group.receive, self._sizes[index])
                await self._applied()
                self._applying = asyncio.ensure_future(self._apply(index, flat, body.get("order")))
        except OutOfTurn as error:
            raise RunFailed(f"{self.engine.name}: {error}") from error

    async def _apply(self, index: int, flat: Tensor, order: str | None) -> None:
        if order is not None:
            if self._digest is None or self._digest.order != order:
                self._digest = Digest(order)
            await asyncio.to_thread(self._digest.add, flat)
        await self.engine.receive_bucket(index, flat)

    async def _received_digest(self) -> str:
        await self._applied()
        return "" if self._digest is None else self._digest.read()

    async def _end_update(self) -> None:
        await self._applied()
        await self.engine.end_update()

    async def _applied(self) -> None:
        applying = self._applying
        self._applying = None
        if applying is not None:
            await applying

    async def _health(self) -> dict[str, Any]:
        device = self.engine.device
        return {
            "name": self.engine.name,
            "pid": os.getpid(),
            "device": str(device),
            "gpu": gpu_identity(device),
            "version": self.engine.version,
            "base": self.engine.holds_base,
        }


def refused(error: str, kind: str, status: int) -> web.Response:
    """Return a response with an error, which the client raises as a `kind`."""
    return reply({"error": error, "type": kind}, status)


def reply(body: Any, status: int) -> web.Response:
    """Return a JSON response."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def follow_parent(pid: int) -> None:
    """End with the parent: by a signal of the kernel on Linux, and by polling everywhere."""
    die_with_parent()

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


async def serve(config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    engine = EmbeddedEngine(
        config.model_path,
        config=config.engine,
        dtype=config.dtype,
        tokenizer=config.tokenizer,
        alpha=config.alpha,
        fp32_head=config.fp32_head,
        policies=config.policies,
        name=config.name,
    )
    await engine.start()
    tls = None if config.tls is None else server_context(config.tls)
    server = HttpServer(EngineServer(engine, config.key).serve)
    runner = await server.listen(bound(config.engine.host), closes_s=1.0, tls=tls)
    port = runner.addresses[0][1]
    logger.info(
        "%s serves on %s:%d (%s, %s threads)",
        config.name,
        config.engine.host,
        port,
        engine.device,
        torch.get_num_threads(),
    )
    with os.fdopen(config.ready_fd, "wb") as ready:
        ready.write(orjson.dumps({"port": port}) + b"\n")
    await stop.wait()
    await engine.close()
    await runner.cleanup()


def main() -> None:
    """Read the configuration from standard input, and serve."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # The configuration may come seconds after the start, so import first.
    import transformers.modeling_utils  # noqa: F401

    config = TypeAdapter(ServerConfig).validate_json(sys.stdin.buffer.read())
    log = os.open(config.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for output in (sys.stdout, sys.stderr):
        os.dup2(log, output.fileno())
    follow_parent(config.parent_pid)
    # Before the model is built: torch's thread pool keeps the size that it has at first use.
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    asyncio.run(serve(config))


if __name__ == "__main__":
    main()
