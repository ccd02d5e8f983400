"""Runs one rank, from joining the others to its exit code; the same for every launcher."""

from __future__ import annotations

import errno
import logging
from contextlib import ExitStack
from pathlib import Path

from rlcore.config import Config
from rlcore.config.derived import total_steps, updates_per_step
from rlcore.config.load import Loaded
from rlcore.errors import FAILED, DataError, RunFailed, UserError, exit_code
from rlcore.launch.compose import (
    build_algorithm,
    build_backend,
    build_gpu_sharing,
    build_rank0,
    build_weight_publisher,
    export_policy,
    open_handles,
    replay_from,
    start_engines,
)
from rlcore.launch.environment import supervised, wait_for_reporter
from rlcore.launch.input_checks import check_input
from rlcore.launch.logs import describe_failure, log_folder
from rlcore.launch.process import Process, join
from rlcore.launch.run_folder import mark_opened, open_run, pin_initial_policy, record_timeline
from rlcore.launch.service.client import ServiceClient, begin_service
from rlcore.launch.torchrun_attempts import RunHasEnded, mark_ended
from rlcore.runs.directory import Status
from rlcore.runs.versions import VersionJournal
from rlcore.timeline.start import START
from rlcore.tracking.hub import push_run, reach_hub
from rlcore.trainer.loop import Trainer
from rlcore.trainer.rank0 import FINISHED, Outcome, RankZero
from rlcore.trainer.rank_sync import PeerFailed, in_one_line, on_rank0

logger = logging.getLogger(__name__)


def train_rank(loaded: Loaded, *, resume: bool, overwrite: bool, is_checked: bool) -> int:
    """Train as the rank that the environment names, or as the only rank; return its exit code.

    Args:
        is_checked: a launcher has checked the input for all ranks.
    """
    rank = 0
    START.begin()
    try:
        with ExitStack() as stack:
            service = begin_service(loaded.config, stack)
            process = stack.enter_context(join(loaded.config))
            rank = process.sync.rank
            resumes = process.attempt.resumes
            outcome = run_rank(
                process,
                loaded,
                resume=resume or resumes,
                # The first attempt has overwritten the run.
                overwrite=overwrite and not resumes,
                is_checked=is_checked,
                service=service,
            )
    except RunHasEnded as ended:
        return ended.code
    except PeerFailed as error:
        # Another process reports the failure.
        if rank != 0 or supervised():
            wait_for_reporter()
            return FAILED
        raise RunFailed(describe_failure(error.failure, loaded.config.run)) from error
    return exit_code(outcome.status)


def run_rank(
    process: Process,
    loaded: Loaded,
    *,
    resume: bool,
    overwrite: bool,
    is_checked: bool,
    service: ServiceClient | None,
) -> Outcome:
    """Build the parts of this rank, train, and end the run.

    Without `service`, the process of the rollout service, a service runs in this process.
    """
    sync = process.sync
    with START.phase("input"):
        if not is_checked:
            check_input(loaded.config, sync.world_size, resume=resume, overwrite=overwrite)
        loaded = pin_initial_policy(loaded, resume=resume)
    config = loaded.config
    start_s = config.cluster.start_timeout_s
    objective, credit = build_algorithm(config)
    with ExitStack() as stack, process.reporting_errors():
        # Check all input before touching a run of the same name.
        with START.phase("data"):
            handles = sync.run_on_rank0(
                "reading the data",
                lambda: open_handles(
                    config, stack, greedy_baseline=credit.needs_baseline, service=service
                ),
                timeout_s=start_s,
            )
        if config.tracking.hub.repo:
            sync.run_on_rank0(
                "reaching the hub", lambda: reach_hub(config.tracking.hub), timeout_s=start_s
            )
        prompts = sync.broadcast(
            "counting the prompts", lambda: str(on_rank0(handles).num_prompts), timeout_s=start_s
        )
        steps = total_steps(config, int(prompts))
        with START.phase("models"):
            backend = build_backend(
                config, process, objective, credit, optimizer_steps=steps * updates_per_step(config)
            )
        stack.callback(backend.close)
        sharing = build_gpu_sharing(config, process, backend, handles)
        with START.phase("other ranks"):
            sync.barrier("building the models", timeout_s=start_s)
        run = sync.run_on_rank0(
            "opening the run",
            lambda: open_run(loaded, steps, stack, resume=resume, overwrite=overwrite),
            timeout_s=start_s,
        )
        process.log.open(log_folder(config.run))
        stack.callback(record_timeline(config, f"rank_{sync.rank}"))
        if run is not None:
            mark_opened(sync.store)
            process.on_failure.append(lambda failure: run.end_with(RunFailed(str(failure))))
        start_engines(process, config, handles)
        rank0 = journal = None
        if run is not None:
            newest = run.resume_from.state.get("version") if run.resume_from else None
            journal = VersionJournal(run.directory.versions_path, newest=newest or 0)
            rank0 = build_rank0(
                loaded, process, on_rank0(handles), run, journal, backend, credit, steps, stack
            )
        publisher = build_weight_publisher(config, process, backend, handles, journal, stack)
        trainer = Trainer(
            config, sync, backend, credit, steps, publisher, rank0, sharing, replay_from(config)
        )
        return finish(trainer, process)


def finish(trainer: Trainer, process: Process) -> Outcome:
    """Train, export, and write the result of the run, even if it fails."""
    config = trainer.config
    rank0 = trainer.rank0
    folder = Path(config.run.dir) / config.run.name / "hf"
    try:
        with process.reporting_errors():
            outcome = trainer.train()
            if outcome.status in FINISHED and config.checkpoint.export_hf:
                trainer.backend.export_hf(folder)
    except BaseException as error:
        if rank0 is not None:
            status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            if not isinstance(error, UserError):
                try:
                    rank0.conclude(status, reason=in_one_line(error))
                # A full disk or damaged metrics must not hide the first error.
                except (OSError, DataError) as second:
                    logger.error("result.json could not be written: %s", second)
            rank0.tracker.close(status)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(
                f"{error}; free space under {config.run.dir} and continue with --resume"
            ) from error
        raise

    def conclude() -> None:
        on_rank0(rank0).conclude(outcome.status)
        # A rank that restarts after this has nothing to do.
        mark_ended(process.sync.store, exit_code(outcome.status))

    process.sync.run_on_rank0("the result of the run", conclude)
    # The other ranks leave now, as an upload can take longer than they would wait.
    if rank0 is not None:
        if process.heartbeat is not None:
            process.heartbeat.ignores_peers = True
        if outcome.status in FINISHED and config.checkpoint.export_hf:
            _export_best(config, rank0)
        if outcome.status in FINISHED and config.tracking.hub.repo:
            push_run(config.tracking.hub, folder, rank0.directory, rank0.tracker)
        rank0.tracker.close(outcome.status)
    return outcome


def _export_best(config: Config, rank0: RankZero) -> None:
    """Write the best checkpoint as `hf_best/`. An error here does not fail the run."""
    best = rank0.best
    if best is None:
        return
    folder = rank0.directory.path / "hf_best"
    note = f"{folder} has step {best.step}, the best {best.metric}: {best.value:.6g}"
    try:
        export_policy(config, rank0.checkpoints.path(best.step) / "model", folder)
    except (OSError, RunFailed, UserError) as error:
        note = (
            f"WARNING {folder} could not be written: {in_one_line(error)}; try again by `rlcore"
            f" export {rank0.directory.path} FOLDER --best`"
        )
    rank0.tracker.note(note)
