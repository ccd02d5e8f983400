"""Nodes with networks of their own for a run of the soak, and what is wrong with their links."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.network.cluster import Cable, Cluster
from tests.network.slurm import Slurm
from tests.soak.progress import Moment, Progress

# What is said of a fault. Every node has the card; a cut that takes place gets its moment.
LINKS = {"card": "a card that leads nowhere", "cut": "never cut", "slow": "slow, a tenth is lost"}
FAULTS = tuple(LINKS)
CUT_S = 10.0
SLOW = Cable(delay_s=0.025, loss=0.1, bytes_per_s=125e6)
LOOK_S = 2.0  # between two looks for a node that was switched off
POLL_S = 0.05


class Network:
    """Two nodes for all lives of a run.

    Args:
        folder: of logs and of Slurm's state; must be new.
        fault: one of FAULTS.
        with_slurm: Slurm's daemons run on the nodes.
    """

    def __init__(self, folder: Path, fault: str, *, with_slurm: bool) -> None:
        folder.mkdir()
        self.link = LINKS[fault]
        self.cluster = Cluster(2, folder, SLOW if fault == "slow" else None)
        self.slurm = Slurm(self.cluster) if with_slurm else None
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._cuts: list[Future[None]] = []
        self._look_at = 0.0

    @property
    def environment(self) -> dict[str, str]:
        return self.slurm.environment if self.slurm else {}

    def cut_at(self, run: Path, moment: Moment) -> None:
        """Take node 1's cable out at a moment of the run, for CUT_S, while others go on."""
        self._cuts.append(self._pool.submit(self._cut_at, run, moment))

    def tend(self) -> None:
        """Start the node again that was switched off, and with it Slurm's daemon.

        Slurm would see from a real node's clock that it has started again. Here it has to miss the
        node first.
        """
        if self.slurm is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_S
        if not self.cluster.processes(1) and self.slurm.states[1].startswith("down"):
            self.slurm.join(1)

    def close(self) -> None:
        self._over.set()
        try:
            for cut in self._cuts:
                cut.result()
        finally:
            self._pool.shutdown()
            self.cluster.close()

    def _cut_at(self, run: Path, moment: Moment) -> None:
        while not Progress.of(run).reached(moment.after):
            if self._over.wait(POLL_S):
                return
        if self._over.wait(moment.seconds):
            return
        self.link = f"cut for {CUT_S:g} s {Progress.of(run)}"
        self.cluster.cut(1)
        time.sleep(CUT_S)
        self.cluster.mend(1)
