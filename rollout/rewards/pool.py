"""Runs reward functions in worker processes, each call under `reward.timeout_s`.

A function may hang inside C code or use up all memory, and only a process can be stopped. Each
worker is a fresh interpreter: it is not forked from a threaded parent, and does not import the
caller's main script again.

`pebble.ProcessPool` is weaker: spawned workers import the main script again, a timeout leaves the
processes that a function started, and a function that cannot be imported surfaces as a broken pool
without its name.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from rlcore.boundary.child_environment import allowed_environment
from rlcore.data.sample import Sample
from rlcore.deadlines import CANCEL_S, REWARD_START_S, WORKER_ENDS_S
from rlcore.errors import ConfigError, DeadlineExceeded, RunFailed
from rlcore.timeline.recorder import RECORDER, TrackAllocator, now, of_group
from rollout.asyncio_utils import cancel, has_ended, kill_process, within
from rollout.rewards.base import RewardFailure, RewardPart, Score, checked, each
from rollout.rewards.worker import HEADER, pack

MAX_ANSWER = 1 << 20  # bytes of an answer; a verdict's `info` is far smaller
# {part: (import path, keyword arguments)}
Functions = Mapping[str, tuple[str, Mapping[str, Any]]]
# a worker is one of many on its machine, so numerical libraries use one thread each
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class BadAnswer(Exception):
    """The worker's socket carried something other than the answer to the call."""


@dataclass(eq=False)
class Worker:
    """A worker process, which serves one call at a time."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def start(
        cls, functions: Functions, memory_gb: float, environment: Sequence[str]
    ) -> Worker:
        """Start a process that has imported `functions`.

        `environment` names its additional environment variables.

        Raises ConfigError if a function cannot be imported, RunFailed if the process dies.
        """
        worker = await cls._spawn(environment)
        names = ", ".join(path for path, _ in functions.values())
        setup = {
            "functions": {part: (name, dict(args)) for part, (name, args) in functions.items()},
            "sys_path": list(sys.path),
            "memory_gb": memory_gb,
        }
        try:
            reply = await within(
                REWARD_START_S,
                worker._exchange(setup),
                lambda: f"a reward worker has not imported {names} in {REWARD_START_S:.0f} s",
            )
        except (EOFError, ConnectionError, BadAnswer) as error:
            raise RunFailed(
                f"a reward worker died at its start, exit code {await worker.end()}: see the log"
            ) from error
        except BaseException:
            await worker.kill()
            raise
        if reply.get("problem") is not None:
            await worker.kill()
            raise ConfigError(str(reply["problem"]))
        return worker

    @classmethod
    async def _spawn(cls, environment: Sequence[str]) -> Worker:
        path = os.pathsep.join(path for path in sys.path if path)
        allowed = allowed_environment(environment, key="reward.environment")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "rollout.rewards.worker",
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    # redirect a function's prints to the log
                    stdout=2,
                    env={**allowed, **ONE_THREAD, "PYTHONPATH": path},
                    pass_fds=(theirs.fileno(),),
                    # a separate process group, since we handle Ctrl-C ourselves
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    async def call(self, part: str, sample: Sample, timeout_s: float) -> Score:
        """The score, or the failure. After a timeout or a death the worker is dead."""
        # identifies the answer: a frame written by another process does not contain it
        identity = secrets.token_hex(8)
        try:
            reply = await within(timeout_s, self._exchange((identity, part, sample)), lambda: "")
            return _score(reply, identity)
        except DeadlineExceeded:
            await self.kill()
            return RewardFailure("timeout", f"no score after {timeout_s:g} s (reward.timeout_s)")
        except BadAnswer as error:
            await self.kill()
            return RewardFailure("error", f"its worker process answered nonsense: {error}")
        except (EOFError, ConnectionError):
            return RewardFailure(
                "error", f"its worker process died with exit code {await self.end()}"
            )
        except BaseException:
            # an unread answer would be taken for the answer to the next call
            await self.kill()
            raise

    async def _exchange(self, message: object) -> dict[str, Any]:
        """Send a request and return the answer. Raises EOFError if the process has ended."""
        self.writer.write(pack(pickle.dumps(message, protocol=5)))
        reply = asyncio.ensure_future(self._receive())
        # a process that the function left behind may keep the socket open after the worker's end
        gone = asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait({reply, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                # the worker's last message may still be in transit
                await asyncio.wait({reply}, timeout=WORKER_ENDS_S)
            if not reply.done():
                raise EOFError
            return reply.result()
        finally:
            reply.cancel()
            gone.cancel()

    async def _receive(self) -> dict[str, Any]:
        (size,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        if size > MAX_ANSWER:
            raise BadAnswer(f"{size} bytes, expected at most {MAX_ANSWER}")
        try:
            reply = orjson.loads(await self.reader.readexactly(size))
        except orjson.JSONDecodeError as error:
            raise BadAnswer(f"no JSON: {str(error)[:80]}") from error
        if not isinstance(reply, dict):
            raise BadAnswer(f"a {type(reply).__name__}, expected an object")
        return reply

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.returncode is None

    async def end(self) -> int | None:
        """End a process that has closed its socket; return its own exit code."""
        await has_ended(self.process, WORKER_ENDS_S)
        return await self.kill()

    async def kill(self) -> int | None:
        """Kill the process and its descendants; return its exit code."""
        await kill_process(self.process, "reward worker")
        # the whole group has ended
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.writer.close()
        with suppress(ConnectionError):
            await asyncio.wait({asyncio.ensure_future(self.writer.wait_closed())}, timeout=CANCEL_S)
        return self.process.returncode


def _score(reply: dict[str, Any], identity: str) -> Score:
    if reply.pop("id", None) != identity:
        raise BadAnswer("an answer to an unknown call; does the function write to descriptors?")
    if "error" in reply:
        place = str(reply.get("place", ""))
        external = bool(reply.get("external"))
        return RewardFailure("error", str(reply["error"]), place, external)
    return checked(reply)


@dataclass
class RewardPool:
    """Keeps `size` workers that have imported `functions`.

    A worker that dies or overruns its deadline is replaced.
    """

    functions: Functions
    size: int
    timeout_s: float
    memory_gb: float = 8.0
    environment: Sequence[str] = ()
    # workers without a call; None stands for a worker that must be started first
    _idle: asyncio.Queue[Worker | None] = field(default_factory=asyncio.Queue)
    _workers: set[Worker] = field(default_factory=set)
    _starting: asyncio.Future[None] | None = None
    _tracks: TrackAllocator = field(default_factory=lambda: TrackAllocator("rewards", "worker"))

    async def start(self) -> None:
        """Start all workers at once; every part that shares the pool may call this."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._fill())
        await self._starting

    async def _fill(self) -> None:
        started = await asyncio.gather(
            *(self._start_worker() for _ in range(self.size)), return_exceptions=True
        )
        # raise only now, since `close` knows all started workers
        for worker in started:
            if isinstance(worker, BaseException):
                raise worker
            self._idle.put_nowait(worker)

    async def _start_worker(self) -> Worker:
        worker = await Worker.start(self.functions, self.memory_gb, self.environment)
        self._workers.add(worker)
        return worker

    async def score(self, part: str, sample: Sample) -> Score:
        """The score of one part. Its deadline excludes the time in the queue."""
        await self.start()
        asked = now()
        worker = await self._idle.get()
        lane = self._tracks.take()
        began = now()
        try:
            if worker is None:
                worker = await self._start_worker()
            return await worker.call(part, sample, self.timeout_s)
        finally:
            if worker is not None and not worker.alive:
                self._workers.discard(worker)
                worker = None
            self._idle.put_nowait(worker)
            args = {"sample": sample.index, "waited_s": round(began - asked, 6), **of_group()}
            RECORDER.add(self._tracks.track(lane), part, began, now(), **args)
            self._tracks.give_back(lane)

    async def close(self) -> None:
        """End all workers."""
        if self._starting is not None:
            await cancel(self._starting)
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        self._workers.clear()


class PooledPart(RewardPart):
    """A reward part that one function of the pool scores."""

    records_samples = True

    def __init__(self, name: str, pool: RewardPool) -> None:
        self._name = name
        self._pool = pool

    async def start(self) -> None:
        await self._pool.start()

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return await each(samples, partial(self._pool.score, self._name))

    async def close(self) -> None:
        await self._pool.close()
