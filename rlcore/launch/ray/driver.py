"""`rlcore train` with `cluster.launcher: ray`: places the parts of a run, restarts lost ones.

this process    the ranks' store, the terminal, signals
run status      a small actor for `rlcore status`, `rlcore stop` and the output of rank 0
engine hosts    an actor for each engine; Ray starts it elsewhere when its node is lost
ranks           an actor each; when one is lost all restart from the last checkpoint; rank 0 has the
                rollout service, as under every launcher
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rlcore.config.derived import world_size
from rlcore.config.load import Loaded
from rlcore.errors import INTERRUPTED, RlcoreError, UserError
from rlcore.launch.environment import RESTARTED
from rlcore.launch.input_checks import check_input
from rlcore.launch.ray.calls import NAMESPACE, actor_name, end_named
from rlcore.launch.ray.cluster import Cluster, connected, reserve, wait_for_room, warn
from rlcore.launch.ray.engine_hosts import EngineHost, host_name
from rlcore.launch.ray.placement import bundles
from rlcore.launch.ray.ranks import Ranks
from rlcore.launch.ray.status import Requests, RunStatus
from rlcore.launch.run_folder import conclude_unless_written, result_mark
from rlcore.runs.directory import RunDirectory
from rlcore.runs.lock import wait_until_free
from rlcore.trainer.rank0 import FINISHED
from rlcore.trainer.rank_sync import Failure
from rollout.engines.factories import ADMIN_KEY, API_KEY, Keys

CONCURRENT = 1000  # simultaneous calls of an actor


def drive(loaded: Loaded, *, resume: bool, overwrite: bool) -> int:
    """Run on a Ray cluster, and return the exit code of the run.

    Raises:
        UserError: bad input, or no cluster at `cluster.ray.address`.
        RunFailed: a rank failed, or was lost more than `cluster.max_restarts` times. The message is
            the same as under `local`.
    """
    check_input(loaded.config, world_size(loaded.config), resume=resume, overwrite=overwrite)
    requests = Requests()
    with ExitStack() as last, connected(loaded.config) as cluster, ExitStack() as stack:
        # Count signals until everything is closed, so that they do not change the exit code.
        last.enter_context(requests.counting_signals())
        return Driver(loaded, cluster, stack, requests).run(resume=resume, overwrite=overwrite)


class Driver:
    """Drives one run. `stack` ends all parts that it makes."""

    def __init__(
        self, loaded: Loaded, cluster: Cluster, stack: ExitStack, requests: Requests
    ) -> None:
        self._loaded = loaded
        self._cluster = cluster
        self._stack = stack
        self.config = loaded.config
        self._folder = Path(self.config.run.dir) / self.config.run.name
        self._keys = Keys.from_environment()
        self._requests = requests
        self._ranks: Ranks | None = None
        # Whether the ranks were asked to end.
        self._stopping = False
        self._run_status: Any = None
        self._hosts: list[Any] = []
        self._restarts = 0
        # Whether the ranks have opened the run's folder.
        self._opened = False
        # Whether this attempt resumes that run.
        self._resumes = False
        self._began = time.time()
        self._earlier = result_mark(self.config)

    def run(self, *, resume: bool, overwrite: bool) -> int:
        """Place all parts, restart the ranks until they succeed, and return the exit code."""
        with self._requests.interrupting_on_second(), self._writing_a_result():
            self._open_run_status()
            placement = self._cluster.placement
            # The trainer needs whole nodes and engines fit anywhere, so the trainer's bundles come
            # first. They stay for all attempts.
            trainer = self._stack.enter_context(reserve(placement.trainer, "PACK"))
            self._wait_for(trainer, "the trainer")
            engines = None
            if placement.engines:
                engines = self._stack.enter_context(reserve(placement.engines, "SPREAD"))
                self._wait_for(engines, "the engines")
            # The stack ends the engines before it returns their bundles.
            self._stack.callback(self._end_hosts)
            if not placement.shares_gpus:
                self._host_engines(engines, [])
            # A later attempt resumes the run that an earlier attempt has begun.
            while True:
                code = self._attempt(
                    trainer, resume=resume or self._opened, overwrite=overwrite and not self._opened
                )
                if code is not None:
                    return code

    def _wait_for(self, group: PlacementGroup, what: str) -> None:
        limit_s = self.config.cluster.start_timeout_s
        wait_for_room(group, what, self._cluster.placement, limit_s=limit_s, tick=self._tick)

    def _attempt(self, trainer: PlacementGroup, *, resume: bool, overwrite: bool) -> int | None:
        """Start the ranks, and return the run's exit code, or None for another attempt."""
        self._resumes = self._opened
        if self._resumes:
            limit = self.config.cluster.start_timeout_s
            wait_until_free(
                self._folder, limit_s=limit, key="cluster.start_timeout_s", tick=self._tick
            )
        self._wait_for(trainer, "the trainer")
        ranks = Ranks(self._cluster, trainer, self._loaded, self._tick)
        try:
            failure = ranks.place() or self._run(ranks, trainer, resume=resume, overwrite=overwrite)
            if failure is None:
                return max(ranks.codes.values())
            is_loss = ranks.is_loss(failure)
            result = RunDirectory(self._folder).read_result(but=self._earlier)
            status = None if result is None or not is_loss else result["status"]
            if status in FINISHED or (status == "interrupted" and self._stopping):
                warn(
                    f"trainer {failure}, after the end of the run: an upload or a tracker's"
                    " last record may be missing"
                )
                return 0 if status in FINISHED else INTERRUPTED
            may_restart = self._restarts < self.config.cluster.max_restarts and not self._stopping
            if not (is_loss and may_restart):
                ranks.wait_for_peers()
                return ranks.report(failure)
        finally:
            self._opened |= ranks.was_opened
            ranks.end()
            self._requests.finish()
            self._ranks = None
            self._write_run_status([])
        self._restarts += 1
        self._earlier = result_mark(self.config)
        again = (
            f"restart {self._restarts} of {self.config.cluster.max_restarts} (cluster.max_restarts)"
        )
        warn(f"trainer {failure}; {again}, from the last checkpoint")
        return None

    def _run(
        self, ranks: Ranks, group: PlacementGroup, *, resume: bool, overwrite: bool
    ) -> Failure | None:
        """Run the ranks, which have their actors, to their end."""
        if self._cluster.placement.shares_gpus:
            self._end_hosts()
            self._host_engines(group, ranks.gpus_of_nodes)
        self._write_run_status(
            [
                {"rank": rank, "node": node, "pid": pid, "gpus": gpus}
                for rank, (node, pid, gpus) in enumerate(ranks.where)
            ]
        )
        # From here on a stop request ends the ranks cleanly.
        self._ranks = ranks
        for_rank0 = {API_KEY: self._keys.api, ADMIN_KEY: self._keys.admin}
        if self._restarts and not self._cluster.placement.shares_gpus:
            for_rank0[RESTARTED] = str(self._restarts)
        return ranks.run(resume=resume, overwrite=overwrite, for_rank0=for_rank0)

    # --- the parts --------------------------------------------------------------------------------

    def _open_run_status(self) -> None:
        """Make the run status. Raises UserError if a run of this name is running already."""
        name = self.config.run.name
        run_status = ray.remote(RunStatus).options(
            name=actor_name(name, "status"),
            namespace=NAMESPACE,
            num_cpus=0,
            # The loss of the driver's node ends the run anyway.
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            ),
        )
        try:
            self._run_status = run_status.remote()
        except ValueError as error:
            raise UserError(
                f"run {name!r} is running on this cluster already: end it with"
                f" `rlcore stop {name}`, or choose another run.name"
            ) from error
        self._requests.follow(self._run_status)
        self._stack.callback(lambda: end_named([actor_name(name, "status")]))
        self._write_run_status([])

    def _write_run_status(self, ranks: list[dict[str, Any]]) -> None:
        self._run_status.write.remote(
            {
                "folder": str(self._folder.absolute()),
                "began": self._began,
                "ranks": ranks,
                "restarts": self._restarts,
            }
        )

    def _host_engines(self, group: PlacementGroup | None, gpus: list[list[str]]) -> None:
        """Make an actor for each engine, in its bundle.

        Args:
            gpus: of each node's ranks, which the engines in their bundle share; [] if none does.
        """
        placement = self._cluster.placement
        width = self.config.rollout.engine.tensor_parallel
        resources = bundles([placement.engine])[0]
        for index, bundle in enumerate(placement.hosts):
            start = placement.hosts[:index].count(bundle) * width
            shared = gpus[bundle][start : start + width] if gpus else []
            host = ray.remote(EngineHost).options(
                name=host_name(self.config.run.name, index),
                namespace=NAMESPACE,
                max_restarts=-1,
                num_cpus=resources.get("CPU", 0.0),
                num_gpus=resources.get("GPU", 0.0),
                max_concurrency=CONCURRENT,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=bundle
                ),
            )
            self._hosts.append(host.remote(os.getcwd(), self.config, index, self._keys, shared))

    def _end_hosts(self) -> None:
        name = self.config.run.name
        end_named([host_name(name, index) for index in range(len(self._hosts))])
        self._hosts = []

    # --- polling ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Print the output of rank 0, and pass on requests to stop."""
        self._requests.check()
        if not self._requests.count:
            return
        # Without ranks there is no step to finish.
        if self._ranks is None or self._requests.count > 1:
            raise KeyboardInterrupt
        if not self._stopping:
            self._stopping = True
            self._ranks.interrupt()

    @contextmanager
    def _writing_a_result(self) -> Iterator[None]:
        """Write the result of a run that was interrupted at once or cannot be resumed."""
        try:
            yield
        except KeyboardInterrupt:
            if self._opened:
                conclude_unless_written(
                    self.config, "interrupted", "it was ended at once", earlier=self._earlier
                )
            raise
        except RlcoreError as error:
            if self._resumes:
                conclude_unless_written(self.config, "failed", str(error), earlier=self._earlier)
            raise
