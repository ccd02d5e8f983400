"""Checks the weights that made a step's tokens, by the lineage that `versions.jsonl` records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rlcore.runs.versions import Version


def check_versions(versions: Sequence[Version]) -> Iterator[str]:
    """Versions grow, and within one incarnation of the trainer steps do not go back."""
    for before, after in pairwise(versions):
        if after.version <= before.version:
            yield f"version {after.version} was taken after version {before.version}"
        if after.incarnation < before.incarnation:
            yield (
                f"version {after.version} is of incarnation {after.incarnation}, the one before of"
                f" {before.incarnation}"
            )
        if after.incarnation == before.incarnation and after.step < before.step:
            yield (
                f"version {after.version} has the weights of step {after.step}, the one before"
                f" those of {before.step}"
            )


class Lineage:
    """Which weights are ancestors of which.

    A trainer that was started again from step r has forgotten the weights of later steps.
    """

    def __init__(self, versions: Sequence[Version]) -> None:
        self._index = {made.version: index for index, made in enumerate(versions)}
        self._versions = versions

    def check(
        self, step: int, records: Sequence[Mapping[str, Any]], max_staleness: int | None
    ) -> Iterator[str]:
        """The tokens of `step` are of ancestors of its weights, and not older than the bound.

        Args:
            max_staleness: the bound, if it is known.
        """
        trained = records[0].get("policy_version") if records else None
        if trained not in self._index:
            yield f"step {step} has trained version {trained}, which was never published"
            return
        if self._versions[self._index[trained]].step != step - 1:
            yield (
                f"step {step} has trained version {trained}, which is of step"
                f" {self._versions[self._index[trained]].step}"
            )
        if self._forgotten(trained, len(self._versions), done=step):
            yield f"step {step} is recorded of a trainer that was started again from before it"
        for version in sorted({span[0] for record in records for span in record["versions"]}):
            yield from self._check_token(step, trained, version, max_staleness)

    def _check_token(
        self, step: int, trained: int, version: int, max_staleness: int | None
    ) -> Iterator[str]:
        if version not in self._index:
            yield (
                f"step {step} was trained on tokens of version {version}, which was never published"
            )
            return
        made = self._versions[self._index[version]]
        if self._forgotten(version, self._index[trained] + 1, done=made.step):
            gone = f"of step {made.step} of a trainer that was rolled back behind it"
            yield f"step {step} was trained on tokens of version {version}, {gone}"
        elif not 0 <= step - 1 - made.step <= (step if max_staleness is None else max_staleness):
            bound = f"rollout.max_staleness was {max_staleness}"
            yield (
                f"step {step} was trained on tokens of version {version}, of policy step"
                f" {made.step}: {bound}"
            )

    def _forgotten(self, version: int, until: int, *, done: int) -> bool:
        """Whether an incarnation after `version` began with fewer than `done` steps.

        Args:
            until: index of the version before which incarnations count.
        """
        since = self._versions[self._index[version] : until]
        return any(
            after.step < done
            for before, after in pairwise(since)
            if after.incarnation > before.incarnation
        )
