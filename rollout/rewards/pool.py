"""Runs reward functions in worker processes, each call under `reward.timeout_s`.

A function may hang inside C code or eat all memory, and only a process can be stopped. Each worker
is a fresh interpreter, neither forked from a threaded parent nor re-importing the caller's main
script.

`pebble.ProcessPool` was tried instead, and is weaker: spawned workers import the main script again,
a timeout leaves the processes that a function started, and a function that cannot be imported
surfaces as a broken pool without its name.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlcore.data.sample import Sample
from rlcore.deadlines import CANCEL_S, REWARD_START_S
from rlcore.errors import ConfigError, DeadlineExceeded, RunFailed
from rollout.asyncio_utils import within
from rollout.rewards.base import RewardFailure, RewardPart, Score
from rollout.rewards.worker import HEADER, pack

STREAM_LIMIT = 1 << 24
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(eq=False)
class Worker:
    """A worker process, which serves one call at a time."""

    process: asyncio.subprocess.Process
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    @classmethod
    async def start(cls, functions: Mapping[str, tuple[str, dict[str, Any]]]) -> Worker:
        """Start a process that has imported `functions`.

        Raises ConfigError when a function cannot be imported, RunFailed when the process dies.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollout.rewards.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                **ONE_THREAD,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
            limit=STREAM_LIMIT,
            # a group of its own: Ctrl-C is ours, and `kill` takes grandchildren too
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        worker = cls(process, process.stdin, process.stdout)
        try:
            problem = await within(
                REWARD_START_S,
                worker._exchange({"functions": dict(functions), "sys_path": list(sys.path)}),
                lambda: (
                    "a reward worker has not imported"
                    f" {', '.join(p for p, _ in functions.values())} in {REWARD_START_S:.0f} s"
                ),
            )
        except (EOFError, ConnectionError) as error:
            raise RunFailed(
                f"a reward worker died at its start, exit code {await worker.kill()}: see the log"
            ) from error
        except BaseException:
            await worker.kill()
            raise
        if problem is not None:
            await worker.kill()
            raise ConfigError(problem)
        return worker

    async def call(self, part: str, sample: Sample, timeout_s: float) -> Score:
        """The score, or why there is none. After a timeout or a death the worker is dead."""
        try:
            score: Score = await within(timeout_s, self._exchange((part, sample)), lambda: "")
            return score
        except DeadlineExceeded:
            await self.kill()
            return RewardFailure("timeout", f"no score after {timeout_s:g} s (reward.timeout_s)")
        except (EOFError, ConnectionError):
            return RewardFailure(
                "error", f"its worker process died with exit code {await self.kill()}"
            )
        except BaseException:
            # an answer that is not read would be taken for the answer to the next call
            await self.kill()
            raise

    async def _exchange(self, message: object) -> Any:
        self.stdin.write(pack(message))
        await self.stdin.drain()
        (size,) = HEADER.unpack(await self.stdout.readexactly(HEADER.size))
        return pickle.loads(await self.stdout.readexactly(size))

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.returncode is None

    async def kill(self) -> int:
        """End the process and all that it started; returns its exit code."""
        with suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(self.process.pid, signal.SIGKILL)
        code = await self.process.wait()
        self.stdin.close()
        # Both pipes must be seen to close, or the transport outlives the loop.
        await asyncio.wait(
            [
                asyncio.ensure_future(self.stdout.read()),
                asyncio.ensure_future(_closed(self.stdin)),
            ],
            timeout=CANCEL_S,
        )
        return code


async def _closed(stream: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):  # the reader was killed
        await stream.wait_closed()


@dataclass
class RewardPool:
    """Keeps `size` workers that know `functions` ({part: (import path, arguments)}).

    A worker that dies or overruns its deadline is replaced.
    """

    functions: Mapping[str, tuple[str, dict[str, Any]]]
    size: int
    timeout_s: float
    # workers without a call; None stands for a worker that must be started first
    _idle: asyncio.Queue[Worker | None] = field(default_factory=asyncio.Queue)
    _workers: set[Worker] = field(default_factory=set)
    _starting: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Start all workers at once; every part that shares the pool may call this."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._fill())
        await self._starting

    async def _fill(self) -> None:
        started = await asyncio.gather(
            *(self._start_worker() for _ in range(self.size)), return_exceptions=True
        )
        for worker in started:  # only now, when `close` knows all workers that did start
            if isinstance(worker, BaseException):
                raise worker
            self._idle.put_nowait(worker)

    async def _start_worker(self) -> Worker:
        worker = await Worker.start(self.functions)
        self._workers.add(worker)
        return worker

    async def score(self, part: str, sample: Sample) -> Score:
        """The score of one part. Its deadline does not count the time in the queue."""
        await self.start()
        worker = await self._idle.get()
        try:
            if worker is None:
                worker = await self._start_worker()
            return await worker.call(part, sample, self.timeout_s)
        finally:
            if worker is not None and not worker.alive:
                self._workers.discard(worker)
                worker = None
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """End all workers."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting}, timeout=CANCEL_S)
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        self._workers.clear()


class PooledPart(RewardPart):
    """A reward part that one function of the pool scores."""

    def __init__(self, name: str, pool: RewardPool) -> None:
        self._name = name
        self._pool = pool

    async def start(self) -> None:
        """See `RewardPart`."""
        await self._pool.start()

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """See `RewardPart`."""
        return list(
            await asyncio.gather(*(self._pool.score(self._name, sample) for sample in samples))
        )

    async def close(self) -> None:
        """See `RewardPart`."""
        await self._pool.close()
