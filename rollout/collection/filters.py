"""Filters decide which finished groups are worth training on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlcore.data.sample import Sample
from rlcore.errors import ConfigError, RunFailed
from rlcore.import_paths import location_of
from rollout.plugins import load_object

# Reason under which the service itself drops groups: no step may train on the group any more.
STALE = "stale"

GroupFilter = Callable[[Sequence[Sample]], bool]
"""Takes the scored samples of one prompt; True keeps the group."""


def zero_variance(group: Sequence[Sample]) -> bool:
    """Keep groups whose training rewards differ; otherwise every advantage is 0."""
    return len({np.float32(sample.reward) for sample in group}) > 1


def mixed_verdicts(group: Sequence[Sample]) -> bool:
    """Keep groups with right and with wrong samples: DAPO's dynamic sampling, arXiv:2503.14476.

    Unlike `zero_variance` it drops a group of wrong samples whose length penalties differ. A sample
    whose reward failed has no verdict.
    """
    scored = [sample for sample in group if "reward_error" not in sample.metadata]
    verdicts = {sample.verdict for sample in scored}
    if verdicts == {None}:
        raise ValueError(
            "no part of the reward says right or wrong; take zero_variance, or return `correct`"
            " (docs/rewards.md)"
        )
    return {True, False} <= verdicts


FILTERS: dict[str, GroupFilter] = {"zero_variance": zero_variance, "mixed_verdicts": mixed_verdicts}


class FilterChain:
    """The filters of `rollout.filters`, in order; the first that refuses names the drop."""

    def __init__(self, names: Sequence[str], *, samples_per_prompt: int) -> None:
        for name in names:
            if name in FILTERS and samples_per_prompt == 1:
                raise ConfigError(
                    f"rollout.filters: {name} drops every group when rollout.samples_per_prompt"
                    " is 1; raise it or remove the filter"
                )
        self._filters: dict[str, GroupFilter] = {}
        for name in names:
            short = name.rpartition(":")[2]
            if short == STALE:
                raise ConfigError(
                    f"rollout.filters: {name} cannot be called {short!r}, a name under which the"
                    " service counts its own drops; rename the filter"
                )
            if short in self._filters:
                raise ConfigError(f"rollout.filters: two filters are called {short!r}")
            self._filters[short] = load_object(name, FILTERS, key="rollout.filters")

    @property
    def names(self) -> list[str]:
        """Names under which drops are counted."""
        return list(self._filters)

    def refusal(self, group: Sequence[Sample]) -> str | None:
        """The name of the filter that drops `group`, or None to keep it.

        Raises RunFailed if a filter raises, or returns something other than a bool.
        """
        for name, keeps in self._filters.items():
            try:
                verdict = keeps(group)
            except (Exception, SystemExit) as error:
                raise RunFailed(
                    f"filter {name} failed on {group[0].prompt_id}: {type(error).__name__}: {error}"
                    f"{location_of(keeps, error)}"
                ) from error
            if not isinstance(verdict, bool | np.bool_):
                raise RunFailed(
                    f"filter {name} returned {verdict!r} for {group[0].prompt_id}, expected True"
                    " (keep) or False"
                )
            if not verdict:
                return name
        return None
