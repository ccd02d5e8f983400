"""Finds the Ray cluster to join on this machine: only one that this user has started.

Ray's own search takes the newest cluster of any user, who could then read a run's data and keys.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ray._private.utils import read_ray_address

from rlcore.deadlines import RAY_REACH_S
from rlcore.errors import UserError

AUTO = "auto"  # Ray's own search
LOCAL = "local"  # as cluster.ray.address: always a cluster of our own
_PROCESSES = Path("/proc")
_OPTION = b"--gcs-address="


def find_cluster(proc: Path = _PROCESSES) -> str | None:
    """Return the address of the cluster of `RAY_ADDRESS`, or of this user's raylets here.

    Args:
        proc: where the kernel shows processes.

    Returns:
        None if there is neither.

    Raises:
        UserError: this user has several clusters here, and Ray does not say which is the newest.
    """
    if given := os.environ.get("RAY_ADDRESS"):
        return given if given == LOCAL else AUTO
    found = _clusters(proc).get(os.getuid(), set())
    newest = read_ray_address()
    if newest in found or len(found) < 2:
        return newest if newest in found else next(iter(found), None)
    raise UserError(
        f"cluster.ray.address: this machine has the Ray clusters {', '.join(sorted(found))}: name"
        " one of them, or `local` for one of the run's own"
    )


def check_reachable(address: str) -> None:
    """Raise ConnectionError if nobody listens at HOST:PORT: Ray itself tries for 14 minutes.

    Args:
        address: as `ray.init` takes it; of `auto` that of `RAY_ADDRESS`. Others pass.
    """
    given = os.environ.get("RAY_ADDRESS", "") if address == AUTO else address
    host, _, port = given.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=RAY_REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"nobody answers at {given}: {error}") from error


def clusters_of_others(proc: Path = _PROCESSES) -> set[str]:
    """Return the addresses of the clusters whose raylets here are of other users."""
    found = _clusters(proc)
    own = found.pop(os.getuid(), set())
    return set().union(*found.values()) - own


def _clusters(proc: Path) -> dict[int, set[str]]:
    """Return the clusters' addresses by the user whose raylets here belong to them."""
    found: dict[int, set[str]] = {}
    for process in proc.glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            user = process.stat().st_uid
        except OSError:  # it has ended
            continue
        if os.path.basename(words[0]) == b"raylet":
            addresses = [w.removeprefix(_OPTION) for w in words if w.startswith(_OPTION)]
            found.setdefault(user, set()).update(address.decode() for address in addresses)
    return found
