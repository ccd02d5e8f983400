"""One trainer process: who it is, how it hears signals, and how it leaves."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from rlcore.config import Config
from rlcore.config.sections.run import RunConfig
from rlcore.errors import DeadlineExceeded, RlcoreError, RunFailed
from rlcore.launch.attempts import FIRST, Attempt, join_attempt
from rlcore.launch.heartbeat import Heartbeat, HeartbeatMonitor
from rlcore.launch.logs import RankLog, describe, rank_log
from rlcore.launch.environment import orphaned, supervised, under_torchrun
from rlcore.launch.signals import hearing
from rlcore.runs.rng import seed_rng
from rlcore.trainer.rank_sync import Failure, LocalStore, RankSync

STORE_S = 60.0  # to reach a store that is known to be there
# Read by libraries when they are first used on a GPU, so set before that.
DETERMINISTIC_LIBRARIES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS refuses
    # else it chooses by measured times, and sums in another order
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine's attention
}


@dataclass(frozen=True)
class Process:
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    sync: RankSync
    log: RankLog
    # said where the main thread cannot any more
    last_words: list[Callable[[Failure], None]] = field(default_factory=list)
    heartbeat: Heartbeat | None = None
    attempt: Attempt = FIRST

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """An error in here is told to the other ranks at once; one that a peer's failure made
        becomes `PeerFailed`.
        """
        try:
            yield
        except Exception as error:
            if self.heartbeat is not None:
                self.heartbeat.leaving()
            cause = _in_our_words(self.sync.explain(error), self)
            self.sync.fail(cause)
            if cause is error:
                raise
            raise cause from error


def pick_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def join(config: Config) -> Iterator[Process]:
    """This process's place among the trainer's ranks; a run of one process needs no environment."""
    with rank_log(int(os.environ["RANK"]) if under_torchrun() else 0) as log:
        _set_up_torch(config.run)
        if under_torchrun():
            with _among_ranks(config, log) as process:
                yield process
        else:
            with _signals(sync := RankSync(LocalStore(), 0, 1)):
                yield Process(0, 1, 0, pick_device(0), sync, log)


def _set_up_torch(run: RunConfig) -> None:
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    if run.deterministic:
        for name, value in DETERMINISTIC_LIBRARIES.items():
            os.environ.setdefault(name, value)
        torch.backends.cudnn.benchmark = False
        # An operation that has only another kind is used all the same, with a warning in the log:
        # sums in a metric, say.
        torch.use_deterministic_algorithms(True, warn_only=True)
    seed_rng(run.seed)


@contextmanager
def _among_ranks(config: Config, log: RankLog) -> Iterator[Process]:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cluster = config.cluster
    device = pick_device(local_rank)
    launcher, rank, world_size, attempt = _meet(
        device, cluster.start_timeout_s, cluster.collective_timeout_s
    )
    store = dist.PrefixStore(attempt.prefix, launcher)
    sync = RankSync(store, rank, world_size)
    watched = [0] if rank else range(1, world_size)
    last_words: list[Callable[[Failure], None]] = [log.dump_stacks]
    if rank == 0 and not supervised():
        last_words.append(
            lambda failure: print(
                f"rlcore: {describe(failure, config.run)}", file=sys.stderr, flush=True
            )
        )
    # A connection of its own: one that the main thread waits on would hold the beats back.
    beats = store.clone()  # type: ignore[attr-defined]  # torch's type stub lacks it
    watch = HeartbeatMonitor(
        beats, watched, limit_s=cluster.heartbeat_timeout_s, start_limit_s=cluster.start_timeout_s
    )
    heartbeat = Heartbeat(beats, sync, watch, last_words)
    process = Process(
        rank, world_size, local_rank, device, sync, log, last_words, heartbeat, attempt
    )
    try:
        with process.blaming(), _signals(sync):
            yield process
    except BaseException as error:
        sync.fail(error)  # an interrupt is no failure that `blaming` sees
        heartbeat.stop(in_peace=False)
        # at once: a polite farewell would wait for peers that are stuck in a collective
        raise
    heartbeat.stop(in_peace=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(
    device: torch.device, start_timeout_s: float, collective_timeout_s: float
) -> tuple[dist.Store, int, int, Attempt]:
    """Join the default process group; the launcher's store, this rank, the world size, and which
    start of the ranks it is.

    Raises:
        RunFailed: the others cannot be reached, or do not come.
    """
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if orphaned():
        raise RunFailed(
            f"rank {os.environ['RANK']} has lost its supervisor before it met the other ranks"
        )
    store_s = min(start_timeout_s, STORE_S) if supervised() else start_timeout_s
    try:
        store, rank, world_size = next(
            dist.rendezvous("env://", timeout=timedelta(seconds=store_s))
        )
        attempt = join_attempt(store, rank, world_size, timeout_s=start_timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"{attempt.prefix}/ranks", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=collective_timeout_s),
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise RunFailed(
            f"rank {os.environ['RANK']} cannot meet the other ranks at {address}: {reason}"
        ) from error
    return store, rank, world_size, attempt


def _in_our_words(error: BaseException, process: Process) -> BaseException:
    """A collective that broke or took too long, without a peer that said why; anything else stays
    as it is.
    """
    text = str(error)
    if (
        isinstance(error, RlcoreError)
        or not isinstance(error, RuntimeError)
        or process.world_size == 1
    ):
        return error
    if "gloo" not in text.lower() and not isinstance(error, dist.DistError):
        return error
    # gloo begins with a place in its source and ends with advice.
    reason = re.sub(r"^\[\S+:\d+\] ", "", text.splitlines()[0]).partition(". This is typically")[0]
    if "timed out" in text.lower() or "timeout" in text.lower():
        return DeadlineExceeded(
            f"rank {process.rank} waited for its peers in a collective for longer than"
            f" cluster.collective_timeout_s: {reason}"
        )
    quiet = [] if process.heartbeat is None else process.heartbeat.quiet
    gone = f"; not heard of any more: rank {', '.join(map(str, quiet))}" if quiet else ""
    return RunFailed(f"rank {process.rank} lost a peer in a collective: {reason}{gone}")


@contextmanager
def _signals(sync: RankSync) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C ask for a clean end after this step; a second Ctrl-C interrupts
    at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, _frame: object) -> None:
        sync.interrupt()
        signal.signal(number, signal.default_int_handler)

    with hearing(ask):
        yield
