"""Checks of the evaluation and of the checkpoint that it chooses. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlcore.config.derived import generates
from rlcore.config.evaluation_sets import EvaluationSet, evaluation_sets, set_of
from rlcore.config.messages import Problem
from rlcore.config.sections.root import Config

_BOUND = re.compile("_(low|high)$")  # of an interval
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_+-]*")


def evaluation(config: Config) -> Iterator[Problem]:
    """Evaluation sets have prompts, plain names, and as many samples as their k."""
    given = config.evaluation
    sets = evaluation_sets(config)
    if given.every and not sets:
        yield Problem(
            "evaluation.paths",
            f"empty, but evaluation.every is {given.every}: name the files, or set evaluation=null",
        )
    for one in sets:
        if one.name and not _NAME.fullmatch(one.name):
            message = (
                f"got the name {one.name!r}, expected letters, digits, _, + and -: it is part of"
                " metric names"
            )
            yield Problem(one.key, message)
        if not one.paths:
            yield Problem(f"{one.key}.paths", "got an empty list, expected one file or more")
        if one.k and one.k[-1] > one.samples_per_prompt:
            named = one.name and "k" in given.sets[one.name].model_fields_set
            message = (
                f"got {one.k[-1]}, at most {one.key}.samples_per_prompt ({one.samples_per_prompt}):"
                " pass@k is measured on subsets of the samples"
            )
            yield Problem(f"{one.key if named else 'evaluation'}.k", message)


def best_checkpoint(config: Config) -> Iterator[Problem]:
    """The best checkpoint is chosen by a metric that an evaluation in between gives."""
    best = config.checkpoint.best
    if best is None:
        return
    path = "checkpoint.best.metric"
    if not generates(config):
        yield Problem(path, f"got {best.metric}, but {_why_unscored(config)}: set best to null")
        return
    sets = {one.name: one for one in evaluation_sets(config)}
    chosen = sets.get(set_of(best.metric)) if best.metric.startswith("eval/") else None
    if chosen is None:
        known = (
            ", ".join(f"{one.prefix}score" for one in sets.values())
            or "none: evaluation has no prompts"
        )
        yield Problem(
            path, f"got {best.metric}, expected a metric of a set that is evaluated: {known}"
        )
    elif not (chosen.every or chosen.at_end):
        yield Problem(
            path, f"{chosen.key} is never evaluated after a step: set its every or at_end"
        )
    elif "@" in best.metric and _BOUND.sub("", best.metric) not in _at(chosen):
        yield Problem(path, f"got {best.metric}, but {chosen.key} gives {', '.join(_at(chosen))}")


def _at(one: EvaluationSet) -> list[str]:
    """The metrics with an @ that a set may give."""
    own = [f"avg@{one.samples_per_prompt}"] if one.k else []
    own += [f"pass@{k}" for k in one.k]
    own += [f"maj@{k}" for k in one.k if k > 1]
    return [one.prefix + name for name in own]


def evaluation_notes(config: Config) -> Iterator[Problem]:
    """Yield evaluations that are not made, or whose samples are alike."""
    sets = evaluation_sets(config)
    for one in sets:
        if one.samples_per_prompt > 1 and one.temperature == 0:
            yield Problem(
                f"{one.key}.samples_per_prompt",
                f"the samples are all alike: {one.key}.temperature is 0",
            )
        if not (one.every or one.at_start or one.at_end):
            yield Problem(one.key, "is never evaluated: every is 0, at_start and at_end are false")
    given = config.evaluation.model_fields_set & {"every", "at_start", "at_end"}
    if sets and given == {"every"} and not config.evaluation.every:
        yield Problem(
            "evaluation.every",
            "0: evaluated before the first step and after the last alone (at_start, at_end);"
            " evaluation=null switches all of it off",
        )
    if sets and not generates(config):
        yield Problem(
            "evaluation",
            f"is ignored: {_why_unscored(config)}; score the result with `rlcore eval`",
        )


def _why_unscored(config: Config) -> str:
    what = "supervised fine-tuning" if config.is_sft else "train_only"
    return f"{what} has no engine to generate with"
