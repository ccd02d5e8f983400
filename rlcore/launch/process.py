"""One trainer process: who it is, where it logs, how it hears signals, and how it leaves."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from rlcore.config import Config
from rlcore.control import Control, LocalStore, Store
from rlcore.runs.rng import seed_rng

BEAT_S = 2.0
LEAVE_S = 5.0           # from the loss of the store to the end of a process that has not noticed it otherwise
logger = logging.getLogger(__name__)
_open_logs: list[TextIO] = []       # faulthandler writes to the descriptor: it must stay open


@dataclass(frozen=True)
class Process:
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control: Control


def under_torchrun() -> bool:
    """True when somebody (torchrun, or our own supervisor) has told this process its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def pick_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def join(config: Config) -> Iterator[Process]:
    """This process's place among the trainer's ranks; a run of one process needs no environment."""
    # Megatron warns of every package that it can do without: into the log with that, once it is open.
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").addHandler(logging.NullHandler())
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")     # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    seed_rng(config.run.seed)
    if not under_torchrun():
        with _signals(control := Control(LocalStore(), 0, 1)):
            yield Process(0, 1, 0, pick_device(0), control)
        return
    device = pick_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=config.cluster.collective_timeout_s),
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"rlcore/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _default_store())
    control = Control(store, rank, world_size)
    heart = _Heart(store, rank)
    try:
        with _signals(control):
            yield Process(rank, world_size, device.index or 0, device, control)
    except BaseException as error:
        with suppress(dist.DistError):      # the store's host may be what failed
            control.fail(error)
        raise
    finally:
        heart.stop()
        # A rank that failed leaves at once: a polite farewell would wait for peers that are stuck in a collective.
        if sys.exc_info()[0] is None and dist.is_initialized():
            dist.destroy_process_group()


def _default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


class _Heart:
    """Says every two seconds that this process runs; the supervisor takes silence for a hang."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._key = store, f"beat/{rank}"
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._store.set(self._key, str(time.time()))
            except dist.DistError:      # recovery: none; the store's host is gone, and the run with it
                self._leave()
                return
            self._stopped.wait(BEAT_S)

    def _leave(self) -> None:
        """Nobody supervises this process any more: one that generates, or waits for a peer, must not live on as an orphan."""
        if not self._stopped.wait(LEAVE_S):
            logger.error("the process that holds the run's store has died (a launcher, or node 0): this one leaves")
            os._exit(1)

    def stop(self) -> None:
        self._stopped.set()


@contextmanager
def _signals(control: Control) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C ask for a clean end after this step; a second Ctrl-C interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, _frame: object) -> None:
        control.interrupt()
        signal.signal(number, signal.default_int_handler)

    previous = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def open_log(folder: Path, rank: int) -> None:
    """This rank's log. Rank 0 also keeps the terminal; the others' whole output goes to their file.

    `kill -USR1 PID` writes the stack of every thread into it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"rank_{rank}.log").open("a", buffering=1)
    _open_logs.append(file)
    if rank != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(
        stream=file, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)
