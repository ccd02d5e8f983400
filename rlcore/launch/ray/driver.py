"""`rlcore train` with `cluster.launcher: ray`: places the parts of a run, watches them, and starts again what is lost.

    this process    the ranks' store, the terminal, signals
    board           a small actor: `rlcore status`, `rlcore stop`
    engine hosts    an actor an engine; Ray starts it elsewhere when its node is lost
    service         an actor; Ray starts it again, and rank 0 tells it where it was
    ranks           an actor each; when one is lost all are started again, from the last checkpoint
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlcore.config.derived import generates, world_size
from rlcore.config.load import Loaded
from rlcore.errors import UserError
from rlcore.launch.compose import check_input
from rlcore.launch.engines import engine_name
from rlcore.launch.ray.board import Board
from rlcore.launch.ray.calls import NAMESPACE, actor_name, end_named
from rlcore.launch.ray.cluster import Cluster, connected, room
from rlcore.launch.ray.engines import EngineHost
from rlcore.launch.ray.placement import bundles
from rlcore.launch.ray.ranks import Ranks
from rlcore.launch.ray.service import ServiceActor
from rlcore.launch.ray.workplace import Lines, Workplace
from rollout.engines.sglang.keys import Keys

CLOSE_S = 20.0          # for the service to end its engines, before they are ended with their actors
CONCURRENT = 1000       # calls of the service at a time


def drive(loaded: Loaded, *, resume: bool, overwrite: bool) -> int:
    """Run on a Ray cluster. The exit code of the run.

    Raises:
        UserError: bad input, or no cluster at `cluster.ray.address`.
        RunFailed: a rank failed, or was lost more than `cluster.max_restarts` times; the message is as under `local`.
    """
    check_input(loaded.config, world_size(loaded.config), resume=resume, overwrite=overwrite)
    with connected(loaded.config) as cluster, ExitStack() as stack:
        return Driver(loaded, cluster, stack).run(resume=resume, overwrite=overwrite)


def host_name(run: str, index: int) -> str:
    """Of the actor of an engine."""
    return actor_name(run, engine_name(index))


def here() -> NodeAffinitySchedulingStrategy:
    """On the driver's node, if there is room: with that the run is lost anyway."""
    return NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=True)


class Driver:
    """One run. What it makes ends with `stack`."""

    def __init__(self, loaded: Loaded, cluster: Cluster, stack: ExitStack) -> None:
        self._loaded, self._cluster, self._stack = loaded, cluster, stack
        self.config = loaded.config
        self._lines = Lines(cluster.address)
        self._workplace = Workplace(os.getcwd(), cluster.address, self._lines.port)
        self._keys = Keys.from_environment()
        self._signals = 0                       # that came
        self._ranks: Ranks | None = None
        self._asked = False                     # the ranks were asked to end
        self._board: Any = None
        self._stop_asked: list[Any] = []        # the call that returns when `rlcore stop` was said
        self._service: Any = None
        self._hosts: list[Any] = []
        self._restarts = 0
        self._opened = False                    # the ranks have taken the run's folder

    def run(self, *, resume: bool, overwrite: bool) -> int:
        with self._heeding_signals():
            self._stack.callback(self._lines.show)
            self._open_board()
            limit, placement = self.config.cluster.start_timeout_s, self._cluster.placement
            engines = self._stack.enter_context(
                room(placement.engines, "SPREAD", self._cluster, "the engines", limit_s=limit, tick=self._tick)
            )
            self._stack.callback(self._end_service)     # while the engines still have their bundles
            if not placement.shares_gpus:
                self._host_engines(engines, [])
                self._start_service()
            code = None
            while code is None:     # what an attempt has begun, the next one goes on with
                code = self._attempt(resume=resume or self._opened, overwrite=overwrite and not self._opened)
            return code

    def _attempt(self, *, resume: bool, overwrite: bool) -> int | None:
        """One start of the ranks: the run's exit code, or None for another one."""
        limit, placement = self.config.cluster.start_timeout_s, self._cluster.placement
        with room(placement.trainer, "PACK", self._cluster, "the trainer", limit_s=limit, tick=self._tick) as group:
            assert group is not None
            ranks = self._ranks = Ranks(self._cluster, group, self._loaded, self._workplace, self._tick)
            try:
                ranks.place()
                if placement.shares_gpus:
                    self._end_service()
                    self._host_engines(group, ranks.gpus)
                    self._start_service()
                self._write_board(ranks)
                failure = ranks.run(resume=resume, overwrite=overwrite, service=self._service)
                if failure is None:
                    return max(ranks.codes.values())
                self._opened |= ranks.was_opened
                if not self._goes_on(ranks.is_loss(failure)):
                    ranks.wait_for_the_others()
                    self._lines.show()
                    return ranks.report(failure)
            finally:
                ranks.end()
                self._ranks = None
        self._restarts += 1
        again = f"restart {self._restarts} of {self.config.cluster.max_restarts} (cluster.max_restarts)"
        print(f"warning: trainer {failure}; {again}, from the last checkpoint", file=sys.stderr, flush=True)
        return None

    def _goes_on(self, is_loss: bool) -> bool:
        return is_loss and self._restarts < self.config.cluster.max_restarts and not self._asked

    # --- the parts ------------------------------------------------------------------------------------------------

    def _open_board(self) -> None:
        """Raises UserError where a run of this name goes on already."""
        name = self.config.run.name
        board = ray.remote(Board).options(
            name=actor_name(name, "board"), namespace=NAMESPACE, num_cpus=0, max_concurrency=CONCURRENT,
            scheduling_strategy=here(),
        )  # fmt: skip
        try:
            self._board = board.remote()
        except ValueError as error:
            raise UserError(
                f"run {name!r} goes on on this cluster already: end it with `rlcore stop {name}`, or choose another run.name"
            ) from error
        self._stop_asked = [self._board.until_stop.remote()]
        self._stack.callback(lambda: end_named([actor_name(name, "board")]))
        self._board.write.remote({"run": name, "folder": os.path.join(os.getcwd(), self.config.run.dir, name),
                                  "driver": os.getpid(), "began": time.time()})  # fmt: skip

    def _write_board(self, ranks: Ranks) -> None:
        facts = [{"rank": rank, "node": node, "pid": pid} for rank, (node, pid) in enumerate(zip(ranks.nodes, ranks.pids))]
        self._board.write.remote({"ranks": facts, "restarts": self._restarts})

    def _host_engines(self, group: Any, gpus: list[list[str]]) -> None:
        """An actor an engine, in its bundle. `gpus`: of each rank, for engines that share them."""
        placement, width = self._cluster.placement, self.config.rollout.engine.tensor_parallel
        resources = bundles([placement.engine])[0]
        free = {node: [gpu for place, mine in zip(placement.ranks, gpus) if place.node == node for gpu in mine]
                for node in range(len(placement.trainer))}  # fmt: skip
        for index, bundle in enumerate(placement.hosts):
            shared, free[bundle] = (free[bundle][:width], free[bundle][width:]) if gpus else ([], [])
            host = ray.remote(EngineHost).options(
                name=host_name(self.config.run.name, index), namespace=NAMESPACE, max_restarts=-1,
                num_cpus=resources.get("CPU", 0.0), num_gpus=resources.get("GPU", 0.0), max_concurrency=CONCURRENT,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=bundle
                ),
            )  # fmt: skip
            self._hosts.append(host.remote(self._workplace, self.config, index, self._keys, shared))

    def _start_service(self) -> None:
        if not generates(self.config):
            return
        resources = bundles([self._cluster.placement.service])[0]
        service = ray.remote(ServiceActor).options(
            name=actor_name(self.config.run.name, "service"), namespace=NAMESPACE, max_restarts=-1,
            num_cpus=resources.get("CPU", 0.0), max_concurrency=CONCURRENT, scheduling_strategy=here(),
        )  # fmt: skip
        names = [host_name(self.config.run.name, index) for index in range(len(self._hosts))]
        self._service = service.remote(self._workplace, self.config, names, self._keys)

    def _end_service(self) -> None:
        """With its engines."""
        if self._service is not None:
            with suppress(RayError):
                ray.get(self._service.close.remote(), timeout=CLOSE_S)
        name = self.config.run.name
        end_named([actor_name(name, "service"), *(host_name(name, index) for index in range(len(self._hosts)))])
        self._service, self._hosts = None, []

    # --- meanwhile ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Show what the actors print; pass on that the run shall end."""
        self._lines.show()
        if self._stop_asked and ray.wait(self._stop_asked, timeout=0)[0]:
            with suppress(RayError):            # the board is lost: nobody can say it any more
                ray.get(self._stop_asked)
                self._signals += 1
            self._stop_asked = []
        if self._signals and self._ranks is None:
            raise KeyboardInterrupt         # nothing is trained yet, or at the moment
        if self._signals and self._ranks is not None and not self._asked:
            self._asked = True
            self._ranks.interrupt()

    @contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        """SIGTERM and the first Ctrl-C ask for a clean end after this step; a second one interrupts at once."""

        def heed(_number: int, _frame: object) -> None:
            self._signals += 1
            if self._signals > 1:
                raise KeyboardInterrupt

        previous = {number: signal.signal(number, heed) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
