"""A checkpoint that a thread writes while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from backends.megatron.checkpoint.errors import write_errors
from backends.megatron.checkpoint.shards import PlannedShards
from rlcore.deadlines import CHECKPOINT_TENSOR_S


class PendingCheckpoint:
    """This rank's part of a checkpoint, written by a thread that starts here.

    It is a thread and no process, since a fork can deadlock in a trainer with threads. It calls
    neither Megatron nor a collective, and releases the interpreter while the disk works.
    """

    def __init__(
        self, folder: Path, planned: Sequence[PlannedShards], seal: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._planned = planned
        self._seal = seal
        self._seconds: float | None = None
        self._failure: Exception | None = None
        self._cancelled = threading.Event()
        # A daemon: a disk that hangs must not keep the process.
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        began = time.perf_counter()
        try:
            with write_errors(self._folder):
                for part in self._planned:
                    part.write(self._cancelled)
        except Exception as error:  # noqa: BLE001  # raised by `written`, on the thread that asks
            self._failure = error
        self._seconds = time.perf_counter() - began

    def written(self) -> float | None:
        """The seconds that the writing took; None while it goes on.

        Raises RunFailed naming the folder and the reason.
        """
        if self._seconds is not None and self._failure is not None:
            raise self._failure
        return self._seconds

    def finish(self) -> None:
        """Complete the checkpoint, when `written` has returned a number on every rank.

        Collective; call inside `megatron_device`. Raises RunFailed naming folder and reason.
        """
        with write_errors(self._folder):
            for part in self._planned:
                part.finish()
        self._seal()

    def cancel(self) -> None:
        """Stop writing after the current tensor, and wait for that."""
        self._cancelled.set()
        self._thread.join(CHECKPOINT_TENSOR_S)
