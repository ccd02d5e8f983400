"""All checks in their order, made when a configuration is loaded.

A section checks itself (`Section.errors`). A check across sections is a function here that yields
key and message for every wrong key. `rlcore validate` prints each docstring.
A function `..._notes` yields warnings: keys that are legal but have no effect, or not the expected
one. Pure: no torch, no files, no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlcore.config.checks import algorithm, drafts, engine, reward, rollout, training
from rlcore.config.messages import ConfigIssue
from rlcore.config.schema import sections
from rlcore.config.sections.base import Found, Section
from rlcore.config.sections.root import Config

Check = Callable[[Config], Found]

CHECKS: tuple[Check, ...] = (
    *(training.length, training.early_stopping),
    *(algorithm.reward_terms, algorithm.apart, algorithm.loss_terms, algorithm.correction),
    algorithm.preferences,
    *(
        training.batch,
        training.layout,
        training.fp8,
        training.adapters,
        training.lengths,
        training.routing,
    ),
    rollout.sampling_masks,
    *(engine.engine_kind, engine.engine_servers, engine.managed_servers, engine.engine_tls),
    *(engine.fp32_head, engine.engine_transport, engine.engine_gpus, engine.colocated),
    drafts.drafts,
    *(rollout.staleness, rollout.curriculum),
    *(training.ray_launcher, training.debugging, training.data),
    *(reward.graders, reward.keys_over_tls),
    *(rollout.policies, rollout.evaluation, rollout.best_checkpoint),
)

NOTES: tuple[Check, ...] = (
    *(training.training_notes, training.adapter_notes, algorithm.algorithm_notes),
    *(engine.engine_notes, engine.colocated_notes),
    *(rollout.staleness_notes, rollout.filter_notes),
    *(training.ray_notes, rollout.evaluation_notes, training.unread_notes),
    *(rollout.sampling_notes, reward.key_notes),
)


def check(config: Config) -> list[ConfigIssue]:
    """Return all errors of `config`, inside sections and across them."""
    across = (ConfigIssue(*found) for one in CHECKS for found in one(config))
    return [*_within(config, lambda section: section.errors()), *across]


def warnings_of(config: Config) -> list[ConfigIssue]:
    """Return warnings about keys that have no effect, or not the expected one."""
    across = (ConfigIssue(*found) for one in NOTES for found in one(config))
    return [*_within(config, lambda section: section.warnings()), *across]


def _within(
    section: Section, ask: Callable[[Section], Found], path: str = ""
) -> Iterator[ConfigIssue]:
    """Check a section and the sections inside it."""
    for key, message in ask(section):
        yield ConfigIssue(path + key, message)
    for name, value in section:
        entries = value if isinstance(value, dict) else {"": value}
        for entry, inner in entries.items():
            if isinstance(inner, Section):
                yield from _within(inner, ask, f"{path}{name}.{entry}{entry and '.'}")


def describe_checks() -> list[str]:
    """Return one line per check."""
    own = [section.errors for section in dict.fromkeys(sections().values())]
    within = [one for one in own if one is not Section.errors]
    return [" ".join((one.__doc__ or "").split()).rstrip(".") for one in (*within, *CHECKS)]
