"""The network, the cluster managers, and the keys in the environment."""

from __future__ import annotations

import ipaddress
import netrc
import os
import shutil
import socket
from collections.abc import Iterator
from importlib import metadata

from rlcore.launch.doctor.finding import Finding
from rlcore.launch.doctor.needs import Needs

PINNED = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
ENGINE_KEYS = ("RLCORE_ENGINE_API_KEY", "RLCORE_ENGINE_ADMIN_KEY")
KEYS = ("WANDB_API_KEY", "HF_TOKEN", *ENGINE_KEYS)


def interfaces() -> dict[str, str]:
    """The IPv4 address of each interface that is up."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = {
        name: next((one.address for one in all_ if one.family is socket.AF_INET), None)
        for name, all_ in psutil.net_if_addrs().items()
    }
    return {name: address for name, address in found.items() if address and name in up}


def network(needs: Needs) -> Iterator[Finding]:
    """The interfaces, those that variables name, and the address that other nodes connect to."""
    there = interfaces()
    found = ", ".join(f"{name} {address}" for name, address in there.items()) or "none is up"
    pinned = {name: os.environ[name] for name in PINNED if os.environ.get(name)}
    wrong = {name: value for name, value in pinned.items() if not _names(name, value, there)}
    if wrong:
        named = ", ".join(f"{name}={value}" for name, value in wrong.items())
        advice = "unset it, or name one of those"
        yield Finding("FAIL", "interfaces", f"{found}; {named}", "an interface that is up", advice)
    else:
        told = "".join(f"; {name}={value}" for name, value in pinned.items())
        yield Finding("ok", "interfaces", found + told)
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = ""
    found = f"{host} is {address or 'not known'}"
    loopback = not address or ipaddress.ip_address(address).is_loopback
    if loopback and needs.nodes > 1 and "GLOO_SOCKET_IFNAME" not in pinned:
        advice = "set GLOO_SOCKET_IFNAME to the interface of the cluster, or mend /etc/hosts"
        needed = "an address that other nodes reach"
        yield Finding("FAIL", "peers connect to", found, needed, advice)
    else:
        only = ", which this machine alone reaches" if loopback else ""
        yield Finding("ok", "peers connect to", found + only)


def _names(variable: str, value: str, there: dict[str, str]) -> bool:
    """Whether a variable names an interface that is there.

    For NCCL a name is a prefix, "=" makes it exact, and "^" leaves interfaces out.
    """
    if value.startswith("^"):
        return True
    exact = value.startswith("=") or not variable.startswith("NCCL")
    wanted = [one for one in value.lstrip("=").split(",") if one]
    return any(
        name == one or (not exact and name.startswith(one)) for name in there for one in wanted
    )


def clusters(needs: Needs) -> Iterator[Finding]:
    """Ray and Slurm, if present."""
    try:
        ray = f"Ray {metadata.version('ray')}"
    except metadata.PackageNotFoundError:
        ray = ""
    if needs.launcher == "ray" and not ray:
        advice = "run ./scripts/install.sh ray, or set cluster.launcher to local or torchrun"
        yield Finding("FAIL", "Ray", "not installed", "cluster.launcher is ray", advice)
    else:
        address = os.environ.get("RAY_ADDRESS")
        found = (ray or "not installed") + (f", RAY_ADDRESS={address}" if address else "")
        yield Finding("ok", "Ray", found)
    job = os.environ.get("SLURM_JOB_ID")
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    if job is None:
        there = shutil.which("sbatch") is not None
        yield Finding("ok", "Slurm", "present, not in a job" if there else "not present")
    elif nodes.isdecimal() and int(nodes) < needs.nodes:
        found = f"job {job} on {nodes} nodes"
        advice = "ask sbatch for more nodes, or lower cluster.nodes"
        yield Finding("FAIL", "Slurm", found, f"{needs.nodes} (cluster.nodes)", advice)
    else:
        yield Finding("ok", "Slurm", f"job {job} on {nodes or 'some'} nodes")


def keys(needs: Needs) -> Iterator[Finding]:
    """Which keys are set. Their values are never shown."""
    set_ = [name for name in KEYS if os.environ.get(name)]
    found = f"set: {', '.join(set_) or 'none'}"
    if needs.wandb_online and "WANDB_API_KEY" not in set_ and not _in_netrc("api.wandb.ai"):
        advice = "set WANDB_API_KEY, run `wandb login`, or set tracking.wandb.mode to offline"
        yield Finding("FAIL", "keys", found, "WANDB_API_KEY", advice)
    elif needs.engine_urls and (missing := [key for key in ENGINE_KEYS if key not in set_]):
        advice = "export those that `rlcore engine` printed, unless your servers have none"
        yield Finding("note", "keys", found, ", ".join(missing), advice)
    else:
        yield Finding("ok", "keys", found)


def _in_netrc(host: str) -> bool:
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
