"""Runs under the ray launcher in this process, and what is done to them while they go."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil
import ray

from rlcore.launch.ray.calls import NAMESPACE, actor_name
from rlcore.runs.directory import RunDirectory
from tests.integration.held_estimator import held
from tests.integration.workspace import LEARNING, OF_ENGINES, Run, Workspace, learned
from tests.process_facts import command_of

REACH_S = 600.0  # a real server takes minutes to start on a busy machine
ANSWER_S = 120.0  # of an actor whose process starts on a busy machine
TWO_RANKS = (
    "policy.parallel.tensor=2",
    "cluster.processes_per_node=2",
    "rollout.service=process",
    *LEARNING,
)
STEPS = 16  # after an act at step 3 or 7 a quiet machine leaves a second or more to look
COMMON = (*TWO_RANKS, f"training.steps={STEPS}", "checkpoint.every=2")  # of runs that end alike


class Going:
    """A running run, seen from a thread of the driver's own process."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.name = run.folder.name

    def reach(self, step: int) -> None:
        """Wait until `step` is in the log; until the cluster knows of the run, for step 0."""
        deadline = time.monotonic() + REACH_S
        while not (self._steps() >= step if step else self._is_known()):
            assert time.monotonic() < deadline, f"no step {step} in {REACH_S} s"
            time.sleep(0.02)

    def _steps(self) -> int:
        path = self.run.folder / "metrics.jsonl"
        return (
            sum('"step"' in line for line in path.read_text().splitlines()) if path.exists() else 0
        )

    def _is_known(self) -> bool:
        try:
            return ray.is_initialized() and self.actor("status") is not None
        except ValueError:
            return False

    def actor(self, part: str) -> Any:
        return ray.get_actor(actor_name(self.name, part), namespace=NAMESPACE)

    def ranks(self) -> list[dict[str, Any]]:
        facts: dict[str, Any] = ray.get(self.actor("status").read.remote(), timeout=ANSWER_S)
        return list(facts.get("ranks", []))  # none before the first attempt

    def rank_pids(self) -> list[int]:
        return [rank["pid"] for rank in self.ranks()]

    def service_pid(self) -> int:
        rank_0 = psutil.Process(self.rank_pids()[0])
        [pid] = [
            child.pid
            for child in rank_0.children()
            if "rlcore.launch.service.child" in command_of(child)
        ]
        return int(pid)

    def server_pid(self, index: int = 0) -> int:
        pid: int = ray.get(self.actor(f"engine-{index}").pid.remote(), timeout=ANSWER_S)
        return pid

    def engine_pid(self, index: int = 0) -> int:
        """The process id of the actor that owns an engine's server."""
        return int(psutil.Process(self.server_pid(index)).ppid())

    def engine_states(self) -> list[str]:
        """The engines' states as the service writes them; empty before it has."""
        path = RunDirectory(self.run.folder).engines_path
        return [row["state"] for row in json.loads(path.read_bytes())] if path.exists() else []

    def kill_rank(self, rank: int) -> None:
        os.kill(self.rank_pids()[rank], signal.SIGKILL)

    def stop_rank(self, rank: int) -> None:
        os.kill(self.rank_pids()[rank], signal.SIGSTOP)

    @contextmanager
    def paused(self, after: int) -> Iterator[None]:
        """Hold the run once it has logged step `after`, however long it takes to look at it.

        Whom to stop is asked before the steps begin: they are quicker than a busy cluster answers.
        """
        stopped = self._started_ranks()[-1]
        self.reach(after)
        os.kill(stopped, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(stopped, signal.SIGCONT)

    def _started_ranks(self) -> list[int]:
        deadline = time.monotonic() + REACH_S
        while not (pids := self.rank_pids()):
            assert time.monotonic() < deadline, f"no ranks in {REACH_S} s"
            time.sleep(0.02)
        return pids

    def kill_service(self) -> None:
        os.kill(self.service_pid(), signal.SIGKILL)

    def processes(self) -> set[int]:
        """The processes of ranks, service and engine, with their children."""
        actors = {*self.rank_pids(), self.service_pid(), self.engine_pid()}
        return actors | {
            child.pid for pid in actors for child in psutil.Process(pid).children(recursive=True)
        }


class RayRuns:
    """Runs `rlcore train` on the cluster at `address`, by default in this process."""

    def __init__(self, workspace: Workspace, address: str) -> None:
        self.workspace = workspace
        self.address = address

    @property
    def _settings(self) -> tuple[str, ...]:
        return "cluster.launcher=ray", f"cluster.ray.address={self.address}"

    def going(self, name: str) -> Going:
        return Going(Run(0, "", "", self.workspace.folder / "runs" / name))

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Start `rlcore train` in a process of its own."""
        command = (
            sys.executable,
            "-m",
            "rlcore",
            "train",
            str(self.workspace.base),
            f"run.name={name}",
            *self._settings,
            *arguments,
        )
        return subprocess.Popen(
            command,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def train(
        self,
        name: str,
        *arguments: str,
        acts: Sequence[tuple[int, Callable[[Going], object]]] = (),
        held_after: int | None = None,
    ) -> Run:
        """Run to the end; once step `acts[i][0]` is in the log, do `acts[i][1]`.

        `held_after` steps later the run waits for it, however late the machine lets it come; by
        default a run of COMMON alone does.
        """
        if held_after is None and f"training.steps={STEPS}" in arguments:
            held_after = 2
        going = self.going(name)
        failed: list[BaseException] = []
        folder = Path(mkdtemp(prefix="acts"))
        acted = [folder / f"{number}" for number in range(len(acts))]
        if acts and held_after is not None:
            holds = {path: step + held_after for path, (step, _) in zip(acted, acts, strict=True)}
            arguments = (*arguments, held(going.run.folder, holds))

        def act() -> None:
            try:
                for path, (step, do) in zip(acted, acts, strict=True):
                    going.reach(step)
                    do(going)
                    path.touch()
            except BaseException as error:  # noqa: BLE001  for the test, which raises it
                failed.append(error)
                for path in acted:
                    path.touch()

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        run = self.workspace.train(name, *self._settings, *arguments)
        thread.join(timeout=60)
        shutil.rmtree(folder)
        if failed:
            raise AssertionError(f"{failed[0]!r}; the run said: {run.out}{run.err}") from failed[0]
        return run


def until(reached: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + REACH_S
    while not reached():
        assert time.monotonic() < deadline, f"it did not come in {REACH_S} s"
        time.sleep(0.01)


def until_gone(pids: set[int], *, within_s: float) -> set[int]:
    """Wait for processes to end; return those that still run after `within_s`."""
    deadline = time.monotonic() + within_s
    while (left := {pid for pid in pids if _runs(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def command(*arguments: str, code: int = 0) -> str:
    """Run `rlcore ARGUMENTS` in a process that ends with `code`; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "rlcore", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr if code else done.stdout


def balance(run: Run, step: int) -> dict[str, int]:
    """Check the ledger against the newest checkpoint, of `step`; count its draws by state."""
    from rlcore.runs.directory import RunDirectory
    from rollout.accounting.audit import audit

    found = audit(RunDirectory(run.folder))
    assert found.contradictions == []
    assert found.checkpoint == found.steps == found.recorded == step
    return found.states


def check_as_undisturbed(run: Run, local: Run) -> None:
    """Check that a run of COMMON has the metrics, weights and ledger of `local`."""
    assert run.code == 0, run.err
    assert run.result["status"] == "completed"
    assert learned(run.metrics, without=OF_ENGINES) == learned(local.metrics, without=OF_ENGINES)
    assert run.exported.read_bytes() == local.exported.read_bytes()
    assert balance(run, STEPS)["consumed"] == 4 * STEPS
