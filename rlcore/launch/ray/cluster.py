"""Connects to a Ray cluster, running or started for the run, and reserves resources in it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.exceptions import AuthenticationError
from ray.runtime_env import RuntimeEnv
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from rlcore.config import Config
from rlcore.errors import RunFailed, UserError
from rlcore.launch.ray.calls import NAMESPACE, first_line
from rlcore.launch.ray.discovery import (
    AUTO,
    LOCAL,
    check_reachable,
    clusters_of_others,
    find_cluster,
)
from rlcore.launch.ray.placement import Placement, Resources, bundles, lacking, place

NO_TOKEN = (
    "it wants a token (RAY_AUTH_MODE=token) and this process has none: set RAY_AUTH_TOKEN, or"
    " RAY_AUTH_TOKEN_PATH"
)
ROOT = Path(__file__).resolve().parents[3]
# Whole seconds: Ray rounds less to nothing, and such a loop keeps a core busy.
WAIT_S = 1


@dataclass(frozen=True)
class Cluster:
    """The cluster that this process is connected to."""

    placement: Placement
    address: str  # of this node, for other nodes


@contextmanager
def connected(config: Config) -> Iterator[Cluster]:
    """Connect to `cluster.ray.address` while open; a cluster that is started here ends here.

    Raises:
        UserError: there is no cluster at that address, it wants a token, or Ray does not take
            `cluster.ray.runtime_env`.
        RunFailed: a cluster of our own does not start.
    """
    try:
        try:
            _connect(config.cluster.ray.address, config)
            placement = place(config, has_gpus=ray.cluster_resources().get("GPU", 0.0) > 0)
        except SystemExit as asked:  # Ray's own handler of SIGTERM
            raise KeyboardInterrupt from asked
        yield Cluster(placement, ray.util.get_node_ip_address())
    finally:
        ray.shutdown()


def _connect(address: str | None, config: Config) -> None:
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "runtime_env": runtime_env(
            config.cluster.ray.runtime_env, config.cluster.ray.env_from_shell
        ),
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    try:
        RuntimeEnv(**options["runtime_env"])
    except (TypeError, ValueError) as error:
        raise UserError(
            f"cluster.ray.runtime_env: Ray does not take it: {first_line(error)}"
        ) from error
    joined = address or find_cluster()
    if joined is None and (others := clusters_of_others()):
        warn(
            f"the Ray cluster {', '.join(sorted(others))} on this machine is another user's and is"
            " not joined: name it (cluster.ray.address) if that is meant"
        )
    if joined not in (None, LOCAL):
        try:
            check_reachable(joined)
            ray.init(address=joined, **options)
            _tell(joined)
            return
        except (ConnectionError, RuntimeError, ValueError) as error:
            why = first_line(error)
            if named := address or os.environ.get("RAY_ADDRESS"):
                where = "cluster.ray.address" if address else "RAY_ADDRESS"
                raise UserError(f"{where}: no Ray cluster at {named!r}: {why}") from error
            warn(
                f"the Ray cluster {joined} on this machine is not joined, and the run starts its"
                f" own: {why}"
            )
        except AuthenticationError as error:  # so there is a cluster
            raise UserError(
                f"cluster.ray.address: the Ray cluster refuses us: {NO_TOKEN}"
            ) from error
    # Ray only counts CPUs, so a machine with few can be told of more, and still runs a small job.
    cpus = max(
        os.cpu_count() or 1, *(place(config, has_gpus=some).total["CPU"] for some in (False, True))
    )
    # As under the other launchers; Ray's default, 15, starves a run on a machine that others use.
    niceness = {"worker_niceness": 0}
    try:
        ray.init(
            address=LOCAL,
            num_cpus=int(-(-cpus // 1)),
            include_dashboard=False,
            _system_config=niceness,
            **options,
        )
    # Ray raises nothing narrower when its own processes do not start in time.
    except Exception as error:
        raise RunFailed(
            "no Ray cluster could be started on this machine (cluster.ray.address):"
            f" {first_line(error)} Is it too busy? Ray gives its own processes 30 s; their logs are"
            " in /tmp/ray/session_latest/logs"
        ) from error


def _tell(joined: str) -> None:
    """Say which cluster was joined, and warn of one that is open to everybody."""
    if joined == AUTO:
        joined = ray.get_runtime_context().gcs_address
    if is_token_auth_enabled():
        print(f"Ray cluster {joined}, which asks for a token", flush=True)
        return
    warn(
        f"the Ray cluster {joined} asks for no token: whoever reaches it runs code as its user, and"
        " reads this run's data and keys; start it with RAY_AUTH_MODE=token"
    )


def warn(text: str) -> None:
    """Show a warning on the driver's terminal."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def runtime_env(given: dict[str, Any], from_shell: Sequence[str] = ()) -> dict[str, Any]:
    """Return the user's `runtime_env`, with this checkout on PYTHONPATH unless it sets that.

    Args:
        from_shell: names of variables to take from this process (cluster.ray.env_from_shell).

    Raises:
        UserError: one of them is not set.
    """
    missing = [name for name in from_shell if name not in os.environ]
    if missing:
        raise UserError(
            f"cluster.ray.env_from_shell: {', '.join(missing)} is not set where the run is started:"
            " export it, or leave it out"
        )
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    } | {name: os.environ[name] for name in from_shell}
    own = given.get("env_vars", {})
    # Where `env_vars` is no mapping, Ray words the error.
    return given | {"env_vars": variables | own} if isinstance(own, dict) else given


@dataclass(frozen=True)
class Reservation:
    """Bundles of resources on the cluster. Ray replaces those of a node that is lost."""

    group: PlacementGroup
    parts: Sequence[Resources]
    what: str  # "the trainer", for messages

    def wait(self, cluster: Cluster, *, limit_s: float, tick: Callable[[], None]) -> PlacementGroup:
        """Wait until all bundles are reserved.

        Args:
            tick: called all the time meanwhile.

        Raises RunFailed where there is no room within `limit_s` (cluster.start_timeout_s).
        """
        deadline = time.monotonic() + limit_s
        while not self.group.wait(timeout_seconds=WAIT_S):
            tick()
            if time.monotonic() > deadline:
                raise RunFailed(_no_room(self.parts, cluster, self.what, limit_s))
        return self.group


@contextmanager
def reserve(parts: Sequence[Resources], strategy: str, what: str) -> Iterator[Reservation]:
    """Ask for bundles, and keep them while open.

    Args:
        strategy: PACK | SPREAD.
    """
    group = placement_group(bundles(parts), strategy=strategy)
    try:
        yield Reservation(group, parts, what)
    finally:
        if ray.is_initialized():
            remove_placement_group(group)


def _no_room(parts: Sequence[Resources], cluster: Cluster, what: str, limit_s: float) -> str:
    asked = "; ".join(
        ", ".join(f"{amount:g} {name}" for name, amount in part.items()) for part in parts
    )
    short = lacking(cluster.placement, ray.cluster_resources())
    why = (
        f"it lacks {short}"
        if short
        else "others use it, or no node has a whole bundle free (`ray status`)"
    )
    return (
        f"the Ray cluster has no room for {what} within {limit_s:g} s (cluster.start_timeout_s):"
        f" asked is [{asked}]; {why}; free nodes, ask for less (cluster.ray), or use fewer"
        " processes or engines"
    )
