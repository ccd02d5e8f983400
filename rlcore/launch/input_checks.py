"""Checks the needs of a run before it starts: its algorithms, functions, model and files.

Without a GPU driver nothing here uses torch, so `rlcore validate` need not load it. Errors name
configuration keys: `algorithm.estimator.lamda (site.yaml:12): ...`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlcore.algorithms import (
    AlgorithmError,
    GuardedEstimator,
    Keyword,
    KeywordError,
    build_estimator,
    build_policy_loss,
    estimator_keywords,
    estimator_plugin,
    policy_loss_keywords,
)
from rlcore.algorithms.plugin_guard import ESTIMATOR_OPTIONAL, POLICY_LOSS_OPTIONAL
from rlcore.algorithms.plugins import check_keywords, import_plugin
from rlcore.config import Config
from rlcore.config.checks.algorithm import coefficient_ignored, sum_ignored
from rlcore.config.checks.engine import fits_kind, kind_warnings
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
from rlcore.config.messages import ConfigIssue
from rlcore.config.path_keys import check_paths
from rlcore.config.sections.base import Plugin
from rlcore.config.sections.policy import CriticConfig, TeacherConfig
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
# Keywords of estimators that have keys of their own.
WORKFLOW = "rollout.workflow"
SET_ELSEWHERE = {*COEFFICIENTS, PART_WEIGHTS}
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
    of_engines: tuple[str, ...] = () if generates(config) else ("reward", "rollout")
    unread = of_engines if config.training.replay is None else ("evaluation", *of_engines)
    check_paths(config, unread=unread)
    check_model(config, world_size, here=here)
    check_context(config)
    if config.training.replay is None:
        check_examples(config.data)
        for one in evaluation_sets(config):
            check_examples(config.data, one.paths, key=f"{one.key}.paths")
    for key in ("policy.checkpoint", "training.replay_from"):
        section, _, name = key.partition(".")
        if (folder := getattr(getattr(config, section), name)) is not None:
            # This import loads torch.
            from rlcore.launch.run_folder import find_checkpoint

            find_checkpoint(Path(folder), key)


def check_model(config: Config, world_size: int, *, here: bool = True) -> None:
    """Check that the model can be converted, and that layout and `policy` settings fit it.

    Args:
        here: see `check_folders`.
    """
    from backends.megatron.checks.layout import check_layout, check_others, check_vocabularies
    from backends.megatron.convert.read import read_models
    from backends.megatron.policy_checks import check_policy

    policy, others = read_models(config)
    check_layout(policy, config.policy.parallel, world_size)
    device = "cpu" if here else None
    # Without a driver, torch need not be loaded to know the answer.
    if GPU_DRIVER.exists() and torch.cuda.is_available():
        device = "cuda"
    check_policy(config, policy, device)
    check_vocabularies(others, policy)
    check_others(others, config.policy.parallel, world_size)


def check_plugins(loaded: Loaded) -> list[str]:
    """Build and import all plugins that the configuration names.

    Returns:
        One line for each setting without an effect.

    Raises:
        ConfigError: settings are wrong; one line for each.
    """
    config = loaded.config
    if config.cluster.tls is not None:
        check_files(config.cluster.tls)
    warnings: list[ConfigIssue] = []
    loss = config.algorithm.loss
    issues, _ = _build(
        "algorithm.loss",
        loss,
        policy_loss_keywords,
        lambda _: build_policy_loss(loss.name, **loss.options).check_available(
            POLICY_LOSS_OPTIONAL
        ),
    )
    if not config.is_sft:
        issues += _estimator_issues(config, warnings)
    if not config.learns_from_rows:
        issues += _function_issues(config)
        issues += _engine_issues(config, warnings)
        if (curriculum := config.data.curriculum) is not None:
            issues += _build(
                "data.curriculum",
                curriculum,
                curriculum_keywords,
                lambda _: build_curriculum(curriculum.name, **curriculum.options),
            )[0]
    if issues:
        raise ConfigError("\n".join(issue.at(loaded.origin(issue.path)) for issue in issues))
    return [str(one) for one in warnings]


Keywords = Mapping[str, Keyword]


def _build(
    path: str,
    section: Plugin,
    keywords_of: Callable[[str], Keywords],
    build: Callable[[Keywords], object],
    misfits: Callable[[Keywords], list[ConfigIssue]] = lambda _: [],
) -> tuple[list[ConfigIssue], Any]:
    """Return the errors of a plugin's name, keywords and values, or what `build` makes of them.

    Args:
        misfits: returns the errors of other keys, given the plugin's keywords.
    """
    try:
        keywords = keywords_of(section.name)
    except (AlgorithmError, ImportError) as error:
        return [ConfigIssue(f"{path}.name", str(error))], None
    issues: list[ConfigIssue] = []
    for name, value in section.options.items():
        try:
            if name not in keywords:
                raise KeywordError(_unknown_keyword(path, name, section, keywords))
            check_keywords(repr(section.name), {name: keywords[name]}, {name: value})
        except KeywordError as error:
            issues.append(ConfigIssue(f"{path}.{name}", str(error)))
    if issues := issues + misfits(keywords):
        return issues, None
    try:
        return [], build(keywords)
    except (ValueError, TypeError) as error:
        # The constructor may reject its values, too.
        return [ConfigIssue(path, str(error))], None


def _unknown_keyword(path: str, name: str, section: Plugin, keywords: Keywords) -> str:
    own = [key for key in type(section).model_fields if key != "name"]
    # Other keys set the rest.
    settable = {key: str(keywords[key]) for key in keywords if key not in SET_ELSEWHERE}
    near = difflib.get_close_matches(name, [*settable, *own], n=1, cutoff=0.5)
    hint = f"; did you mean {path}.{near[0]}?" if near else ""
    takes = ", ".join(settable.values()) or "no keyword"
    return f"unknown keyword{hint} ({section.name!r} takes {takes})"


def _estimator_issues(config: Config, warnings: list[ConfigIssue]) -> list[ConfigIssue]:
    section = config.algorithm.estimator

    def misfits(keywords: Keywords) -> list[ConfigIssue]:
        given = [name for name, value in coefficients(config).items() if value]
        found = [coefficient_ignored(config, name) for name in given if name not in keywords]
        alone = config.rollout.samples_per_prompt == 1 and not config.learns_from_rows
        if alone and estimator_plugin(section.name).compares_group:
            found.append(one_sample(f"estimator {section.name!r}"))
        return found

    def build(keywords: Keywords) -> GuardedEstimator:
        estimator = build_estimator(section.name, **estimator_options(config, keywords))
        lacking = set() if config.teacher.path else {"teacher_logprobs"}
        estimator.check_available(set(ESTIMATOR_OPTIONAL) - lacking)
        return estimator

    issues, estimator = _build("algorithm.estimator", section, estimator_keywords, build, misfits)
    if issues:
        return issues
    if config.critic != CriticConfig() and not needs_critic(estimator.needs):
        warnings.append(
            ConfigIssue("critic", f"is ignored: estimator {section.name!r} needs no values")
        )
    if config.teacher != TeacherConfig() and not needs_teacher(config, estimator.needs):
        warnings.append(ConfigIssue("teacher", "is ignored: algorithm.distillation.coef is 0"))
    return list(sum_ignored(config)) if "reward_parts" in estimator.needs else []


def _engine_issues(config: Config, warnings: list[ConfigIssue]) -> list[ConfigIssue]:
    """Return the errors of a plugin engine and of its settings."""
    path = "rollout.engine.kind"
    name = config.rollout.engine.kind
    if not generates(config) or not is_import_path(name):
        return []
    try:
        factory = import_plugin(name, "engine")
    except (AlgorithmError, ImportError) as error:
        return [ConfigIssue(path, str(error))]
    kind = getattr(factory, "kind", None)
    if not isinstance(kind, EngineKind) or not callable(getattr(factory, "build", None)):
        message = (
            f"{name} is {factory!r}, expected a class with `kind`, an EngineKind, and the class"
            " method `build(site)`: see docs/engines.md"
        )
        return [ConfigIssue(path, message)]
    warnings += kind_warnings(config, kind)
    return [*fits_kind(config, kind), *getattr(factory, "check", lambda _: ())(config)]


def _function_issues(config: Config) -> Iterator[ConfigIssue]:
    """Yield the errors of reward functions, workflows, environments and filters."""
    sets = evaluation_sets(config)
    rewards = {"reward": config.reward}
    rewards |= {f"{one.key}.reward": one.reward for one in sets if one.reward}
    for key, reward in rewards.items():
        for name, part in reward.parts.items():
            if part.function is not None and ":" in part.function:
                reason_of = partial(signature_problem, args=part.args)
                yield from _call_issues(f"{key}.parts.{name}.function", part.function, reason_of)
    workflows = {WORKFLOW: config.rollout.workflow}
    workflows |= {f"{one.key}.workflow": one.workflow for one in sets if one.workflow}
    for path, workflow in workflows.items():
        if workflow.name in WORKFLOWS and generates(config):
            try:
                check_options(workflow.name, workflow.options)
            except ConfigError as error:
                # The message begins with the key of the run's own workflow.
                key, _, message = str(error).partition(": ")
                yield ConfigIssue(f"{path}{key.removeprefix(WORKFLOW)}", message)
        reason_of = partial(_workflow_reason, options=workflow.options)
        yield from _call_issues(path, workflow.name, reason_of, WORKFLOWS)
    for index, name in enumerate(config.rollout.filters):
        path = f"rollout.filters.{index}"
        yield from _call_issues(path, name, partial(_refused, shown="group"), FILTERS)


def _call_issues(
    path: str,
    name: str,
    reason_of: Callable[[Callable[..., Any]], str | None],
    known: Iterable[str] = (),
) -> Iterator[ConfigIssue]:
    """Yield why the function that `name` names is unknown, or cannot be called as it will be."""
    if ":" not in name:
        if name not in known:
            yield ConfigIssue(path, unknown(name, known))
        return
    try:
        found = import_plugin(name, "function")
    except (AlgorithmError, ImportError) as error:
        yield ConfigIssue(path, str(error))
        return
    if not callable(found):
        yield ConfigIssue(path, f"{name} is {found!r}, expected a callable")
    elif reason := reason_of(found):
        yield ConfigIssue(path, f"{name!r} {reason}")


def _workflow_reason(found: Callable[..., Any], options: Mapping[str, Any]) -> str | None:
    """Return why a workflow cannot be built, or makes no samples."""
    shown = ", ".join(["context", *(f"{key}=" for key in options)])
    if reason := _refused(found, shown=shown, options=options):
        return reason
    if not inspect.isclass(found):
        return None
    if (method := getattr(found, "rollout", None)) is not None:
        return _refused(method, 5, "self, prompt, draw, index, generate")
    if (method := call_method(found)) is not None:
        return _refused(method, 4, "self, prompt, draw, generate")
    return (
        "is a class without a method that makes samples: give it"
        " rollout(self, prompt, draw, index, generate), or"
        " __call__(self, prompt, draw, generate)"
    )


def _refused(
    found: Callable[..., Any], count: int = 1, shown: str = "", options: Mapping[str, Any] = {}
) -> str | None:
    """Return why a call with `count` arguments and `options`, `shown` in messages, would fail."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        # Some functions written in C have no signature.
        return None
    try:
        signature.bind(*[None] * count, **options)
    except TypeError as error:
        name = getattr(found, "__name__", type(found).__name__)
        return f"is called as {name}({shown}), but takes {signature}: {error}"
    return None
