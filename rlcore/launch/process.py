"""One trainer process: it joins the other ranks, handles signals, and leaves."""

from __future__ import annotations

import logging
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from rlcore.config import Config
from rlcore.config.checks.engine import argument_name
from rlcore.config.derived import in_weight_group
from rlcore.config.engine_registry import KINDS
from rlcore.config.secrets import hide_secrets
from rlcore.config.sections.training import ClusterConfig
from rlcore.deadlines import SAME_SIGNAL_S, STORE_S
from rlcore.errors import ConfigError, DeadlineExceeded, RlcoreError, RunFailed
from rlcore.hf_config.read import text_model_size
from rlcore.launch.environment import (
    INTERFACE,
    STORE_FOLDER,
    allow_connections,
    first_on_node,
    is_rank,
    orphaned,
    supervised,
    threads_at_most,
)
from rlcore.launch.heartbeat import Heartbeat, HeartbeatMonitor
from rlcore.launch.logs import ProcessLog, describe_failure, rank_log
from rlcore.launch.signals import handling_stop_signals
from rlcore.launch.torchrun_attempts import FIRST, Attempt, join_attempt
from rlcore.runs.state_codec import seed_rng
from rlcore.stores import FolderStore, Store, few_store_requests, keys_under
from rlcore.timeline.start import START
from rlcore.trainer.rank_sync import Failure, RankSync
from rollout.weight_sync.process_group import (
    CHOSEN_INTERFACE,
    SHARED_GPU,
    SHARED_SINCE,
    interface_of,
    is_here,
    is_loopback,
    own_address,
    ranks_share_gpus,
)

logger = logging.getLogger(__name__)

# Libraries read these variables at their first use of a GPU.
DETERMINISTIC_LIBRARIES = {
    # Without it cuBLAS raises an error.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # By default NCCL chooses the algorithm, and so the order of sums, by measured times.
    "NCCL_ALGO": "Ring",
    # Read by Transformer Engine's attention.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}

# The choice of threads: the time ratio that several must beat, how often each is tried, the widest
# layer and the work of a measurement.
WORTHWHILE = 0.8
THREAD_TRIALS = 7
MAX_PROBED = 1024
PROBE_FLOPS = 100_000_000

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"

# Arguments with which SGLang itself switches on the handles that NCCL_CUMEM_ENABLE=1 chooses.
CUMEM_ARGUMENTS = ("enable_symm_mem", "enable_kv_cache_sharding")

# Gloo groups that may hold all ranks: the default group and a replica's. NCCL has sockets, too.
GROUPS_OF_ALL_RANKS = 2


@dataclass(frozen=True)
class Process:
    """This process's device, and its connections to the other ranks."""

    device: torch.device
    sync: RankSync
    log: ProcessLog
    # Called if the main thread cannot report the failure any more.
    on_failure: list[Callable[[Failure], None]] = field(default_factory=list)
    heartbeat: Heartbeat | None = None
    attempt: Attempt = FIRST

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Report an error inside the block to the other ranks at once.

        An error caused by a peer's failure becomes `PeerFailed`.
        """
        try:
            yield
        except Exception as error:
            if self.heartbeat is not None:
                self.heartbeat.cleaning_up = True
            cause = _translate_error(self.sync.explain(error), self)
            self.sync.fail(cause)
            if cause is error:
                raise
            raise cause from error


def pick_device(local_rank: int) -> torch.device:
    """Choose this rank's GPU, or the CPU if there is no GPU. Raises ConfigError for too few."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if local_rank >= gpus and not ranks_share_gpus():
        raise ConfigError(
            f"LOCAL_RANK: got {local_rank}, but torch sees {gpus} GPUs on this machine: start at"
            f" most {gpus} processes on it (cluster.processes_per_node). To debug a layout, ranks"
            f" can share a GPU with {SHARED_GPU}=1 in the environment, from NCCL {SHARED_SINCE} on"
        )
    torch.cuda.set_device(local_rank % gpus)
    return torch.device("cuda", local_rank % gpus)


@contextmanager
def join(config: Config, *, has_steps: bool = True) -> Iterator[Process]:
    """Join the trainer's other ranks while open; a run of one process needs no environment.

    Args:
        has_steps: the first SIGTERM or Ctrl-C waits for the end of the step; else it interrupts.
    """
    hide_secrets(config.model_dump())
    with rank_log(int(os.environ["RANK"]) if is_rank() else 0) as log:
        set_up_torch(config)
        if is_rank():
            with _among_ranks(config, log, has_steps) as process:
                yield process
        else:
            timeout_s = config.cluster.collective_timeout_s
            sync = RankSync(dist.HashStore(), 0, 1, timeout_s=timeout_s)
            with _signals(sync, has_steps):
                yield Process(pick_device(0), sync, log)


def set_up_torch(config: Config) -> None:
    """Set torch's threads, libraries and random seed as in all processes of the run."""
    run = config.run
    threads = run.threads or threads_at_most()
    if threads is not None:
        torch.set_num_threads(threads)
    if torch.version.cuda is not None:
        for name, value in cuda_environment(config, torch.__version__).items():
            os.environ.setdefault(name, value)
    if run.deterministic:
        for name, value in DETERMINISTIC_LIBRARIES.items():
            os.environ.setdefault(name, value)
        torch.backends.cudnn.benchmark = False
        # An operation without a deterministic kernel, as a sum in a metric, only warns.
        torch.use_deterministic_algorithms(True, warn_only=True)
    seed_rng(run.seed)


def choose_threads(config: Config) -> None:
    """Compute with one thread on the CPU if several are not faster, by a measurement.

    A small model's operations end before other threads have woken, and on a busy machine each
    operation waits for the slowest thread. So it is measured once the run's own processes have
    started, which would take the cores. A deterministic run keeps its share of the cores, since
    sums depend on the number of threads.
    """
    several = torch.get_num_threads()
    run = config.run
    if several == 1 or run.threads is not None or threads_at_most() is None:
        return
    if run.deterministic or torch.cuda.is_available():
        return
    hidden = min(text_model_size(config.model.path, "hidden_size") or MAX_PROBED, MAX_PROBED)
    seconds: dict[int, list[float]] = {1: [], several: []}
    for _ in range(THREAD_TRIALS):
        for threads, taken in seconds.items():
            torch.set_num_threads(threads)
            taken.append(_seconds_of_a_layer(hidden))
    one, all_of_them = (statistics.median(taken) for taken in seconds.values())
    chosen = several if all_of_them < WORTHWHILE * one else 1
    torch.set_num_threads(chosen)
    logger.info(
        "threads: %d (a layer of width %d takes %.1f ms with 1, %.1f ms with %d, measured now;"
        " run.threads sets it)",
        *(chosen, hidden, 1e3 * one, 1e3 * all_of_them, several),
    )


def _seconds_of_a_layer(hidden: int) -> float:
    """Time forward and backward of an MLP, on tokens for some milliseconds."""
    tokens = max(64, min(2048, PROBE_FLOPS // (48 * hidden**2)))
    x = torch.ones(tokens, hidden)
    up = torch.ones(hidden, 4 * hidden, requires_grad=True)
    started = time.perf_counter()
    torch.nn.functional.gelu(x @ up).matmul(up.t()).sum().backward()
    return time.perf_counter() - started


def cuda_environment(config: Config, torch_version: str) -> dict[str, str]:
    """Return the variables that CUDA reads when a trainer process makes its context.

    Variables that the user has set keep their values.
    """
    found: dict[str, str] = {}
    if config.policy.parallel.tensor > 1:
        # Megatron relies on the order of launches to overlap communication and matmuls.
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    engine = config.rollout.engine
    kind = KINDS.get(engine.kind)
    shares = kind is not None and kind.sets_cumem and in_weight_group(engine)
    if shares and (not engine.urls or any(map(is_here, engine.urls))):
        # This chooses the kind of handle by which NCCL shares memory between GPUs of a machine.
        # SGLang sets the same value; the trainer could not open handles of another kind. Without
        # an engine on its machine it keeps NCCL's own choice, with which NVLS works.
        symmetric = any(
            argument_name(name) in CUMEM_ARGUMENTS and value
            for name, value in engine.server.items()
        )
        found["NCCL_CUMEM_ENABLE"] = engine.environment.get(
            "NCCL_CUMEM_ENABLE", "1" if symmetric else "0"
        )
    if engine.colocated:
        # The first use of a group then makes the connections of all algorithms, before an engine
        # measures how much memory is free.
        found["NCCL_RUNTIME_CONNECT"] = "0"
    if "PYTORCH_ALLOC_CONF" in os.environ:
        return found
    settings = []
    # Packs differ in size, and would fragment fixed segments. Engines on the same GPU cannot open
    # handles of expandable segments.
    if not engine.colocated and engine.transport != "tensor":
        settings.append("expandable_segments:True")
    # Pre-fault pinned memory with eight threads; one thread needs 0.4 s per GiB.
    settings += ["pinned_use_cuda_host_register:True", "pinned_num_register_threads:8"]
    # By default the size of pinned host memory is rounded up to a power of two.
    if [int(part) for part in torch_version.split(".")[:2]] >= [2, 13]:
        settings.append("pinned_max_round_threshold_mb:1")
    found["PYTORCH_CUDA_ALLOC_CONF"] = ",".join(settings)
    return found


@contextmanager
def _among_ranks(config: Config, log: ProcessLog, has_steps: bool) -> Iterator[Process]:
    device = pick_device(int(os.environ.get("LOCAL_RANK", "0")))
    with START.phase("ranks"):
        sync, attempt = _rendezvous(device, config.cluster)
    peers = [0] if sync.rank else range(1, sync.world_size)
    on_failure: list[Callable[[Failure], None]] = [log.dump_stacks]
    if sync.rank == 0 and not supervised():

        def report(failure: Failure) -> None:
            text = describe_failure(failure, config.run)
            print(f"rlcore: {text}", file=sys.stderr, flush=True)

        on_failure.append(report)
    # The beats get their own connection, as they would wait for the main thread on a shared one.
    beats = sync.store.clone()  # type: ignore[union-attr]  # torch's type stub lacks it
    monitor = HeartbeatMonitor(beats, peers, config.cluster)
    heartbeat = Heartbeat(beats, sync, monitor, on_failure)
    process = Process(device, sync, log, on_failure, heartbeat, attempt)
    try:
        with process.reporting_errors(), _signals(sync, has_steps):
            yield process
    except BaseException as error:
        # `reporting_errors` handles no interrupts.
        sync.fail(error)
        heartbeat.stop(clean=False)
        # Destroying the process group would wait for peers that are stuck in a collective.
        raise
    heartbeat.stop(clean=True)
    if _serves_store(sync):
        # The store ends with this process, and another rank may have yet to read it.
        monitor.outlast()
    if dist.is_initialized():
        dist.destroy_process_group()


def _rendezvous(device: torch.device, cluster: ClusterConfig) -> tuple[RankSync, Attempt]:
    """Join the default process group.

    Returns:
        The state that this rank shares with the others, and the attempt that it has joined.

    Raises:
        PeerFailed: another rank was lost meanwhile.
        RunFailed: the other ranks cannot be reached, or do not join.
    """
    folder = os.environ.get(STORE_FOLDER)
    where = folder or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if orphaned():
        raise RunFailed(
            f"rank {os.environ['RANK']} has lost its supervisor before it joined the other ranks"
        )
    start_s = cluster.start_timeout_s
    sync: RankSync | None = None
    try:
        rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        if folder is not None:
            store: Store = FolderStore(Path(folder))
        else:
            limit_s = min(start_s, STORE_S) if supervised() else start_s
            store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=limit_s)))
        allow_connections(GROUPS_OF_ALL_RANKS * world_size)
        attempt = join_attempt(store, rank, world_size, timeout_s=start_s)
        keys = keys_under(attempt.prefix, store)
        sync = RankSync(keys, rank, world_size, timeout_s=cluster.collective_timeout_s)
        timeout = timedelta(seconds=cluster.collective_timeout_s)
        prefix = f"{attempt.prefix}/ranks"
        if isinstance(store, FolderStore):
            path = store.under(prefix).folder / "groups"
            groups: dist.Store = dist.FileStore(str(path), world_size)
        else:
            # A request of gloo for many keys waits for the store's timeout.
            store.set_timeout(timeout)
            choose_interface(keys, rank, world_size)
            groups = dist.PrefixStore(prefix, store)
        with few_store_requests():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=groups,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
    # torch's DistError is a RuntimeError; gloo raises others if a peer is gone.
    except RuntimeError as error:
        cause = error if sync is None else sync.explain(error)
        if cause is not error:
            raise cause from error
        reason = str(error).splitlines()[0]
        raise RunFailed(
            f"rank {os.environ['RANK']} cannot join the other ranks at {where}: {reason}"
        ) from error
    return sync, attempt


def choose_interface(store: Store, rank: int, world_size: int) -> None:
    """Have gloo and NCCL listen on the interface of the route to the other nodes, unless it is set.

    By default gloo takes the interface of the host's name, which may be loopback or a slow network
    for administration.
    """
    if world_size == int(os.environ.get("LOCAL_WORLD_SIZE", world_size)):
        return
    # Ranks of another node may wait for the address, whatever is set here.
    interface = interface_of(address_for_others(store, rank, world_size))
    if interface is not None:
        if INTERFACE not in os.environ:
            os.environ[INTERFACE] = os.environ[CHOSEN_INTERFACE] = interface
        # The sign stands for this name alone, not for all that begin with it.
        os.environ.setdefault(NCCL_INTERFACE, f"={interface}")


def address_for_others(store: Store, rank: int, world_size: int) -> str:
    """Return the address under which the other nodes reach this one.

    It is that of the route to MASTER_ADDR. On the master's own node a name may be an address of the
    loopback interface, so its ranks take the route to a rank of another node.
    """
    master = os.environ["MASTER_ADDR"]
    mine = route_to(master)
    store.set(f"address/{rank}", mine)
    if not is_loopback(mine) or is_loopback(master):
        return mine
    addresses = [store.get(f"address/{other}").decode() for other in range(world_size)]
    there = next((other for other in addresses if not is_loopback(other)), None)
    return mine if there is None else route_to(there)


def route_to(host: str) -> str:
    """Return the address of this machine from which packets go to another."""
    return own_address(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")


def _serves_store(sync: RankSync) -> bool:
    """Return whether the store is in this process, not in a folder, an agent or the Ray driver."""
    elsewhere = (
        STORE_FOLDER in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    return sync.rank == 0 and not elsewhere


def _translate_error(error: BaseException, process: Process) -> BaseException:
    """Explain a broken or late collective for which no peer has posted a reason.

    Other errors are returned unchanged.
    """
    said = str(error).lower()
    is_gloo = "gloo" in said or isinstance(error, dist.DistError)
    is_ours = isinstance(error, RlcoreError) or not isinstance(error, RuntimeError)
    if is_ours or not is_gloo or process.sync.world_size == 1:
        return error
    # gloo's message begins with a source location and ends with advice.
    first = re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0])
    reason = first.partition(". This is typically")[0]
    if "timed out" in said or "timeout" in said:
        return DeadlineExceeded(
            f"rank {process.sync.rank} waited for its peers in a collective for longer than"
            f" cluster.collective_timeout_s: {reason}"
        )
    silent = [] if process.heartbeat is None else process.heartbeat.silent_ranks
    gone = f"; silent: rank {', '.join(map(str, silent))}" if silent else ""
    return RunFailed(f"rank {process.sync.rank} lost a peer in a collective: {reason}{gone}")


STOPPING = b"rlcore: stopping after this step, which may take a while; a second signal ends it\n"


@contextmanager
def _signals(sync: RankSync, has_steps: bool) -> Iterator[None]:
    """End the run after this step on SIGTERM or Ctrl-C; a second signal interrupts it at once.

    Without steps the first signal interrupts.
    """
    asked_at: dict[int, float] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number not in asked_at:
            asked_at[number] = now
            if not has_steps:
                signal.default_int_handler(number, frame)
            sync.interrupt()
            # A handler may run inside `print`, which is not reentrant.
            if first_on_node():
                os.write(2, STOPPING)
        elif now - asked_at[number] > SAME_SIGNAL_S:
            signal.default_int_handler(number, frame)

    with handling_stop_signals(ask):
        yield
