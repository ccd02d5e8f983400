"""The streams of CUDA devices as threads, with many hardware queues or with a single one.

Under `CUDA_DEVICE_MAX_CONNECTIONS=1`, which Megatron needs under tensor parallelism, all streams of
a device share one hardware queue. Work then starts in the order in which the host enqueued it,
whatever its stream: work whose stream has not come so far, or that waits for an event, holds back
all that was enqueued later. A kernel that has started holds back nothing by itself, even if it
waits for a peer; the next work of its stream does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue
from typing import Any


class Queues(Enum):
    """The hardware queues of a device."""

    MANY = "many"  # each stream has one
    ONE = "one"
    SERIAL = "serial"  # stricter than any device: one, in which work holds back all until it ends


class Work:
    """Something on a stream, which follows `before` there."""

    def __init__(self, stream: Stream, run: Callable[[], Any], *, is_wait: bool) -> None:
        self.stream = stream
        self.run = run
        self.is_wait = is_wait
        self.before: Work | None = None
        self.done = threading.Event()


class Device:
    """A GPU, to which any thread gives work."""

    def __init__(self, queues: Queues = Queues.MANY) -> None:
        self.queues = queues
        self._lock = threading.Lock()
        self._program: SimpleQueue[Work] = SimpleQueue()
        self._given: list[Work] = []
        self.default = Stream(self)
        if queues is not Queues.MANY:
            threading.Thread(target=self._start_in_order, daemon=True).start()

    def give(self, work: Work) -> None:
        with self._lock:
            work.before = work.stream.newest
            work.stream.newest = work
            self._given = [one for one in self._given if not one.done.is_set()] + [work]
            (work.stream.ready if self.queues is Queues.MANY else self._program).put(work)

    def synchronize(self) -> None:
        """Wait for all that was enqueued so far, as cudaMalloc and cudaFree may do."""
        with self._lock:
            given = list(self._given)
        for work in given:
            work.done.wait()

    def _start_in_order(self) -> None:
        while True:
            work = self._program.get()
            if work.before is not None:
                work.before.done.wait()
            work.stream.ready.put(work)
            if work.is_wait or self.queues is Queues.SERIAL:
                work.done.wait()


class Stream:
    """Runs its work, one after the other. It has the methods of torch's stream that are used."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.newest: Work | None = None
        self.ready: SimpleQueue[Work] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self.ready.get()
            work.run()
            work.done.set()

    def kernel(self, run: Callable[[], Any]) -> None:
        self.device.give(Work(self, run, is_wait=False))

    def record_event(self) -> threading.Event:
        work = Work(self, lambda: None, is_wait=False)
        self.device.give(work)
        return work.done

    def wait_event(self, event: threading.Event) -> None:
        self.device.give(Work(self, event.wait, is_wait=True))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Meeting:
    """A collective: it ends where all of its ranks have begun it."""

    def __init__(self, ranks: int) -> None:
        self._missing = ranks
        self._changed = threading.Condition()

    def __call__(self) -> None:
        self.begin()
        self.wait()

    def begin(self) -> None:
        with self._changed:
            self._missing -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._missing <= 0)

    def end(self) -> None:
        """Let go whoever waits."""
        with self._changed:
            self._missing = 0
            self._changed.notify_all()
