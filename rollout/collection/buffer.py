"""Finished groups: their age, the groups that a step gets, and what a checkpoint keeps.

`staleness_scheduler` decides which groups are too old.
"""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

from rlcore.data.sample import Sample
from rlcore.errors import EmptyBatch, TooManyFailed
from rlcore.runs.rollouts import decode_samples, encode_samples
from rlcore.runs.versions import Version
from rollout.accounting.prompt_queue import PromptQueue
from rollout.collection.filters import STALE
from rollout.collection.group_runner import Group
from rollout.failures import Failure, commonest
from rollout.rewards.scorer import FailureCounts


class PublishedVersions:
    """The successful publications, by increasing version.

    The version of a failed publication counts as the next successful one.
    """

    def __init__(self) -> None:
        self.known: tuple[Version, ...] = ()

    def add(self, published: Version) -> None:
        """Add a version. Raises ValueError unless it is the newest."""
        if self.known and published.version <= self.known[-1].version:
            raise ValueError(
                f"version {published.version} after {self.known[-1].version}: versions only grow"
            )
        self.known = (*self.known, published)

    def of(self, version: int) -> Version | None:
        """The publication of `version`; None if it is newer than all, and so still in progress."""
        at = bisect_left(self.known, version, key=lambda publication: publication.version)
        return self.known[at] if at < len(self.known) else None

    def of_samples(self, samples: Iterable[Sample]) -> dict[int, int]:
        """The policy step of each known version that made a token of `samples`."""
        made = {span.version for sample in samples for span in sample.versions}
        return {
            version: publication.step
            for version in made
            if (publication := self.of(version)) is not None
        }

    def learn(self, publications: Iterable[Sequence[int]]) -> None:
        """Insert publications of a snapshot, given by their fields, in order of version."""
        restored = [Version(*one) for one in publications]
        by_version = {made.version: made for made in (*restored, *self.known)}
        self.known = tuple(by_version[version] for version in sorted(by_version))


@dataclass(frozen=True)
class BufferedGroup:
    """A finished group, with the policy steps of its oldest and newest tokens."""

    group: Group
    oldest: int
    newest: int

    @cached_property
    def encoded(self) -> dict[str, Any]:
        """The group as JSON; see `decode`.

        The result is cached, since each hand-over may need it; it doubles the group's memory.
        """
        parts = {"samples": self.group.samples, "unscored": self.group.unscored}
        return {"draw": self.group.draw, "policy_steps": [self.oldest, self.newest]} | {
            name: base64.b64encode(encode_samples(given)).decode() for name, given in parts.items()
        }


def decode(states: Sequence[Mapping[str, Any]]) -> list[BufferedGroup]:
    """Decode groups from their `encoded` form, without greedy responses.

    The rewards of those are already stored in the samples.
    """
    return [
        BufferedGroup(
            Group(
                state["draw"],
                samples=decode_samples(base64.b64decode(state["samples"])),
                unscored=decode_samples(base64.b64decode(state["unscored"])),
            ),
            *state["policy_steps"],
        )
        for state in states
    ]


def restore_groups(queue: PromptQueue, saved: Sequence[BufferedGroup]) -> dict[int, BufferedGroup]:
    """Restore finished groups after `queue` went back to the snapshot with which they were saved.

    All other unsettled draws are requeued.

    Returns:
        The groups by their draws, ascending.
    """
    buffer = {one.group.draw: one for one in sorted(saved, key=lambda one: one.group.draw)}
    for draw, buffered in buffer.items():
        queue.adopt(draw, buffered.group.samples)
    queue.follow()
    for draw in queue.ledger.unsettled():
        if draw not in buffer:
            queue.give_back(draw)
    return buffer


@dataclass(frozen=True)
class Snapshot:
    """The service's state between two steps.

    Taking it is cheap, since its parts are immutable; it is encoded when it is saved.
    """

    queue: dict[str, Any]  # `PromptQueue.snapshot`
    finished: Sequence[BufferedGroup] = ()  # groups not trained on yet
    publications: Sequence[Version] = ()

    def encoded(self) -> dict[str, Any]:
        """The snapshot as JSON, with the publications that the groups' versions need."""
        made_by = [
            span.version
            for buffered in self.finished
            for sample in buffered.group.samples
            for span in sample.versions
        ]
        needed = [
            astuple(publication)
            for publication in self.publications
            if made_by and publication.version >= min(made_by)
        ]
        groups = [buffered.encoded for buffered in self.finished]
        return {**self.queue, "ahead": {"groups": groups, "versions": needed}}


@dataclass
class DropCounts:
    """Counts of the draws made and lost since the last hand-over."""

    dropped: Counter[str] = field(default_factory=Counter)  # by filter, or as stale
    failures: list[Failure] = field(default_factory=list)  # one for each failed group
    unscored: int = 0  # groups given up because too few of their samples have a score
    rewards: FailureCounts = field(default_factory=FailureCounts)
    requeued: int = 0
    draws: int = 0

    @property
    def given_up(self) -> int:
        """The number of groups that were given up."""
        return len(self.failures) + self.unscored

    def too_little(self, step: int, found: int, wanted: int) -> EmptyBatch:
        """The error of a step that got too few groups, with reasons and advice."""
        reasons = [f"{name} dropped {count}" for name, count in self.dropped.most_common()]
        advice = []
        if self.dropped.keys() - {STALE}:
            advice.append(
                "use other prompts, a higher temperature, more rollout.samples_per_prompt or fewer"
                " rollout.filters"
            )
        if STALE in self.dropped:
            advice.append(
                "lower rollout.oversample or raise rollout.max_staleness (at an oversample of 1,"
                " only what an engine made with very old weights is stale)"
            )
        if self.failures:
            reasons.append(f"{len(self.failures)} failed")
            advice.append(f"the commonest failure: {commonest(self.failures)[0]}")
        if self.unscored:
            reasons.append(f"{self.unscored} had too few scores")
            advice.append(
                f"the commonest failure of rewards: {commonest(self.rewards.unscored)[0]}"
            )
        if self.requeued:
            reasons.append(f"{self.requeued} were aborted by an engine")
            advice.append("see the engines' logs for the reason")
        return EmptyBatch(
            f"step {step} has {found} of {wanted} groups after {self.draws} draws:"
            f" {', '.join(reasons)}; {'; '.join(advice)}"
        )

    def check_rollouts(self, step: int, groups: int, share: float) -> None:
        """Raise TooManyFailed if more than `share` of the draws, or of a step's groups, failed."""
        _check_share(self.failures, max(self.draws, groups), share, step, "groups", "rollout")

    def check_rewards(self, step: int, samples: int, share: float) -> None:
        """Raise TooManyFailed if more than `share` of the rewards, or of a step's samples, failed.

        Failures of built-in graders do not count, since they are verdicts, unless all samples of a
        step failed: then the answers cannot be the cause.
        """
        rewards = self.rewards
        of = max(rewards.samples, samples)
        _check_share(rewards.unscored, of, share, step, "rewards", "reward")
        if share < 1.0 and rewards.failed == of:
            raise TooManyFailed(
                f"step {step}: built-in graders failed on all {of} samples, so there is nothing to"
                " learn from; the log says how (reward.timeout_s, reward.memory_gb)"
            )


def _check_share(
    failures: Sequence[Failure], of: int, share: float, step: int, what: str, section: str
) -> None:
    # a single failure never ends a run, even in a small step
    if len(failures) <= (max(1.0, share * of) if share else 0.0):
        return
    failure, count = commonest(failures)
    raise TooManyFailed(
        f"step {step}: {len(failures)} of {of} {what} failed, which is more than"
        f" {section}.max_failed ({share:g}) allows; the commonest failure, {count} times: {failure}"
    )


@dataclass(frozen=True)
class StepGroups:
    """The groups handed over for one step, which the ledger marks as consumed by it."""

    groups: Sequence[Group]
    drop_counts: DropCounts
    epoch: float
    snapshot: Snapshot  # taken right after the hand-over, before the next draw
    metrics: dict[str, float]

    @property
    def samples(self) -> list[Sample]:
        """The samples of all groups, in order."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def unscored(self) -> list[Sample]:
        """Samples of all groups that are not trained on, since their rewards failed."""
        return [sample for group in self.groups for sample in group.unscored]
