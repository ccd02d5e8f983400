"""The cheap checks: memory, files, disk, network, keys. A run makes them at its start."""

from __future__ import annotations

import ipaddress
import netrc
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rlcore.config import Config
from rlcore.config.derived import built_in_passes, generates
from rlcore.config.engine_registry import KINDS
from rlcore.config.load import load_config
from rlcore.errors import ModelError
from rlcore.hf_config.read import read_config
from rlcore.interpreters.ask import CHECKOUT
from rlcore.planning.fit import GIB, gib

Level = Literal["ok", "note", "FAIL"]

SHM = Path("/dev/shm")
MIN_SHM = 16 << 20  # for a trainer of one process
AMPLE_SHM = 1 << 30  # for several processes with NCCL, SGLang and Ray
MIN_DISK = 256 << 20  # for logs, recordings and a tiny model's checkpoint
FILES = 512  # open files of a trainer besides connections to engines: libraries, logs, sockets
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
ENGINE_KEYS = ("RLCORE_ENGINE_API_KEY", "RLCORE_ENGINE_ADMIN_KEY")
KEYS = ("WANDB_API_KEY", "HF_TOKEN", *ENGINE_KEYS)
_ANY_RUN = ("run.name=any", "model.path=any", "data.paths=any", "training.steps=1")


@dataclass(frozen=True)
class Check:
    """The result of one check, a line of the report."""

    # FAIL if a run would fail; note if it may fail or be slow.
    level: Level
    name: str
    found: str
    needed: str = ""
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.as_note}"

    @property
    def as_note(self) -> str:
        """The line without its level."""
        needed = f"; needed: {self.needed}" if self.needed else ""
        advice = f"; to do: {self.advice}" if self.advice else ""
        return f"{self.name}: {self.found}{needed}{advice}"


class Run:
    """The needs of a run on this machine; without a configuration, those of any run."""

    def __init__(self, config: Config | None) -> None:
        self.is_configured = config is not None
        self.config = config or load_config([], _ANY_RUN).config
        self.engine = self.config.rollout.engine
        self.cluster = self.config.cluster

    @property
    def has_sglang(self) -> bool:
        """Whether the run has SGLang engines."""
        kind = self.engine.kind
        return generates(self.config) and kind in KINDS and KINDS[kind].standalone

    @property
    def engine_python(self) -> Path | None:
        """The interpreter of SGLang's environment; None if the run starts no SGLang engine.

        The path is not resolved, because Python finds its environment by this link.
        """
        default = CHECKOUT / ".venv-sglang" / "bin" / "python"
        if not self.is_configured:
            return default if default.is_file() else None
        given = Path(os.path.abspath(self.engine.python)) if self.engine.python else default
        return given if self.has_sglang and not self.engine.is_external else None

    @property
    def engine_gpus(self) -> int:
        """The number of GPUs of the engines that the run starts."""
        is_on_gpus = self.engine_python is not None and self.engine.device != "cpu"
        return self.engine.count * self.engine.tensor_parallel if is_on_gpus else 0


def at_start(config: Config) -> list[str]:
    """Return the cheap checks that found something; the run starts anyway."""
    return [found.as_note for found in cheap_checks(Run(config)) if found.level != "ok"]


def cheap_checks(run: Run) -> Iterator[Check]:
    """Make the checks that start no process and open no connection."""
    for check in (
        _shared_memory, _open_files, _run_folder, _interfaces, _own_address, _ray, _slurm, _keys,
    ):  # fmt: skip
        yield check(run)


# --- memory, files, disk --------------------------------------------------------------------------


def _shared_memory(run: Run) -> Check:
    name = "/dev/shm"
    if not SHM.is_dir():
        needed = "shared memory of processes"
        return Check("FAIL", name, "there is none", needed, "mount a tmpfs there")
    size = shutil.disk_usage(SHM)
    found = f"{gib(size.free)} of {gib(size.total)} free"
    advice = "remove what dead processes left there, or give the container --shm-size or --ipc=host"
    is_shared = run.cluster.processes_per_node > 1 or run.engine_python is not None
    if size.free < MIN_SHM:
        return Check("FAIL", name, found, f"{MIN_SHM >> 20} MiB free", advice)
    if size.free < AMPLE_SHM and (is_shared or not run.is_configured):
        return Check("note", name, found, f"{gib(AMPLE_SHM)} for several processes", advice)
    return Check("ok", name, found)


def _open_files(run: Run) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    engines = (len(run.engine.urls) or run.engine.count) if run.has_sglang else 0
    # Each request in flight has a connection.
    needed = FILES + engines * run.engine.max_in_flight
    if soft == resource.RLIM_INFINITY or soft >= needed:
        limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        return Check("ok", "open files", f"at most {limit}", str(needed))
    advice = f"have the hard limit of {hard} raised (limits.conf, docker --ulimit nofile)"
    if hard == resource.RLIM_INFINITY or hard >= needed:
        advice = f"run `ulimit -n {needed}` first, or lower rollout.engine.max_in_flight"
    return Check("FAIL", "open files", f"at most {soft}", str(needed), advice)


def _run_folder(run: Run) -> Check:
    """Check that the run's folder is writable and its disk has room."""
    folder = Path(os.path.abspath(run.config.run.dir))
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".rlcore-doctor-") as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        advice = "set run.dir to a folder that can be written"
        found = f"{folder}: {error.strerror or error}"
        return Check("FAIL", "run folder", found, "a folder to write into", advice)
    free = shutil.disk_usage(folder).free
    found = f"{gib(free)} free in {folder}"
    advice = "free some, or set run.dir to another disk"
    checkpoint = _checkpoint_bytes(run.config) if run.is_configured else 0
    if free < MIN_DISK:
        return Check("FAIL", "disk", found, f"{MIN_DISK >> 20} MiB", advice)
    if free < 2 * checkpoint:
        needed = f"{gib(2 * checkpoint)} for two checkpoints of about {gib(checkpoint)}"
        return Check("note", "disk", found, needed, advice)
    needed = f"about {gib(checkpoint)} a checkpoint" if checkpoint > GIB / 10 else ""
    return Check("ok", "disk", found, needed)


def _checkpoint_bytes(config: Config) -> int:
    """Return the bytes of a checkpoint with all weights and their optimizers.

    0 if the models are not on this machine, or if the run trains adapters, which are small.
    """
    if config.policy.lora is not None:
        return 0
    passes = built_in_passes(config)
    has_critic = passes is not None and passes.critic
    paths = [config.model.path, *([config.critic.path or config.model.path] if has_critic else [])]
    # Both moments in fp32, and next to weights in bf16 a copy in fp32.
    per_parameter = 12 if config.model.dtype == "fp32" else 14
    return per_parameter * sum(map(_parameters, paths))


def _parameters(path: str) -> int:
    """Return the parameters of a Hugging Face folder, by the sizes of its files."""
    stored: dict[str, Any] = {}
    # A folder that cannot be read is the model's error, not the disk's.
    with suppress(ModelError):
        stored = read_config(path)
    is_fp32 = "float32" in (stored.get("dtype"), stored.get("torch_dtype"))
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    return size // (4 if is_fp32 else 2)


# --- network, clusters, keys ----------------------------------------------------------------------


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that is up."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: next(one.address for one in found if one.family is socket.AF_INET)
        for name, found in psutil.net_if_addrs().items()
        if name in up and any(one.family is socket.AF_INET for one in found)
    }


def _interfaces(_: Run) -> Check:
    there = addresses()
    found = ", ".join(f"{name} {address}" for name, address in there.items()) or "none is up"
    pinned = {name: os.environ[name] for name in INTERFACES if os.environ.get(name)}
    wrong = {name: value for name, value in pinned.items() if not _names(name, value, there)}
    shown = "".join(f"; {name}={value}" for name, value in (wrong or pinned).items())
    if wrong:
        advice = "unset it, or name one of those"
        return Check("FAIL", "interfaces", found + shown, "an interface that is up", advice)
    return Check("ok", "interfaces", found + shown)


def _own_address(run: Run) -> Check:
    host = socket.gethostname()
    address = ""
    with suppress(OSError):
        address = socket.gethostbyname(host)
    found = f"{host} is {address or 'not known'}"
    is_loopback = not address or ipaddress.ip_address(address).is_loopback
    if is_loopback and run.cluster.nodes > 1 and not os.environ.get("GLOO_SOCKET_IFNAME"):
        advice = "set GLOO_SOCKET_IFNAME to the interface of the cluster, or correct /etc/hosts"
        needed = "an address that other nodes reach"
        return Check("FAIL", "peers connect to", found, needed, advice)
    only = ", which this machine alone reaches" if is_loopback else ""
    return Check("ok", "peers connect to", found + only)


def _names(variable: str, value: str, there: dict[str, str]) -> bool:
    """Return whether a variable names an existing interface.

    For NCCL a name is a prefix, "=" makes it exact, and "^" leaves interfaces out.
    """
    if value.startswith("^"):
        return True
    is_exact = value.startswith("=") or not variable.startswith("NCCL")
    wanted = [one for one in value.lstrip("=").split(",") if one]
    return any(
        name == one or (not is_exact and name.startswith(one)) for name in there for one in wanted
    )


def _ray(run: Run) -> Check:
    version = ""
    with suppress(metadata.PackageNotFoundError):
        version = f"Ray {metadata.version('ray')}"
    if run.cluster.launcher == "ray" and not version:
        advice = "run ./scripts/install.sh ray, or set cluster.launcher to local or torchrun"
        return Check("FAIL", "Ray", "not installed", "cluster.launcher is ray", advice)
    address = os.environ.get("RAY_ADDRESS")
    shown = f", RAY_ADDRESS={address}" if address else ""
    return Check("ok", "Ray", (version or "not installed") + shown)


def _slurm(run: Run) -> Check:
    job = os.environ.get("SLURM_JOB_ID")
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    needed = run.cluster.nodes
    if job is None:
        is_there = shutil.which("sbatch") is not None
        return Check("ok", "Slurm", "present, not in a job" if is_there else "not present")
    found = f"job {job} on {nodes or 'some'} nodes"
    if nodes.isdecimal() and int(nodes) < needed:
        advice = "ask sbatch for more nodes, or lower cluster.nodes"
        return Check("FAIL", "Slurm", found, f"{needed} (cluster.nodes)", advice)
    return Check("ok", "Slurm", found)


def _keys(run: Run) -> Check:
    """Check which keys are set. Their values are never shown."""
    present = [name for name in KEYS if os.environ.get(name)]
    found = f"set: {', '.join(present) or 'none'}"
    wandb = run.config.tracking.wandb
    login = None
    needs_login = wandb.enabled and wandb.mode == "online" and "WANDB_API_KEY" not in present
    # ValueError: the file is not UTF-8
    with suppress(OSError, netrc.NetrcParseError, ValueError):
        login = netrc.netrc().authenticators("api.wandb.ai") if needs_login else None
    if needs_login and login is None:
        advice = "set WANDB_API_KEY, run `wandb login`, or set tracking.wandb.mode to offline"
        return Check("FAIL", "keys", found, "WANDB_API_KEY", advice)
    missing = [key for key in ENGINE_KEYS if key not in present]
    if run.has_sglang and run.engine.is_external and missing:
        advice = "export those that `rlcore engine` printed, unless your servers have none"
        return Check("note", "keys", found, ", ".join(missing), advice)
    return Check("ok", "keys", found)
