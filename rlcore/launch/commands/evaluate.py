"""`rlcore eval` scores a model on sets of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlcore.config import Config
from rlcore.config.evaluation_sets import SET_KEY
from rlcore.config.load import Loaded
from rlcore.config.sections.algorithm import AlgorithmConfig
from rlcore.config.sections.policy import ParallelConfig
from rlcore.data.sample import Branch, Sample, branches_of, verdict_word
from rlcore.deadlines import STEP_GRACE_S
from rlcore.errors import RunFailed, UserError
from rlcore.interfaces import PolicyBackend
from rlcore.launch.compose import (
    build_algorithm,
    build_backend,
    build_gpu_sharing,
    build_weight_publisher,
    open_handles,
    start_engines,
)
from rlcore.launch.environment import is_rank, resolved_by_launcher
from rlcore.launch.input_checks import check_model
from rlcore.launch.local import launch_ranks
from rlcore.launch.process import Process, join
from rlcore.launch.run_folder import pin_initial_policy
from rlcore.launch.service.client import ServiceClient, begin_service
from rlcore.runs.rollouts import to_json
from rlcore.runs.versions import VersionJournal
from rlcore.terminal import printable, redacted
from rlcore.tracking.format import pick_samples, sample_lines
from rlcore.trainer.gpu_sharing import GpuPhase
from rlcore.trainer.rank0 import CATCH_UP, READY
from rlcore.trainer.rank_sync import on_rank0
from rollout.rewards.scorer import VERDICTS

Scored = tuple[dict[str, float], list[Sample]]


def evaluate_model(
    loaded: Loaded,
    *,
    output: Path | None,
    sets: Sequence[str] = (),
    all_ranks: bool = False,
    arguments: Sequence[str] = (),
) -> int:
    """Score the configured weights on the evaluation prompts; print scores and a few samples.

    Args:
        sets: names of `evaluation.sets`; default: all of them, and `evaluation.paths`.
        all_ranks: hold the model in the configured layout, on the ranks that would train. Without
            it one process holds the model, except under torchrun.
        arguments: the command line after `rlcore`, passed on to the ranks.
    """
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise UserError(f"--output: {output} cannot be written: it needs a folder that is there")
    known = loaded.config.evaluation.sets
    for name in sets:
        if name not in known:
            message = f"there is no set {name!r}, but: {', '.join(known) or 'none'}"
            raise loaded.error("evaluation.sets", message)
    config = pin_initial_policy(loaded, resume=False).config
    _adapt(config, in_one_process=not (all_ranks or is_rank()))
    if sets:
        config.evaluation.paths = []
        config.evaluation.sets = {name: config.evaluation.sets[name] for name in sets}
    with ExitStack() as stack:
        config.run.dir = stack.enter_context(TemporaryDirectory())
        config.run.name = "eval"
        if all_ranks and not is_rank():
            if (launcher := config.cluster.launcher) != "local":
                raise loaded.error(
                    "cluster.launcher",
                    f"{launcher} starts no ranks for an evaluation: start `rlcore eval` itself by"
                    " torchrun, or set cluster.launcher=local and cluster.processes_per_node",
                )
            check_model(config, config.cluster.processes_per_node)
            if config.cluster.processes_per_node > 1:
                return launch_ranks(replace(loaded, config=config), arguments)
        service = begin_service(config, stack)
        process = stack.enter_context(join(config, has_steps=False))
        with process.reporting_errors():
            scored = _evaluate(config, process, stack, service)
    if scored is not None:
        _show(config, *scored, output)
    return 0


def _evaluate(
    config: Config, process: Process, stack: ExitStack, service: ServiceClient | None
) -> Scored | None:
    """Publish the weights and score the prompts; rank 0 returns the result. Collective."""
    sync = process.sync
    start_s = config.cluster.start_timeout_s
    if resolved_by_launcher() is None:
        check_model(config, sync.world_size)
    handles = sync.run_on_rank0(
        "reading the data", lambda: open_handles(config, stack, service=service), timeout_s=start_s
    )
    backend = _policy_only(config, process, stack)
    sharing = build_gpu_sharing(config, process, backend, handles)
    sync.barrier("building the model", timeout_s=start_s)
    start_engines(process, config, handles)
    versions = Path(config.run.dir) / "versions.jsonl"
    journal = None if handles is None else VersionJournal(versions)
    publisher = build_weight_publisher(config, process, backend, handles, journal, stack)
    assert publisher is not None
    found: list[Scored] = []

    def score() -> str:
        scored = on_rank0(handles).source.evaluate()
        if scored is None:
            return CATCH_UP
        found.append(scored)
        return READY

    def publish(send: Callable[[], str]) -> None:
        if sharing is not None:
            sharing.switch_to(GpuPhase.HANDOVER)
        if lost := send():
            raise RunFailed(lost)
        if sharing is not None:
            sharing.switch_to(GpuPhase.GENERATING)

    publish(lambda: publisher.publish(0))
    limit_s = config.rollout.timeout_s + STEP_GRACE_S
    while sync.broadcast("the evaluation", score, timeout_s=limit_s) == CATCH_UP:
        publish(publisher.catch_up)
    return found[0] if found else None


def _show(
    config: Config, metrics: dict[str, float], samples: Sequence[Sample], output: Path | None
) -> None:
    by_set: dict[str, list[Sample]] = {}
    for sample in samples:
        by_set.setdefault(sample.metadata.get(SET_KEY, ""), []).append(sample)
    for name, made in by_set.items():
        for sample in pick_samples(made, config.tracking.show_samples):
            head, *texts = sample_lines(sample)
            print(printable("\n".join([f"{name}: {head}" if name else head, *texts])))
    width = max(24, *map(len, metrics))
    for name, value in metrics.items():
        print(f"{name:{width}} {value:.6g}")
    if output is not None:
        branches = branches_of(
            ((one.metadata.get(SET_KEY, ""), one.draw), one.rollout_id) for one in samples
        )
        answers = [_answer(one, branch) for one, branch in zip(samples, branches)]
        found = {"samples": len(samples), **metrics, "answers": answers}
        output.write_text(redacted(to_json(found).decode()) + "\n")


def _answer(sample: Sample, branch: Branch) -> dict[str, Any]:
    """Return the text and the scores of one sample, JSON-able."""
    found = {
        "set": sample.metadata.get(SET_KEY, ""),
        "row": sample.prompt_id,
        **branch._asdict(),
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "label": sample.label,
        "score": sample.reward,
        "verdict": verdict_word(sample.verdict),
        "parts": sample.reward_parts,
        "finish_reason": sample.finish_reason,
    }
    if sample.turn_spans:
        found["messages"] = sample.messages
    return found | {key: sample.metadata[key] for key in VERDICTS if key in sample.metadata}


def _adapt(config: Config, *, in_one_process: bool) -> None:
    """Turn any run, also a supervised one or a replay without an engine, into one that generates.

    Args:
        in_one_process: drop the layout, since one process that trains nothing holds the model.
    """
    config.training.debug = None
    config.training.replay = None
    config.training.replay_from = None
    # The training prompts are read but not answered, so their responses need no room.
    if config.evaluation.max_new_tokens is not None:
        config.rollout.sampling.max_new_tokens = config.evaluation.max_new_tokens
    if config.learns_from_rows:
        config.algorithm = AlgorithmConfig()
    if in_one_process:
        config.policy.parallel = ParallelConfig()
        config.policy.optimizer.distributed = False
        config.cluster.launcher = "local"
        config.cluster.processes_per_node = 1


def _policy_only(config: Config, process: Process, stack: ExitStack) -> PolicyBackend:
    """The policy without an optimizer, since nothing is trained."""
    objective, _ = build_algorithm(config)
    try:
        backend = build_backend(config, process, objective, None, optimizer_steps=0)
    except torch.OutOfMemoryError as error:
        raise RunFailed(
            f"{config.model.path} does not fit into the memory of its"
            f" {process.sync.world_size} GPU(s): `rlcore eval --all-ranks` holds it in the"
            " configured layout (policy.parallel, cluster.processes_per_node):"
            f" {error}"
        ) from error
    stack.callback(backend.close)
    return backend
