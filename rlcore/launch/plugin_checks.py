"""Checks that need torch: estimator, loss and the user's functions, built before the start.

Errors speak of configuration keys: `algorithm.estimator.lamda (site.yaml:12): ...`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from rlcore.algorithms import (
    AlgorithmError,
    Keyword,
    KeywordError,
    build_estimator,
    build_policy_loss,
    estimator_keywords,
    estimator_plugin,
    policy_loss_keywords,
)
from rlcore.algorithms.guard import ESTIMATOR_OPTIONAL, POLICY_LOSS_OPTIONAL
from rlcore.algorithms.keywords import check_keywords
from rlcore.algorithms.plugins import import_plugin
from rlcore.config import Config
from rlcore.config.checks.algorithm import coefficient_ignored
from rlcore.config.checks.engine import fits_kind, kind_notes
from rlcore.config.checks.training import one_sample
from rlcore.config.derived import (
    COEFFICIENTS,
    coefficients,
    estimator_options,
    generates,
    needs_critic,
    needs_teacher,
)
from rlcore.config.engine_kinds import EngineKind, is_import_path
from rlcore.config.evaluation_sets import evaluation_sets
from rlcore.config.load import Loaded
from rlcore.config.messages import Problem
from rlcore.config.sections.base import Plugin
from rlcore.config.sections.policy import CriticConfig, TeacherConfig
from rlcore.errors import ConfigError

MADE = (
    "The estimator and the loss are known, take the keywords given, and can be built",
    "Every field that the estimator and the loss need can be produced",
    "Functions given as package.module:name can be imported",
)


def check_plugins(loaded: Loaded) -> list[str]:
    """Build and import all that the configuration names.

    Returns:
        Notes on what has no effect, one line each.

    Raises:
        ConfigError: one line a problem.
    """
    problems = [*_loss_problems(loaded), *_function_problems(loaded)]
    notes: list[Problem] = []
    if not loaded.config.is_sft:
        problems += _estimator_problems(loaded, notes)
        problems += _engine_problems(loaded.config, notes)
    if problems:
        raise ConfigError(
            "\n".join(problem.at(loaded.origin(problem.path)) for problem in problems)
        )
    return [str(note) for note in notes]


def _estimator_problems(loaded: Loaded, notes: list[Problem]) -> list[Problem]:
    config = loaded.config
    path = "algorithm.estimator"
    section = config.algorithm.estimator
    try:
        keywords = estimator_keywords(section.name)
    except (AlgorithmError, ImportError) as error:
        return [Problem(f"{path}.name", str(error))]
    problems = _keyword_problems(path, section, keywords)
    unread = [
        name for name, value in coefficients(config).items() if value and name not in keywords
    ]
    problems += [coefficient_ignored(config, name) for name in unread]
    if config.rollout.samples_per_prompt == 1 and estimator_plugin(section.name).compares_group:
        problems.append(one_sample(f"estimator {section.name!r}"))
    if problems:
        return problems
    try:
        estimator = build_estimator(section.name, **estimator_options(config, keywords))
        without_teacher = set(ESTIMATOR_OPTIONAL) - {"teacher_logprobs"}
        estimator.check_available(ESTIMATOR_OPTIONAL if config.teacher.path else without_teacher)
    except (ValueError, TypeError) as error:  # also what the constructor thinks of its values
        return [Problem(path, str(error))]
    if config.critic != CriticConfig() and not needs_critic(estimator.needs):
        notes.append(Problem("critic", f"is ignored: estimator {section.name!r} needs no values"))
    if config.teacher != TeacherConfig() and not needs_teacher(config, estimator.needs):
        notes.append(Problem("teacher", "is ignored: algorithm.distillation.coef is 0"))
    return []


def _loss_problems(loaded: Loaded) -> list[Problem]:
    path = "algorithm.loss"
    section = loaded.config.algorithm.loss
    try:
        keywords = policy_loss_keywords(section.name)
    except (AlgorithmError, ImportError) as error:
        return [Problem(f"{path}.name", str(error))]
    if problems := _keyword_problems(path, section, keywords):
        return problems
    try:
        build_policy_loss(section.name, **section.options).check_available(POLICY_LOSS_OPTIONAL)
    except (ValueError, TypeError) as error:
        return [Problem(path, str(error))]
    return []


def _engine_problems(config: Config, notes: list[Problem]) -> list[Problem]:
    """What is wrong with an engine of another package, and with what is asked of it."""
    path = "rollout.engine.kind"
    name = config.rollout.engine.kind
    if not generates(config) or not is_import_path(name):
        return []
    try:
        factory = import_plugin(name, "engine")
    except (AlgorithmError, ImportError) as error:
        return [Problem(path, str(error))]
    kind = getattr(factory, "kind", None)
    if not isinstance(kind, EngineKind) or not callable(getattr(factory, "build", None)):
        message = (
            f"{name} is {factory!r}, expected a class with `kind`, an EngineKind, and the class"
            " method `build(site)`: see docs/engines.md"
        )
        return [Problem(path, message)]
    notes += kind_notes(config, kind)
    return [*fits_kind(config, kind), *getattr(factory, "check", lambda _: ())(config)]


def _keyword_problems(path: str, section: Plugin, keywords: Mapping[str, Keyword]) -> list[Problem]:
    problems: list[Problem] = []
    for name, value in section.options.items():
        if name not in keywords:
            problems.append(
                Problem(f"{path}.{name}", _unknown_keyword(path, name, section, keywords))
            )
            continue
        try:
            check_keywords(repr(section.name), {name: keywords[name]}, {name: value})
        except KeywordError as error:
            problems.append(Problem(f"{path}.{name}", str(error)))
    return problems


def _unknown_keyword(path: str, name: str, section: Plugin, keywords: Mapping[str, Keyword]) -> str:
    own = [key for key in type(section).model_fields if key != "name"]
    settable = [keyword for keyword in keywords.values() if keyword.name not in COEFFICIENTS]
    near = difflib.get_close_matches(
        name, [*(keyword.name for keyword in settable), *own], n=1, cutoff=0.5
    )
    hint = f"; did you mean {path}.{near[0]}?" if near else ""
    takes = ", ".join(map(str, settable)) or "no keyword"
    return f"unknown keyword{hint} ({section.name!r} takes {takes})"


def _function_problems(loaded: Loaded) -> list[Problem]:
    rewards = {
        f"{one.key}.reward": one.reward for one in evaluation_sets(loaded.config) if one.reward
    }
    named = {
        f"{path}.parts.{name}.function": part.function
        for path, reward in ({"reward": loaded.config.reward} | rewards).items()
        for name, part in reward.parts.items()
        if part.function is not None
    }
    named["rollout.workflow"] = loaded.config.rollout.workflow
    named |= {
        f"rollout.filters.{index}": name for index, name in enumerate(loaded.config.rollout.filters)
    }
    problems: list[Problem] = []
    for path, target in named.items():
        if ":" not in target or loaded.config.is_sft:
            continue
        try:
            found: Callable[..., Any] = import_plugin(target, "function")
        except (AlgorithmError, ImportError) as error:
            problems.append(Problem(path, str(error)))
            continue
        if not callable(found):
            problems.append(
                Problem(path, f"{target} is {found!r}, expected something that can be called")
            )
    return problems
