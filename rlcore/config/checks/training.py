"""Checks of the length of a run, its batches and data, and of the policy's layout. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.built_in import ESTIMATORS
from rlcore.config.derived import (
    generates,
    model_parallel_size,
    pack_multiple,
    updates_per_step,
)
from rlcore.config.messages import Problem
from rlcore.config.sections.algorithm import EstimatorConfig
from rlcore.config.sections.policy import CriticConfig, ReferenceConfig, TeacherConfig
from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.rollout import RolloutConfig
from rlcore.config.sections.root import Config

_SIZES = ("tensor", "pipeline", "context", "expert")


def length(config: Config) -> Iterator[Problem]:
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


def early_stopping(config: Config) -> Iterator[Problem]:
    """Early stopping has a KL to compare with its target."""
    training = config.training
    if not training.early_stopping:
        return
    if config.is_sft or training.debug == "rollout_only":
        why = "supervised fine-tuning" if config.is_sft else "training.debug: rollout_only"
        yield Problem(
            "training.early_stopping", f"{why} measures no KL against the reference: turn it off"
        )


def batch(config: Config) -> Iterator[Problem]:
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
        yield Problem(
            "algorithm.minibatches",
            f"got {algorithm.minibatches}, at most rollout.prompts_per_step"
            f" ({rollout.prompts_per_step}): a group is never split",
        )
    estimator = ESTIMATORS.get(algorithm.estimator.name)
    if rollout.samples_per_prompt == 1:
        if estimator is not None and estimator.compares_group:
            yield one_sample(f"estimator {algorithm.estimator.name!r}")
        if algorithm.normalize_advantages == "group":
            yield one_sample("algorithm.normalize_advantages: group")


def one_sample(comparer: str) -> Problem:
    """Refuse one sample a prompt where something compares the samples of a prompt."""
    message = f"got 1, but {comparer} compares the samples of one prompt: use 2 or more"
    return Problem("rollout.samples_per_prompt", message)


def data(config: Config) -> Iterator[Problem]:
    """There are labels where they are trained on, and a folder where one is pushed."""
    if config.is_sft and config.data.label_key is None:
        yield Problem("data.label_key", "missing: supervised fine-tuning trains on the labels")
    if config.tracking.hub.repo and not config.checkpoint.export_hf:
        yield Problem(
            "tracking.hub.repo",
            "only an exported folder can be pushed: set checkpoint.export_hf to true",
        )


def debugging(config: Config) -> Iterator[Problem]:
    """training.debug is for runs with rollouts."""
    debug = config.training.debug
    if debug is not None and config.is_sft:
        yield Problem("training.debug", f"{debug} is for runs with rollouts, not for the sft loss")


def training_notes(config: Config) -> Iterator[Problem]:
    """Yield limits that stop nothing, or too much."""
    training = config.training
    ahead = config.rollout.max_staleness if generates(config) else 0
    if training.early_stopping and ahead and config.algorithm.kl.reward_kind == "k1":
        message = (
            f"with rollout.max_staleness {ahead} tokens come from older weights, and for these the"
            " k1 estimate falls below 0 as the policy moves away, so the run may go on far beyond"
            " target_kl: set algorithm.kl.reward_kind to k2, which is never negative"
        )
        yield Problem("training.early_stopping", message)
    if training.max_update_kl is not None and (message := _update_kl(config)):
        yield Problem("training.max_update_kl", message)


def _update_kl(config: Config) -> str:
    """Return what `training.max_update_kl` does not do in this run; "" if it does what it says."""
    if config.is_sft:
        return "is ignored: the sft loss measures no policy/approxkl_avg"
    if updates_per_step(config) == 1:
        return (
            "is ignored: a batch gets one optimizer step (algorithm.epochs x minibatches), nothing"
            " is left to end"
        )
    if config.algorithm.old_logprobs == "rollout":
        return (
            "counts from the engine's log-probs (algorithm.old_logprobs: rollout): tokens of older"
            " weights may exceed it before the policy has moved, which leaves one optimizer step"
        )
    return ""


def sft_notes(config: Config) -> Iterator[Problem]:
    """Yield keys that supervised fine-tuning does not read."""
    if not config.is_sft:
        return
    for path, differs in (
        ("reward", config.reward != RewardConfig()),
        ("rollout", config.rollout != RolloutConfig()),
        ("critic", config.critic != CriticConfig()),
        ("reference", config.reference != ReferenceConfig()),
        ("teacher", config.teacher != TeacherConfig()),
        ("algorithm.estimator", config.algorithm.estimator != EstimatorConfig()),
        ("algorithm.normalize_advantages", config.algorithm.normalize_advantages is not None),
        ("algorithm.kl.monitor", config.algorithm.kl.monitor),
        ("algorithm.old_logprobs", config.algorithm.old_logprobs != "auto"),
    ):
        if differs:
            yield Problem(path, "is ignored: supervised fine-tuning trains on the labels alone")


def layout(config: Config) -> Iterator[Problem]:
    """The parallel layout is consistent and fits the launcher."""
    parallel = config.policy.parallel
    cluster = config.cluster
    model = model_parallel_size(config)
    processes = cluster.nodes * cluster.processes_per_node
    if cluster.launcher == "local" and cluster.nodes > 1:
        yield Problem(
            "cluster.nodes",
            "the local launcher starts processes on this machine alone: use torchrun or ray",
        )
    elif cluster.launcher != "torchrun" and processes < model:
        path = "policy.parallel." + next(axis for axis in _SIZES if getattr(parallel, axis) > 1)
        other = "cluster.launcher=torchrun" if cluster.launcher == "local" else "cluster.nodes"
        # seen once the model is read, and so after this: better told now than as a second error
        heads = "; the model's attention heads must divide by it" * path.endswith(".tensor")
        yield Problem(
            path,
            f"the layout needs {model} processes and the {cluster.launcher} launcher starts"
            f" {processes}: set cluster.processes_per_node={model}, or {other}{heads}",
        )
    elif processes > 1 and processes % model:
        yield Problem(
            "policy.parallel",
            f"{processes} processes do not divide into models of {model} (tensor x pipeline x"
            f" context, and experts): set cluster.processes_per_node to a multiple of {model}",
        )


def fp8(config: Config) -> Iterator[Problem]:
    """FP8 has the layers and the dtype that it needs."""
    if config.policy.fp8 is not None:
        if config.policy.transformer_engine == "off":
            yield Problem(
                "policy.fp8",
                "needs Transformer Engine's layers: set policy.transformer_engine to auto",
            )
        if config.model.dtype != "bf16":
            yield Problem("policy.fp8", f"needs model.dtype: bf16, got {config.model.dtype}")


def lengths(config: Config) -> Iterator[Problem]:
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


def routing(config: Config) -> Iterator[Problem]:
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
