"""Connects to a running or new Ray cluster, and reserves resources in it.

By default only a cluster of this user is joined. Ray's own search would take the newest cluster of
any user, who could then read a run's data and keys.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.utils import read_ray_address
from ray.exceptions import AuthenticationError
from ray.runtime_env import RuntimeEnv
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from rlcore.config import Config
from rlcore.deadlines import RAY_REACH_S
from rlcore.errors import RunFailed, UserError
from rlcore.launch.ray.calls import NAMESPACE, line_of
from rlcore.launch.ray.placement import Placement, Resources, bundles, lacking, place

AUTO = "auto"  # Ray's own search
LOCAL = "local"  # value of cluster.ray.address: always a new cluster
ROOT = Path(__file__).resolve().parents[3]
# Ray rounds fractions of a second to 0, and the loop would keep a core busy.
WAIT_S = 1
_PROCESSES = Path("/proc")
_OPTION = b"--gcs-address="


@dataclass(frozen=True)
class Cluster:
    """The cluster that this process is connected to."""

    placement: Placement
    address: str  # of this node, as other nodes reach it


@contextmanager
def connected(config: Config) -> Iterator[Cluster]:
    """Connect to `cluster.ray.address` while open; a cluster that is started here ends here.

    Raises:
        UserError: there is no cluster at that address, it wants a token, or Ray rejects
            `cluster.ray.runtime_env`.
        RunFailed: a new cluster does not start.
    """
    try:
        try:
            _connect(config.cluster.ray.address, config)
            placement = place(config, has_gpus=ray.cluster_resources().get("GPU", 0.0) > 0)
        except SystemExit as asked:
            # Ray's own handler of SIGTERM raises this.
            raise KeyboardInterrupt from asked
        yield Cluster(placement, ray.util.get_node_ip_address())
    finally:
        ray.shutdown()


def _connect(address: str | None, config: Config) -> None:
    asked = config.cluster.ray
    environment = runtime_env(asked.runtime_env, asked.env_from_shell)
    try:
        RuntimeEnv(**environment)
    except (TypeError, ValueError) as error:
        raise UserError(f"cluster.ray.runtime_env: Ray rejects it: {line_of(error)}") from error
    found = address or find_cluster()
    if found is None and (others := clusters_of_others()):
        warn(
            f"the Ray cluster {', '.join(sorted(others))} on this machine is another user's and is"
            " not joined: name it (cluster.ray.address) if that is meant"
        )
    if found not in (None, LOCAL):
        try:
            join(found, prefix="cluster.ray.address: ", runtime_env=environment)
        except ConnectionError as error:
            if named := address or os.environ.get("RAY_ADDRESS"):
                where = "cluster.ray.address" if address else "RAY_ADDRESS"
                raise UserError(f"{where}: no Ray cluster at {named!r}: {error}") from error
            warn(
                f"the Ray cluster {found} on this machine is not joined, and the run starts its"
                f" own: {error}"
            )
        else:
            joined = ray.get_runtime_context().gcs_address if found == AUTO else found
            if is_token_auth_enabled():
                print(f"Ray cluster {joined}, which asks for a token", flush=True)
            else:
                warn(
                    f"the Ray cluster {joined} asks for no token: whoever reaches it runs code as"
                    " its user, and reads this run's data and keys; start it with"
                    " RAY_AUTH_MODE=token"
                )
            return
    # Ray only counts CPUs, so a small machine can declare more and still run a small job.
    cpus = max(
        os.cpu_count() or 1, *(place(config, has_gpus=some).total["CPU"] for some in (False, True))
    )
    try:
        _init(
            LOCAL,
            num_cpus=int(-(-cpus // 1)),
            include_dashboard=False,
            # The other launchers use 0; Ray's default of 15 starves a run on a shared machine.
            _system_config={"worker_niceness": 0},
            runtime_env=environment,
        )
    # Ray raises no narrower error when its processes do not start in time.
    except Exception as error:
        raise RunFailed(
            "no Ray cluster could be started on this machine (cluster.ray.address):"
            f" {line_of(error)} Is it too busy? Ray gives its own processes 30 s; their logs are"
            " in /tmp/ray/session_latest/logs"
        ) from error


def join(address: str, *, prefix: str = "", **options: Any) -> None:
    """Connect to a running cluster by `ray.init`; `prefix` begins the message about a token.

    Raises:
        ConnectionError: nothing answers there, or Ray rejects the cluster.
        UserError: the cluster asks for a token, and this process has none.
    """
    try:
        check_reachable(address)
        _init(address, **options)
    except AuthenticationError as error:
        # Only a cluster can refuse a token.
        raise UserError(
            f"{prefix}the Ray cluster refuses us: it wants a token (RAY_AUTH_MODE=token) and this"
            " process has none: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH"
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConnectionError(line_of(error)) from error


def _init(address: str, **options: Any) -> None:
    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
        **options,
    )


def warn(text: str) -> None:
    """Show a warning on the driver's terminal."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def runtime_env(given: dict[str, Any], from_shell: Sequence[str] = ()) -> dict[str, Any]:
    """Return the user's `runtime_env`, with this checkout on PYTHONPATH unless it sets that.

    Raises UserError if one of the variables `from_shell` is not set in this process.
    """
    if missing := [name for name in from_shell if name not in os.environ]:
        raise UserError(
            f"cluster.ray.env_from_shell: {', '.join(missing)} is not set where the run is started:"
            " export it, or leave it out"
        )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": path} | {name: os.environ[name] for name in from_shell}
    own = given.get("env_vars", {})
    # Ray reports an `env_vars` that is not a mapping.
    return given | {"env_vars": variables | own} if isinstance(own, dict) else given


# --- search ---------------------------------------------------------------------------------------


def find_cluster(proc: Path = _PROCESSES) -> str | None:
    """Return the address of the cluster of `RAY_ADDRESS`, or of this user's raylets here, or None.

    Raises UserError if this user has several clusters, and Ray does not say which is the newest.
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
    """Raise ConnectionError if nobody listens at HOST:PORT; Ray itself tries for 14 minutes.

    `auto` stands for `RAY_ADDRESS`; other forms of addresses pass.
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
    """Return the addresses of the clusters whose raylets on this machine belong to other users."""
    found = _clusters(proc)
    own = found.pop(os.getuid(), set())
    return set().union(*found.values()) - own


def _clusters(proc: Path) -> dict[int, set[str]]:
    """Return the addresses of the clusters by the user who runs their raylets on this machine."""
    found: dict[int, set[str]] = {}
    for process in proc.glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            user = process.stat().st_uid
        except OSError:
            # The process has ended.
            continue
        if os.path.basename(words[0]) == b"raylet":
            addresses = [w.removeprefix(_OPTION) for w in words if w.startswith(_OPTION)]
            found.setdefault(user, set()).update(address.decode() for address in addresses)
    return found


# --- reservation ----------------------------------------------------------------------------------


@contextmanager
def reserve(parts: Sequence[Resources], strategy: str) -> Iterator[PlacementGroup]:
    """Request bundles, and keep them while open. Ray replaces the bundles of a lost node."""
    group = placement_group(bundles(parts), strategy=strategy)
    try:
        yield group
    finally:
        if ray.is_initialized():
            remove_placement_group(group)


def wait_for_room(
    group: PlacementGroup,
    what: str,
    placement: Placement,
    *,
    limit_s: float,
    tick: Callable[[], None],
) -> None:
    """Wait until all bundles of `group`, named `what` in messages, are reserved; call `tick`.

    Raises RunFailed if there is no room within `limit_s` (cluster.start_timeout_s).
    """
    deadline = time.monotonic() + limit_s
    while not group.wait(timeout_seconds=WAIT_S):
        tick()
        if time.monotonic() < deadline:
            continue
        asked = "; ".join(
            ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
            for bundle in group.bundle_specs
        )
        short = lacking(placement, ray.cluster_resources())
        why = f"it lacks {short}"
        if short is None:
            why = "others use it, or no node has a whole bundle free (`ray status`)"
        raise RunFailed(
            f"the Ray cluster has no room for {what} within {limit_s:g} s"
            f" (cluster.start_timeout_s): asked is [{asked}]; {why}; free nodes, ask for less"
            " (cluster.ray), or use fewer processes or engines"
        )
