"""What the collector hands over for a step: its groups, and what was dropped on the way to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlcore.data.sample import Sample
from rlcore.errors import EmptyBatch
from rollout.collection.buffer import STALE, Snapshot
from rollout.collection.group_runner import Group


@dataclass
class DropCounts:
    """How many draws were made since the last hand-over, and how many of them gave no group."""

    dropped: Counter[str] = field(default_factory=Counter)  # by filter, or as stale
    requeued: int = 0
    draws: int = 0

    def too_little(self, step: int, found: int, wanted: int) -> EmptyBatch:
        """The error of a step that got too few groups, with the reasons and what to do."""
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
                " only what an engine made with weights of long ago is stale)"
            )
        if self.requeued:
            reasons.append(f"{self.requeued} were aborted by an engine")
            advice.append("look for why in the logs of the engines")
        return EmptyBatch(
            f"step {step} has {found} of {wanted} groups after {self.draws} draws:"
            f" {', '.join(reasons)}; {'; '.join(advice)}"
        )


@dataclass(frozen=True)
class StepGroups:
    """The groups of one step, handed over: the ledger says that the step consumed them."""

    groups: Sequence[Group]
    drop_counts: DropCounts
    epoch: float
    snapshot: Snapshot  # right after the hand-over, before anything else is drawn
    metrics: dict[str, float]

    @property
    def samples(self) -> list[Sample]:
        """The samples of all groups, in order."""
        return [sample for group in self.groups for sample in group.samples]
