"""Checks across sections, made when a configuration is loaded. Pure: no torch, no files, no
network.

Each check is a function that yields a `Problem` for every key that is wrong; its docstring's first
line is what `rlcore validate` prints. `notes_on` says what is legal but has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlcore.config.checks.algorithm import correction, loss_terms, reward_terms
from rlcore.config.checks.colocated import colocated, colocated_notes, engine_gpus
from rlcore.config.checks.engine import engine_kind, engine_notes, engine_servers, engine_transport
from rlcore.config.checks.ray import ray_launcher, ray_notes
from rlcore.config.checks.servers import managed_servers
from rlcore.config.checks.staleness import ahead, ahead_notes
from rlcore.config.derived import (
    GROUP_ESTIMATORS,
    generates,
    model_parallel_size,
    pack_multiple,
    truncates,
    updates_per_step,
)
from rlcore.config.engine_kinds import KINDS
from rlcore.config.messages import Problem
from rlcore.config.sections.algorithm import EstimatorConfig
from rlcore.config.sections.policy import CriticConfig, ReferenceConfig, TeacherConfig
from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.rollout import RolloutConfig
from rlcore.config.sections.root import Config

Problems = Iterator[Problem]
Check = Callable[[Config], Problems]

_SIZES = ("tensor", "pipeline", "context", "expert")


def check(config: Config) -> list[Problem]:
    """Everything that is wrong with `config`, by every check."""
    return [problem for one in CHECKS for problem in one(config)]


def describe_checks() -> list[str]:
    """One line a check."""
    return [(one.__doc__ or one.__name__).splitlines()[0].rstrip(".") for one in CHECKS]


def length(config: Config) -> Problems:
    """The run's length is given exactly once."""
    kinds = ("steps", "epochs") if config.is_sft else ("steps", "episodes", "epochs")
    given = [
        kind
        for kind in ("steps", "episodes", "epochs")
        if getattr(config.training, kind) is not None
    ]
    names = ", ".join(f"training.{kind}" for kind in kinds)
    if not given:
        yield Problem("training", f"how long to train is missing: set one of {names}")
    elif len(given) > 1:
        yield Problem(
            f"training.{given[1]}", f"{' and '.join(given)} are both given: keep one of {names}"
        )
    elif given[0] not in kinds:
        yield Problem(
            f"training.{given[0]}", f"supervised fine-tuning counts no episodes: set one of {names}"
        )


def early_stopping(config: Config) -> Problems:
    """Early stopping has a positive target and a KL to compare with it."""
    training = config.training
    if not training.early_stopping:
        return
    if not training.target_kl:
        got = "null" if training.target_kl is None else f"{training.target_kl:g}"
        yield Problem(
            "training.target_kl",
            f"got {got}, expected a positive number, as training.early_stopping is on",
        )
    if config.is_sft or training.debug == "rollout_only":
        why = "supervised fine-tuning" if config.is_sft else "training.debug: rollout_only"
        yield Problem(
            "training.early_stopping", f"{why} measures no KL against the reference: turn it off"
        )


def batch(config: Config) -> Problems:
    """Every optimizer step has samples, and groups are large enough for the estimator."""
    rollout = config.rollout
    algorithm = config.algorithm
    if config.is_sft:
        if algorithm.minibatches > config.training.batch_size:
            yield Problem(
                "algorithm.minibatches",
                f"more than training.batch_size ({config.training.batch_size})",
            )
        return
    if algorithm.minibatches > rollout.prompts_per_step:
        message = (
            f"got {algorithm.minibatches}, at most rollout.prompts_per_step"
            f" ({rollout.prompts_per_step}): "
        )
        yield Problem("algorithm.minibatches", message + "a group is never split")
    for who, compares in (
        (f"estimator {algorithm.estimator.name!r}", algorithm.estimator.name in GROUP_ESTIMATORS),
        ("algorithm.normalize_advantages: group", algorithm.normalize_advantages == "group"),
    ):
        if compares and rollout.samples_per_prompt == 1:
            message = f"got 1, but {who} compares the samples of one prompt: use 2 or more"
            yield Problem("rollout.samples_per_prompt", message)


def layout(config: Config) -> Problems:
    """The parallel layout is consistent and fits the launcher."""
    parallel = config.policy.parallel
    cluster = config.cluster
    if parallel.sequence and parallel.tensor == 1:
        yield Problem(
            "policy.parallel.sequence",
            "sequence parallelism needs policy.parallel.tensor > 1: set it to false",
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield Problem(
            "policy.parallel.virtual_pipeline",
            "a virtual pipeline needs policy.parallel.pipeline > 1: set it to 1",
        )
    for key in ("first_stage_layers", "last_stage_layers"):
        if getattr(parallel, key) is not None and parallel.pipeline == 1:
            yield Problem(
                f"policy.parallel.{key}",
                "there is one stage: leave it out, or set policy.parallel.pipeline",
            )
    model = model_parallel_size(config)
    processes = cluster.nodes * cluster.processes_per_node
    if cluster.launcher == "local" and cluster.nodes > 1:
        yield Problem(
            "cluster.nodes",
            "the local launcher starts processes on this machine alone: use torchrun or ray",
        )
    elif cluster.launcher != "torchrun" and processes < model:
        path = "policy.parallel." + next(axis for axis in _SIZES if getattr(parallel, axis) > 1)
        message = (
            f"the layout needs {model} processes and the {cluster.launcher} launcher starts"
            f" {processes}: set "
        )
        other = "cluster.launcher=torchrun" if cluster.launcher == "local" else "cluster.nodes"
        yield Problem(path, message + f"cluster.processes_per_node={model}, or {other}")
    elif processes > 1 and processes % model:
        message = (
            f"{processes} processes do not divide into models of {model} (tensor x pipeline x"
            " context, and experts): set "
        )
        message += f"cluster.processes_per_node to a multiple of {model}"
        yield Problem("policy.parallel", message)


def fp8(config: Config) -> Problems:
    """FP8 has the layers and the dtype that it needs."""
    if config.policy.fp8 is not None:
        if config.policy.transformer_engine == "off":
            yield Problem(
                "policy.fp8",
                "needs Transformer Engine's layers: set policy.transformer_engine to auto",
            )
        if config.model.dtype != "bf16":
            yield Problem("policy.fp8", f"needs model.dtype: bf16, got {config.model.dtype}")


def lengths(config: Config) -> Problems:
    """The longest sample fits into a micro-batch, with the pads that the layout needs."""
    limit = config.policy.max_tokens_per_microbatch
    prompt = config.data.max_prompt_tokens or 1
    response = 0 if config.is_sft else config.rollout.sampling.max_new_tokens
    multiple = pack_multiple(config)
    needed = -(-(prompt + response) // multiple) * multiple
    if needed > limit:
        parts = (
            [] if config.data.max_prompt_tokens is None else [f"data.max_prompt_tokens ({prompt})"]
        )
        parts += [f"rollout.sampling.max_new_tokens ({response})"] if response else []
        padded = f", padded to a multiple of {multiple} by the layout" if multiple > 1 else ""
        message = (
            f"got {limit}, less than one sample can have: {' + '.join(parts)}{padded}; set it to"
            f" {needed} or more"
        )
        yield Problem("policy.max_tokens_per_microbatch", message)


def routing(config: Config) -> Problems:
    """Routing replay has a source of routed experts."""
    replay = config.policy.routing_replay
    if replay == "engine" and config.is_sft:
        yield Problem(
            "policy.routing_replay", "supervised fine-tuning has no engine to replay: use 'none'"
        )
    elif replay == "logprobs" and config.is_sft:
        yield Problem(
            "policy.routing_replay",
            "supervised fine-tuning has no log-prob pass to replay: use 'none'",
        )


def keep_sets(config: Config) -> Problems:
    """Keep-sets are recorded by the engine that draws the tokens."""
    if not config.policy.logprobs.keep_sets:
        return
    path = "policy.logprobs.keep_sets"
    top_k = config.rollout.sampling.top_k
    kind = KINDS.get(config.rollout.engine.kind)
    bounded = kind is not None and kind.masks_need_top_k and generates(config)
    if config.is_sft:
        yield Problem(
            path, "supervised fine-tuning draws no tokens, its labels have no sets: turn it off"
        )
    elif bounded and truncates(config) and top_k < 2:
        message = (
            f"SGLang reports only sets that rollout.sampling.top_k bounds, got {top_k}: set it to 2"
            " or more, "
        )
        yield Problem(path, message + "or turn keep-sets off")


def optimizers(config: Config) -> Problems:
    """Learning-rate schedules run downhill and end after their warm-up."""
    for path, optimizer in (
        ("policy.optimizer", config.policy.optimizer),
        ("critic.optimizer", config.critic.optimizer),
    ):
        if optimizer.min_lr > optimizer.lr:
            yield Problem(
                f"{path}.min_lr", f"got {optimizer.min_lr:g}, more than lr ({optimizer.lr:g})"
            )
        if optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
            message = (
                f"got {optimizer.decay_steps}, not more than warmup_steps"
                f" ({optimizer.warmup_steps})"
            )
            yield Problem(f"{path}.decay_steps", message)


def debugging(config: Config) -> Problems:
    """training.debug and training.replay go together."""
    training = config.training
    if training.debug == "train_only" and training.replay is None:
        message = (
            "train_only trains on a saved step again: name its rollouts/step_*.jsonl.zst in"
            " training.replay"
        )
        yield Problem("training.debug", message)
    for key in ("replay", "replay_from"):
        if getattr(training, key) is not None and training.debug != "train_only":
            yield Problem(
                f"training.{key}", "a saved step is trained on only with training.debug: train_only"
            )
    if training.debug is not None and config.is_sft:
        yield Problem(
            "training.debug", f"{training.debug} is for runs with rollouts, not for the sft loss"
        )


def data(config: Config) -> Problems:
    """There are prompts, and labels or rewards where they are needed."""
    if not config.data.paths:
        yield Problem("data.paths", "got an empty list, expected one file or more")
    if config.is_sft and config.data.label_key is None:
        yield Problem("data.label_key", "missing: supervised fine-tuning trains on the labels")
    if not config.is_sft and not config.reward.parts:
        yield Problem(
            "reward.parts", "empty: give one part or more, each with a `function` or a `model`"
        )
    if config.evaluation.every and not config.evaluation.paths:
        yield Problem(
            "evaluation.paths",
            f"empty, but evaluation.every is {config.evaluation.every}: name the files",
        )
    if config.tracking.hub.repo and not config.checkpoint.export_hf:
        yield Problem(
            "tracking.hub.repo",
            "only an exported folder can be pushed: set checkpoint.export_hf to true",
        )


CHECKS: tuple[Check, ...] = (
    length,
    early_stopping,
    reward_terms,
    loss_terms,
    correction,
    batch,
    layout,
    fp8,
    lengths,
    routing,
    keep_sets,
    engine_kind,
    engine_servers,
    managed_servers,
    engine_transport,
    engine_gpus,
    colocated,
    ahead,
    ray_launcher,
    optimizers,
    debugging,
    data,
)


def notes_on(config: Config) -> Problems:
    """What was given and has no effect."""
    training = config.training
    algorithm = config.algorithm
    if training.target_kl and not training.early_stopping:
        yield Problem(
            "training.target_kl",
            f"{training.target_kl:g} is ignored: training.early_stopping is off",
        )
    if training.max_update_kl is not None and updates_per_step(config) == 1:
        message = (
            "is ignored: a batch gets one optimizer step (algorithm.epochs x minibatches), nothing"
            " is left to end"
        )
        yield Problem("training.max_update_kl", message)
    if (
        algorithm.loss.name == "kl_cov"
        and updates_per_step(config) == 1
        and algorithm.old_logprobs != "rollout"
    ):
        message = (
            "'kl_cov' penalises nothing: its |log ratio| has no gradient before the second"
            " optimizer step of a batch"
        )
        yield Problem("algorithm.loss.name", message)
    if algorithm.loss.per_rollout and config.rollout.workflow == "single_turn":
        yield Problem(
            "algorithm.loss.per_rollout",
            "changes nothing: workflow single_turn makes one sample a rollout",
        )
    oldest = config.rollout.max_staleness
    limit = algorithm.correction.max_staleness
    if limit is not None and limit >= oldest and training.debug != "train_only":
        message = (
            f"masks nothing: rollout.max_staleness is {oldest}, so no token is older than that"
        )
        yield Problem("algorithm.correction.max_staleness", message)
    yield from engine_notes(config)
    yield from colocated_notes(config)
    yield from ahead_notes(config)
    yield from ray_notes(config)
    for path, optimizer in (
        ("policy.optimizer", config.policy.optimizer),
        ("critic.optimizer", config.critic.optimizer),
    ):
        if optimizer.schedule == "constant" and (optimizer.min_lr or optimizer.decay_steps):
            unused = "min_lr" if optimizer.min_lr else "decay_steps"
            yield Problem(f"{path}.{unused}", "is ignored: the schedule is constant")
    if config.evaluation.samples_per_prompt > 1 and config.evaluation.temperature == 0:
        yield Problem(
            "evaluation.samples_per_prompt",
            "the samples are all alike: evaluation.temperature is 0",
        )
    if config.evaluation.paths and (config.is_sft or training.debug == "train_only"):
        why = "supervised fine-tuning" if config.is_sft else "train_only"
        yield Problem(
            "evaluation",
            f"is ignored: {why} has no engine to generate with; score the result with `rlcore"
            " eval`",
        )
    if config.is_sft:
        for path, differs in (
            ("reward", config.reward != RewardConfig()),
            ("rollout", config.rollout != RolloutConfig()),
            ("critic", config.critic != CriticConfig()),
            ("reference", config.reference != ReferenceConfig()),
            ("teacher", config.teacher != TeacherConfig()),
            ("algorithm.estimator", algorithm.estimator != EstimatorConfig()),
            ("algorithm.normalize_advantages", algorithm.normalize_advantages is not None),
        ):
            if differs:
                yield Problem(path, "is ignored: supervised fine-tuning trains on the labels alone")
    elif config.rollout.sampling.temperature == 0:
        yield Problem(
            "rollout.sampling.temperature", "0 is greedy: the samples of a prompt are all alike"
        )
    elif training.debug != "train_only" and config.policy.logprobs.keep_sets != truncates(config):
        if config.policy.logprobs.keep_sets:
            message = (
                "changes nothing: rollout.sampling has top_p 1 and no top_k, tokens are drawn from"
                " the whole vocabulary"
            )
            yield Problem("policy.logprobs.keep_sets", message)
        else:
            message = (
                "tokens come from the truncated distribution and are trained on as if they came"
                " from the whole one: "
            )
            yield Problem("rollout.sampling", message + "consider policy.logprobs.keep_sets: true")
