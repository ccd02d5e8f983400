"""Checks of generation: staleness, sampling, evaluation and the best checkpoint."""

from __future__ import annotations

import re

from rlcore.config.derived import generates, truncates
from rlcore.config.engine_registry import KINDS
from rlcore.config.evaluation_sets import EvaluationSet, evaluation_sets, set_of
from rlcore.config.sections.base import Found
from rlcore.config.sections.graders import GRADERS
from rlcore.config.sections.reward import RewardPartConfig
from rlcore.config.sections.rollout import TRAINED
from rlcore.config.sections.root import Config

# Matches the metrics that are a bound of an interval.
_BOUND = re.compile("_(low|high)$")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_+-]*")
_MAX_STALENESS = "rollout.max_staleness"


def staleness(config: Config) -> Found:
    """Generation runs ahead only of a trainer that trains."""
    if (steps := config.rollout.max_staleness) > 0 and config.training.debug == "rollout_only":
        message = f"got {steps}, but training.debug: rollout_only trains nothing to run ahead of"
        yield _MAX_STALENESS, f"{message}: set it to 0"


def staleness_notes(config: Config) -> Found:
    """Yield staleness without a correction."""
    steps = config.rollout.max_staleness
    algorithm = config.algorithm
    compares = algorithm.correction.name != "none" or algorithm.loss.name == "decoupled_ppo"
    if steps <= 1 or not generates(config) or compares:
        return
    other = ", or algorithm.old_logprobs: rollout"
    if algorithm.loss.name == "reinforce":
        other = " (loss 'reinforce' has no ratio, for which algorithm.old_logprobs would matter)"
    elif algorithm.old_logprobs == "rollout":
        return
    yield (
        "algorithm.correction.name",
        f"'none' with {_MAX_STALENESS} {steps}: tokens count as if the weights before their"
        f" step had made them: consider tis{other}",
    )


def filter_notes(config: Config) -> Found:
    """Yield groups that are generated needlessly, and epochs that take more passes than given."""
    rollout = config.rollout
    if not generates(config):
        return
    if rollout.oversample > 1 and not rollout.filters:
        yield (
            "rollout.oversample",
            f"{rollout.oversample:g} without rollout.filters, so nothing is dropped: groups beyond"
            " rollout.prompts_per_step are generated needlessly, and drawn again",
        )
    if rollout.filters and config.training.epochs is not None:
        yield (
            "training.epochs",
            "counts steps as if rollout.filters dropped nothing: dropped groups are replaced, so"
            " the run makes more passes over the prompts (`epoch` in the log counts them)",
        )


def curriculum(config: Config) -> Found:
    """A curriculum has results to choose prompts by, and a rule for which samples pass."""
    given = config.data.curriculum
    if given is None:
        return
    if config.learns_from_rows:
        message = (
            f"{config.kind_of_learning} trains on all rows in turn, without results: remove it"
        )
        yield "data.curriculum", message
        return
    if not config.data.shuffle:
        yield "data.shuffle", "false keeps the rows in order, and data.curriculum chooses them"
    if given.passes_at is None and not any(map(_judges, config.reward.parts.values())):
        message = "missing: no part of the reward says right or wrong, so set the reward at which"
        yield "data.curriculum.passes_at", f"{message} a sample passes"


def _judges(part: RewardPartConfig) -> bool:
    """Whether a part of the reward may say right or wrong, as users' functions and workflows do."""
    if part.judge is not None:
        return part.judge.correct_from is not None
    grader = GRADERS.get(part.function or "")
    return grader.verifies if grader else bool(part.function or part.source)


def sampling_masks(config: Config) -> Found:
    """Sampling masks are recorded only by engines that can report them."""
    if not config.policy.logprobs.keep_sets:
        return
    path = "policy.logprobs.keep_sets"
    top_k = config.rollout.sampling.top_k
    kind = KINDS.get(config.rollout.engine.kind)
    bounded = kind is not None and kind.masks_need_top_k and generates(config)
    if config.learns_from_rows:
        message = (
            f"{config.kind_of_learning} draws no tokens, its answers have no sets: turn it off"
        )
        yield path, message
    elif bounded and truncates(config) and top_k < 2:
        message = f"SGLang reports only sets that rollout.sampling.top_k bounds, got {top_k}"
        yield path, f"{message}: set it to 2 or more, or turn keep-sets off"


def sampling_notes(config: Config) -> Found:
    """Yield identical samples, and sampling masks that are missing or have no effect."""
    keeps = config.policy.logprobs.keep_sets
    if config.learns_from_rows:
        return
    if config.rollout.sampling.temperature == 0:
        yield "rollout.sampling.temperature", "0 is greedy: the samples of a prompt are all alike"
    elif config.training.debug == "train_only" or keeps == truncates(config):
        return
    elif keeps:
        yield (
            "policy.logprobs.keep_sets",
            "changes nothing: rollout.sampling has top_p 1 and no top_k, tokens are drawn from"
            " the whole vocabulary",
        )
    else:
        yield (
            "rollout.sampling",
            "tokens come from the truncated distribution and are trained on as if they came"
            " from the whole one: consider policy.logprobs.keep_sets: true",
        )


def evaluation(config: Config) -> Found:
    """Evaluation sets have prompts, plain names, and as many samples as their k."""
    given = config.evaluation
    sets = evaluation_sets(config)
    if given.every and not sets:
        message = f"empty, but evaluation.every is {given.every}: name the files"
        yield "evaluation.paths", f"{message}, or set evaluation=null"
    for one in sets:
        if one.name and not _NAME.fullmatch(one.name):
            message = f"got the name {one.name!r}, expected letters, digits, _, + and -"
            yield one.key, f"{message}: it is part of metric names"
        if not one.paths:
            yield f"{one.key}.paths", "got an empty list, expected one file or more"
        if one.k and one.k[-1] > one.samples_per_prompt:
            named = one.name and "k" in given.sets[one.name].model_fields_set
            yield (
                f"{one.key if named else 'evaluation'}.k",
                f"got {one.k[-1]}, at most {one.key}.samples_per_prompt ({one.samples_per_prompt}):"
                " pass@k is measured on subsets of the samples",
            )


def best_checkpoint(config: Config) -> Found:
    """The best checkpoint is chosen by a metric of an evaluation between steps."""
    if config.checkpoint.best is None:
        return
    path = "checkpoint.best.metric"
    metric = config.checkpoint.best.metric
    if config.training.replay is not None:
        message = f"got {metric}, but train_only has no engine to generate with: set best to null"
        yield path, message
        return
    sets = {one.name: one for one in evaluation_sets(config)}
    chosen = sets.get(set_of(metric)) if metric.startswith("eval/") else None
    main = "score"
    if config.learns_from_rows:
        main = "loss" if config.is_sft else "preference_accuracy"
    if chosen is None:
        known = ", ".join(f"{one.prefix}{main}" for one in sets.values())
        known = known or "none: evaluation has no prompts"
        yield path, f"got {metric}, expected a metric of a set that is evaluated: {known}"
    elif config.learns_from_rows and not metric.startswith(chosen.prefix + main.partition("_")[0]):
        yield path, f"got {metric}, expected one of held-out rows, such as {chosen.prefix}{main}"
    elif not (chosen.every or chosen.at_end):
        yield path, f"{chosen.key} is never evaluated after a step: set its every or at_end"
    elif "@" in metric and _BOUND.sub("", metric) not in _at(chosen):
        yield path, f"got {metric}, but {chosen.key} gives {', '.join(_at(chosen))}"


def _at(one: EvaluationSet) -> list[str]:
    """Return the names of a set's metrics with an @."""
    own = [f"avg@{one.samples_per_prompt}"] if one.k else []
    own += [f"pass@{k}" for k in one.k]
    own += [f"maj@{k}" for k in one.k if k > 1]
    return [one.prefix + name for name in own]


def policies(config: Config) -> Found:
    """Frozen policies have names that metrics can carry, and sets name those that exist."""
    known = config.rollout.policies
    for name in known:
        if not _NAME.fullmatch(name) or name == TRAINED:
            message = f"expected a name of letters, digits, _, + and -, and not {TRAINED!r}"
            yield f"rollout.policies.{name}", f"{message}, which is the trained one"
    named = {one.key: one.policy for one in evaluation_sets(config)}
    for key, chosen in (named | {"reference": config.reference.policy}).items():
        if chosen is not None and chosen not in known:
            there = ", ".join(sorted(known)) or "none"
            yield f"{key}.policy", f"got {chosen!r}, but rollout.policies has {there}"
    if config.reference.policy is not None and config.reference.path is not None:
        yield "reference.policy", "and reference.path are two references: leave one out"


def evaluation_notes(config: Config) -> Found:
    """Yield evaluations that never run, or whose samples are identical."""
    sets = evaluation_sets(config)
    for one in sets:
        if one.samples_per_prompt > 1 and one.temperature == 0:
            message = f"the samples are all alike: {one.key}.temperature is 0"
            yield f"{one.key}.samples_per_prompt", message
        if not (one.every or one.at_start or one.at_end):
            yield one.key, "is never evaluated: every is 0, at_start and at_end are false"
    given = config.evaluation.model_fields_set & {"every", "at_start", "at_end"}
    if sets and given == {"every"} and not config.evaluation.every:
        message = "0: evaluated before the first step and after the last alone (at_start, at_end)"
        yield "evaluation.every", f"{message}; evaluation=null switches all of it off"
    if sets and config.training.replay is not None:
        message = "is ignored: train_only has no engine to generate with; score the result with"
        yield "evaluation", f"{message} `rlcore eval`"
