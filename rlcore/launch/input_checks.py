"""Checks the needs of a run before it starts: its algorithms, functions, model and files.

Without a GPU driver nothing here uses torch, so `rlcore validate` need not load it. Errors name
configuration keys: `algorithm.estimator.lamda (site.yaml:12): ...`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

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
from rlcore.algorithms.plugins import check_keywords, import_plugin
from rlcore.config import Config
from rlcore.config.checks.algorithm import coefficient_ignored, sum_ignored
from rlcore.config.checks.engine import fits_kind, kind_notes
from rlcore.config.checks.training import one_sample
from rlcore.config.derived import (
    COEFFICIENTS,
    PART_WEIGHTS,
    coefficients,
    estimator_options,
    generates,
    needs_critic,
    needs_teacher,
)
from rlcore.config.engine_registry import EngineKind, is_import_path
from rlcore.config.evaluation_sets import evaluation_sets
from rlcore.config.load import Loaded
from rlcore.config.messages import Problem
from rlcore.config.path_keys import check_paths
from rlcore.config.sections.base import Plugin
from rlcore.config.sections.policy import CriticConfig, TeacherConfig
from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.data.curriculum import build_curriculum
from rlcore.data.curriculum.history import curriculum_keywords
from rlcore.data.examples import check_examples
from rlcore.data.loading import check_context
from rlcore.errors import ConfigError
from rlcore.import_paths import call_method
from rlcore.runs.directory import check_run_name
from rlcore.tls import check_files
from rollout.collection.filters import FILTERS
from rollout.plugins import unknown
from rollout.rewards.worker import signature_problem
from rollout.workflows.registry import WORKFLOWS, check_options

# Exists if a GPU can be used.
GPU_DRIVER = Path("/dev/nvidiactl")
WORKFLOW_CALL = "__call__(self, prompt, draw, generate)"
WORKFLOW_ROLLOUT = "rollout(self, prompt, draw, index, generate)"
MADE = (
    "Estimator, loss and curriculum are known, take the keywords given, and can be built",
    "Every field that the estimator and the loss need can be produced",
    "Functions given as package.module:name can be imported",
)
MADE_HERE = (
    "The model can be converted, and the layout and policy.megatron fit it",
    "Responses leave room for a prompt in the model's context",
    "Files, folders and checkpoints that keys name exist and can be read",
)


def check_input(config: Config, world_size: int, *, resume: bool, overwrite: bool) -> None:
    """Check the user's input. The launcher and every rank call this first.

    Raises:
        UserError: the model cannot be converted or laid out as configured, a file or a checkpoint
            is missing, or the run exists already.
    """
    check_folders(config, world_size)
    check_run_name(config.run.dir, config.run.name, resume=resume, overwrite=overwrite)


def check_folders(config: Config, world_size: int, *, here: bool = True) -> None:
    """Check the model and its layout, the files of data, and the checkpoints.

    Args:
        here: the run will be on this machine. If not, and this machine has no GPU, checks that
            depend on the device are left out.

    Raises:
        UserError: a check failed; the message names the key, the folder or the file.
    """
    unread = () if generates(config) else ("evaluation", "reward", "rollout")
    check_paths(config, unread=unread)
    check_model(config, world_size, here=here)
    check_context(config)
    if config.training.replay is None:
        check_examples(config.data)
        for one in [] if config.is_sft else evaluation_sets(config):
            check_examples(config.data, one.paths, key=f"{one.key}.paths")
    for key in ("policy.checkpoint", "training.replay_from"):
        section, _, name = key.partition(".")
        if (folder := getattr(getattr(config, section), name)) is not None:
            from rlcore.launch.run_folder import find_checkpoint

            find_checkpoint(Path(folder), key)


def check_model(config: Config, world_size: int, *, here: bool = True) -> None:
    """Check that the model can be converted, and that layout and `policy` settings fit it.

    Args:
        here: the run will be on this machine. If not, and this machine has no GPU, checks that
            depend on the device are left out.
    """
    from backends.megatron.checks.layout import check_layout, check_others, check_vocabularies
    from backends.megatron.convert.read import read_models
    from backends.megatron.policy_checks import check_policy

    policy, others = read_models(config)
    check_layout(policy, config.policy.parallel, world_size)
    check_policy(config, policy, _device(here))
    check_vocabularies(others, policy)
    check_others(others, config.policy.parallel, world_size)


def _device(here: bool) -> str | None:
    # Without a driver, torch need not be loaded to know the answer.
    if GPU_DRIVER.exists() and torch.cuda.is_available():
        return "cuda"
    return "cpu" if here else None


def check_plugins(loaded: Loaded) -> list[str]:
    """Build and import all plugins that the configuration names.

    Returns:
        One line for each setting without an effect.

    Raises:
        ConfigError: settings are wrong; one line for each.
    """
    if loaded.config.cluster.tls is not None:
        check_files(loaded.config.cluster.tls)
    problems = [*_loss_problems(loaded), *_function_problems(loaded)]
    notes: list[Problem] = []
    if not loaded.config.is_sft:
        problems += _estimator_problems(loaded, notes)
        problems += _engine_problems(loaded.config, notes)
        problems += _curriculum_problems(loaded.config)
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
    except (ValueError, TypeError) as error:
        # The constructor may reject its values, too.
        return [Problem(path, str(error))]
    if "reward_parts" in estimator.needs:
        problems += sum_ignored(config)
    if config.critic != CriticConfig() and not needs_critic(estimator.needs):
        notes.append(Problem("critic", f"is ignored: estimator {section.name!r} needs no values"))
    if config.teacher != TeacherConfig() and not needs_teacher(config, estimator.needs):
        notes.append(Problem("teacher", "is ignored: algorithm.distillation.coef is 0"))
    return problems


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


def _curriculum_problems(config: Config) -> list[Problem]:
    path = "data.curriculum"
    section = config.data.curriculum
    if section is None:
        return []
    try:
        keywords = curriculum_keywords(section.name)
    except (AlgorithmError, ImportError) as error:
        return [Problem(f"{path}.name", str(error))]
    if problems := _keyword_problems(path, section, keywords):
        return problems
    try:
        build_curriculum(section.name, **section.options)
    except (ValueError, TypeError) as error:
        return [Problem(path, str(error))]
    return []


def _engine_problems(config: Config, notes: list[Problem]) -> list[Problem]:
    """Return the errors of a plugin engine and of its settings."""
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
    # Other keys set these keywords.
    given = {*COEFFICIENTS, PART_WEIGHTS}
    settable = [keyword for keyword in keywords.values() if keyword.name not in given]
    near = difflib.get_close_matches(
        name, [*(keyword.name for keyword in settable), *own], n=1, cutoff=0.5
    )
    hint = f"; did you mean {path}.{near[0]}?" if near else ""
    takes = ", ".join(map(str, settable)) or "no keyword"
    return f"unknown keyword{hint} ({section.name!r} takes {takes})"


def _function_problems(loaded: Loaded) -> list[Problem]:
    rewards = {"reward": loaded.config.reward} | {
        f"{one.key}.reward": one.reward for one in evaluation_sets(loaded.config) if one.reward
    }
    functions = {
        f"{path}.parts.{name}.function": part
        for path, reward in rewards.items()
        for name, part in reward.parts.items()
    }
    named = {path: part.function for path, part in functions.items() if part.function is not None}
    workflows = {"rollout.workflow": loaded.config.rollout.workflow} | {
        f"{one.key}.workflow": one.workflow
        for one in evaluation_sets(loaded.config)
        if one.workflow
    }
    named |= {path: workflow.name for path, workflow in workflows.items()}
    named |= {
        f"rollout.filters.{index}": name for index, name in enumerate(loaded.config.rollout.filters)
    }
    problems: list[Problem] = []
    problems += _workflow_problems(loaded.config)
    for path, target in named.items():
        if loaded.config.is_sft:
            continue
        if ":" not in target:
            known = WORKFLOWS if path in workflows else FILTERS
            if path not in functions and target not in known:
                problems.append(Problem(path, unknown(target, known)))
            continue
        try:
            found: Callable[..., Any] = import_plugin(target, "function")
        except (AlgorithmError, ImportError) as error:
            problems.append(Problem(path, str(error)))
            continue
        if not callable(found):
            problems.append(Problem(path, f"{target} is {found!r}, expected a callable"))
            continue
        part = functions.get(path)
        if part is not None:
            problem = signature_problem(found, part.args)
        else:
            problem = _call_problem(found, workflows.get(path))
        if problem:
            problems.append(Problem(path, f"{target!r} {problem}"))
    return problems


def _workflow_problems(config: Config) -> list[Problem]:
    """Return the errors of the user's parts of our workflows: the class of an environment."""
    section = config.rollout.workflow
    if section.name not in WORKFLOWS or not generates(config):
        return []
    try:
        check_options(section.name, section.options)
    except ConfigError as error:
        # The message begins with the key, as `Problem` wants it.
        path, _, message = str(error).partition(": ")
        return [Problem(path, message)]
    return []


def _call_problem(found: Callable[..., Any], workflow: WorkflowConfig | None) -> str | None:
    """Return why a workflow cannot be built, or a filter cannot be called with a group."""
    name = getattr(found, "__name__", type(found).__name__)
    options = {} if workflow is None else workflow.options
    given = ", ".join([*(["context"] if workflow else ["group"]), *(f"{key}=" for key in options)])
    calls: list[tuple[Any, int, str, dict[str, Any]]] = [(found, 1, f"{name}({given})", options)]
    if workflow and inspect.isclass(found):
        method = getattr(found, "rollout", None)
        if method is not None:
            calls.append((method, 5, WORKFLOW_ROLLOUT, {}))
        elif (method := call_method(found)) is not None:
            calls.append((method, 4, WORKFLOW_CALL, {}))
        else:
            return (
                f"is a class without a method that makes samples: give it {WORKFLOW_ROLLOUT}, or"
                f" {WORKFLOW_CALL}"
            )
    for target, count, shown, named in calls:
        try:
            signature = inspect.signature(target)
        except (TypeError, ValueError):
            # Some functions written in C have no signature.
            continue
        try:
            signature.bind(*[None] * count, **named)
        except TypeError as error:
            return f"is called as {shown}, but takes {signature}: {error}"
    return None
