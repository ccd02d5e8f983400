"""Checks of the length of a run, its batches, data, optimizers and debug modes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.built_in import ESTIMATORS
from rlcore.config.derived import generates, updates_per_step
from rlcore.config.messages import Problem
from rlcore.config.sections.algorithm import EstimatorConfig
from rlcore.config.sections.data import DataConfig
from rlcore.config.sections.policy import CriticConfig, ReferenceConfig, TeacherConfig
from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.rollout import RolloutConfig
from rlcore.config.sections.root import Config


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
    """There are prompts, and labels where they are trained on."""
    yield from _sources(config.data)
    if config.is_sft and config.data.label_key is None:
        yield Problem("data.label_key", "missing: supervised fine-tuning trains on the labels")
    if config.tracking.hub.repo and not config.checkpoint.export_hf:
        yield Problem(
            "tracking.hub.repo",
            "only an exported folder can be pushed: set checkpoint.export_hf to true",
        )


def _sources(data: DataConfig) -> Iterator[Problem]:
    if data.paths and data.sources:
        yield Problem("data.sources", "got data.paths too: keep one of them")
    if not data.sources and not data.paths:
        yield Problem("data.paths", "got an empty list, expected one file or more")
    for name, source in data.sources.items():
        if not source.paths:
            yield Problem(
                f"data.sources.{name}.paths", "got an empty list, expected one file or more"
            )
    bare = [name for name, source in data.sources.items() if source.weight is None]
    if bare and len(bare) < len(data.sources):
        yield Problem(
            f"data.sources.{bare[0]}.weight", "missing: give every source a weight, or none"
        )
    reserved = {"tokenize", "add_generation_prompt", "tools", "conversation", "chat_template"}
    for name in sorted(reserved & set(data.chat_template_kwargs)):
        hint = "use data.tools or data.tools_key" if name == "tools" else "rlcore sets it itself"
        yield Problem(f"data.chat_template_kwargs.{name}", f"is no key of a template: {hint}")


def optimizers(config: Config) -> Iterator[Problem]:
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


def debugging(config: Config) -> Iterator[Problem]:
    """training.debug and training.replay go together."""
    training = config.training
    if training.debug == "train_only" and training.replay is None:
        message = (
            "train_only trains on a saved step again: name its rollouts/step_*.parquet in"
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


def training_notes(config: Config) -> Iterator[Problem]:
    """Yield limits that stop nothing, or too much."""
    training = config.training
    if training.target_kl and not training.early_stopping:
        yield Problem(
            "training.target_kl",
            f"{training.target_kl:g} is ignored: training.early_stopping is off",
        )
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


def optimizer_notes(config: Config) -> Iterator[Problem]:
    """Yield keys that a constant schedule ignores."""
    for path, optimizer in (
        ("policy.optimizer", config.policy.optimizer),
        ("critic.optimizer", config.critic.optimizer),
    ):
        if optimizer.schedule == "constant" and (optimizer.min_lr or optimizer.decay_steps):
            unused = "min_lr" if optimizer.min_lr else "decay_steps"
            yield Problem(f"{path}.{unused}", "is ignored: the schedule is constant")


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
