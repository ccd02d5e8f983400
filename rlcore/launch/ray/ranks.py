"""Trainer ranks as actors: one attempt of all ranks, their store, and the meaning of their end.

The first rank that dies or falls silent ends all ranks, as in rlcore/launch/local.py. The loss of a
process or a node, or a hang, is worth another attempt; an error of a rank would only repeat.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
import torch.distributed as dist
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlcore.config.load import Loaded
from rlcore.deadlines import ACTOR_LOST_S, LEAVE_S, PROCESS_LOST_S, REPORT_GRACE_S, STORE_S
from rlcore.errors import (
    INTERRUPTED,
    DeadlineExceeded,
    EmptyBatch,
    PartLost,
    RlcoreError,
    RunFailed,
    UserError,
)
from rlcore.launch.environment import (
    SUPERVISED,
    THREADS,
    allow_connections,
    rank_environment,
    store_prefix,
)
from rlcore.launch.heartbeat import HeartbeatMonitor, raise_if_stuck, read_stuck
from rlcore.launch.logs import describe_failure
from rlcore.launch.ray.calls import ActorLost, enter_folder, get, line_of, translate_error
from rlcore.launch.ray.cluster import Cluster
from rlcore.launch.ray.engine_hosts import ADDRESS, NODE_ADDRESS
from rlcore.launch.ray.placement import bundles
from rlcore.launch.ray.status import print_on_driver
from rlcore.launch.run_folder import conclude_unless_written, result_mark, was_opened
from rlcore.launch.torchrun_attempts import has_ended
from rlcore.stores import bound_store
from rlcore.timeline.start import START, now
from rlcore.trainer.rank_sync import Failure, post_failure, read_failure
from rollout.weight_sync.process_group import NODE

POLL_S = 0.1
CONNECTIONS_OF_A_RANK = 2  # to the store: its own, and its heartbeat's
# The node's id, the process id, and the names of the GPUs.
Where = tuple[str, int, list[str]]


class RankActor:
    """Runs one rank, once, in the main thread of its process, in torchrun's environment."""

    def __init__(self, folder: str) -> None:
        enter_folder(folder)

    def where(self) -> Where:
        """Return the node's id, the process id, and the GPUs that Ray assigned to this process."""
        gpus = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        return ray.get_runtime_context().get_node_id(), os.getpid(), gpus

    def run(
        self, environment: Mapping[str, str], loaded: Loaded, *, resume: bool, overwrite: bool
    ) -> int:
        """Train as `rlcore.launch.rank.train_rank` does, and return the rank's exit code.

        Args:
            environment: the variables that torchrun would set, and for rank 0 the engines' keys.
        """
        # The process may have waited long for this call.
        START.origin = now()
        # A rank sees only the GPUs that Ray assigned, numbered from 0; without any, all GPUs.
        has_own = loaded.config.cluster.ray.rank_gpus > 0 and bool(self.where()[2])
        local = {"LOCAL_RANK": "0"} if has_own else {}
        # Ray itself sets one thread; the user's setting is among the variables.
        os.environ.pop(THREADS, None)
        os.environ.update({**environment, **local, SUPERVISED: str(os.getppid())})
        os.environ[NODE] = self.where()[0]
        from rlcore.launch.rank import train_rank

        if environment["RANK"] == "0":
            print_on_driver(loaded.config.run.name)
            # The rollout service, another process, joins the cluster by these variables.
            os.environ[ADDRESS] = ray.get_runtime_context().gcs_address
            os.environ[NODE_ADDRESS] = ray.util.get_node_ip_address()
        return train_rank(loaded, resume=resume, overwrite=overwrite, is_checked=True)


class Ranks:
    """The actors of all ranks, from their start to their end.

    Args:
        group: the trainer's bundles.
        tick: called repeatedly while this waits.
    """

    def __init__(
        self, cluster: Cluster, group: PlacementGroup, loaded: Loaded, tick: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._loaded = loaded
        self._tick = tick
        self.config = loaded.config
        self._earlier = result_mark(self.config)
        self._per_node = self.config.cluster.processes_per_node
        self._count = self.config.cluster.nodes * self._per_node
        allow_connections(CONNECTIONS_OF_A_RANK * self._count)
        self._host = bound_store(cluster.address, STORE_S)
        self.store = dist.PrefixStore(store_prefix(), self._host)
        self._monitor = HeartbeatMonitor(self.store, range(self._count), self.config.cluster)
        self.actors: list[Any] = []
        self.where: list[Where] = []
        # The unfinished calls, with the rank of each.
        self._runs: dict[Any, int] = {}
        # The exit codes and errors of the ranks that have ended.
        self.codes: dict[int, int] = {}
        self.errors: dict[int, RlcoreError] = {}
        # The times at which lost ranks were detected.
        self._lost: dict[int, float] = {}
        self._silent = False
        self._failed_at = 0.0

    # --- start ------------------------------------------------------------------------------------

    def place(self) -> Failure | None:
        """Make the actors; return a failure if an actor is lost before it begins.

        Raises RunFailed if an actor cannot begin, or does not begin in time.
        """
        limit = self.config.cluster.start_timeout_s
        resources = bundles([self._cluster.placement.rank])[0]
        for rank in range(self._count):
            bundle = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=rank // self._per_node
            )
            actor = ray.remote(RankActor).options(
                num_cpus=resources.get("CPU", 0.0),
                num_gpus=resources.get("GPU", 0.0),
                max_restarts=0,
                scheduling_strategy=bundle,
            )
            self.actors.append(actor.remote(os.getcwd()))
        asked = [actor.where.remote() for actor in self.actors]
        deadline = time.monotonic() + limit
        late = asked
        while late and time.monotonic() < deadline:
            late = ray.wait(asked, num_returns=len(asked), timeout=POLL_S)[1]
            self._tick()
        if late:
            raise DeadlineExceeded(
                f"rank {asked.index(late[0])} was not started within {limit:g} s"
                " (cluster.start_timeout_s): its node starts no process, or is gone (`ray status`)"
            )
        for rank, ref in enumerate(asked):
            try:
                self.where.append(
                    get(ref, limit_s=limit, what=f"rank {rank}", key="cluster.start_timeout_s")
                )
            except ActorLost:
                self._lost[rank] = time.monotonic()
                return self._first_lost()
        return None

    def run(self, *, resume: bool, overwrite: bool, for_rank0: Mapping[str, str]) -> Failure | None:
        """Run all ranks to their end, or return a failure, which ends the run, at once."""
        for rank, actor in enumerate(self.actors):
            environment = rank_environment(
                rank, self._count, local_rank=rank % self._per_node, local_world_size=self._per_node
            )
            # The driver holds the store, so no rank chooses a port.
            environment |= {
                "MASTER_ADDR": self._cluster.address,
                "MASTER_PORT": str(self._host.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            if THREADS in os.environ:
                environment[THREADS] = os.environ[THREADS]
            if rank == 0:
                environment |= for_rank0
            ref = actor.run.remote(environment, self._loaded, resume=resume, overwrite=overwrite)
            self._runs[ref] = rank
        while True:
            self._tick()
            self._collect()
            failure = read_failure(self.store) or self._died() or self._fell_silent()
            if failure is not None:
                self._failed_at = time.monotonic()
                # This notifies the other ranks.
                post_failure(self.store, failure)
                # A lost rank may have caused it; Ray may report the loss a moment later.
                if not (failure.bad_input or self._lost):
                    self._wait_for_ends(PROCESS_LOST_S, lambda: bool(self._lost))
                return self._first_lost() or failure
            if not self._runs:
                return None

    def interrupt(self) -> None:
        """Request a clean end after this step."""
        self.store.set("interrupt", "the driver")

    # --- the end ----------------------------------------------------------------------------------

    def wait_for_peers(self) -> None:
        """Give the ranks, which know of the failure, time to clean up and leave."""
        self._wait_for_ends(REPORT_GRACE_S + LEAVE_S, lambda: False)

    def _wait_for_ends(self, limit_s: float, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + limit_s
        while self._runs and not enough() and time.monotonic() < deadline:
            self._tick()
            self._collect()

    def is_loss(self, failure: Failure) -> bool:
        """Return whether a process or a node was lost or hung, as opposed to an error of a rank.

        In doubt this waits for the ranks to end: Ray takes a while to report a lost node, and a
        rank to report its error.
        """
        if failure.rank in self._lost or self._silent:
            return True
        self.wait_for_peers()
        if failure.waited and read_stuck(self.store) is not None:
            # A stuck rank kept its peers waiting.
            return True
        if isinstance(self.errors.get(failure.rank), PartLost):
            return True
        # A rank that ends itself because another rank failed takes longer than this.
        if any(seen < self._failed_at + REPORT_GRACE_S for seen in self._lost.values()):
            return True
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return any(node not in alive for node, _, _ in self.where)

    @property
    def gpus_of_nodes(self) -> list[list[str]]:
        """The names of the GPUs of each node's ranks, in order; ranks may share one."""
        starts = range(0, self._count, self._per_node)
        nodes = [self.where[start : start + self._per_node] for start in starts]
        return [list(dict.fromkeys(gpu for *_, gpus in node for gpu in gpus)) for node in nodes]

    @property
    def was_opened(self) -> bool:
        """Whether these ranks have opened the run's folder, so that another attempt resumes it."""
        return was_opened(self.store)

    def report(self, failure: Failure) -> int:
        """Return the exit code of an interrupted run; raise the failure of any other.

        Raises:
            RlcoreError: the error of rank 0, or a description of `failure`.
        """
        error = self.errors.get(0)
        if isinstance(error, UserError | EmptyBatch):
            raise error
        if self.codes.get(0) == INTERRUPTED:
            return INTERRUPTED
        if self.was_opened:
            conclude_unless_written(self.config, "failed", str(failure), earlier=self._earlier)
        raise_if_stuck(self.store, failure, self.config.run)
        if failure.rank == 0 and error is not None:
            raise error
        if failure.bad_input:
            raise UserError(f"rank {failure.rank}: {failure.error}")
        raise RunFailed(describe_failure(failure, self.config.run))

    def end(self) -> None:
        """End every actor at once, and wait until Ray reports that they are gone."""
        for actor in self.actors:
            ray.kill(actor)
        if self._runs:
            ray.wait(list(self._runs), num_returns=len(self._runs), timeout=ACTOR_LOST_S)
        self.actors = []

    # --- finding failures -------------------------------------------------------------------------

    def _collect(self) -> None:
        """Record every rank that has ended."""
        if not self._runs:
            return
        ended, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=POLL_S)
        for ref in ended:
            rank = self._runs.pop(ref)
            try:
                self.codes[rank] = ray.get(ref)
            except RayActorError:
                # After the end of the run only rank 0 is still needed.
                if rank == 0 or not has_ended(self.store):
                    self._lost[rank] = time.monotonic()
            except RayError as error:
                self.errors[rank] = translate_error(error, f"rank {rank}")

    def _first_lost(self) -> Failure | None:
        """Return the failure of the first rank whose process is gone."""
        for rank in self._lost:
            where = "before it could begin"
            if rank < len(self.where):
                node, pid, _ = self.where[rank]
                where = f"(node {node[:8]}, pid {pid})"
            return Failure(rank, f"its process or node is gone {where}")
        return None

    def _died(self) -> Failure | None:
        """Return the failure of a rank that is gone, or that ended without posting its error."""
        if (lost := self._first_lost()) is not None:
            return lost
        for rank, error in self.errors.items():
            return Failure(rank, line_of(error), bad_input=isinstance(error, UserError))
        for rank, code in self.codes.items():
            if code not in (0, INTERRUPTED):
                return Failure(rank, f"it ended with exit code {code}")
        return None

    def _fell_silent(self) -> Failure | None:
        failure = self._monitor.failure()
        if failure is None or failure.rank not in self._runs.values():
            return None
        self._silent = True
        return failure
