"""The groups of one step, made when the step asks for them: nothing is generated while the trainer
trains.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.config import Config
from rlcore.data.sample import Sample
from rlcore.errors import EmptyBatch
from rollout.accounting.prompt_queue import PromptQueue
from rollout.collection.buffer import STALE, BufferedGroup, Snapshot
from rollout.collection.filters import FilterChain
from rollout.collection.group_runner import Group, GroupRunner

# a step gives up after so many draws for each group it needs
DRAWS_PER_GROUP = 16


@dataclass
class DropCounts:
    """What became of draws that were not trained on, up to one hand-over."""

    dropped: Counter[str] = field(default_factory=Counter)  # by filter, or as stale
    requeued: int = 0
    draws: int = 0

    def too_little(self, step: int, found: int, wanted: int) -> EmptyBatch:
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
    tally: DropCounts
    epoch: float
    cut: Snapshot  # right after, before anything else is drawn
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]


class StepCollector:
    """For `rollout.max_staleness` 0. Everything happens on the rollout loop while the trainer
    waits.
    """

    def __init__(
        self, config: Config, draws: PromptQueue, runner: GroupRunner, filters: FilterChain
    ) -> None:
        self._config = config.rollout
        self._draws = draws
        self._runner = runner
        self._filters = filters

    async def collect(self, step: int) -> StepGroups:
        """Draw waves of prompts until enough groups are kept; groups that are over go back to the
        stream.

        Raises EmptyBatch where the filters leave too little.
        """
        tally = DropCounts()
        wanted = self._config.prompts_per_step
        kept: list[Group] = []
        while len(kept) < wanted:
            room = DRAWS_PER_GROUP * wanted - tally.draws
            if room <= 0:
                raise tally.too_little(step, len(kept), wanted)
            draws = self._draws.take(
                min(room, math.ceil((wanted - len(kept)) * self._config.oversample))
            )
            tally.draws += len(draws)
            for group in await self._runner.run(draws):
                self._sort_out(group, kept, tally)
        self._draws.hand_over([group.draw for group in kept], step)
        return StepGroups(kept, tally, self._draws.stream.epoch, self.cut())

    def _sort_out(self, group: Group, kept: list[Group], tally: DropCounts) -> None:
        self._draws.ledger.finish(group.draw)
        refused_by = None if group.aborted else self._filters.refusal(group.samples)
        if refused_by is not None:
            self._draws.ledger.drop(group.draw, refused_by)
            tally.dropped[refused_by] += 1
        elif group.aborted or len(kept) == self._config.prompts_per_step:
            self._draws.give_back(group.draw)
            tally.requeued += 1
        else:
            kept.append(group)

    def stuck(self) -> str:
        """Who is waited for."""
        return self._runner.stuck()

    def published(self, step: int) -> None:
        """Nothing waits for weights."""

    def give_up(self) -> None:
        """The step failed: its draws go back."""
        self._draws.give_back_unsettled()

    def cut(self) -> Snapshot:
        """Of this moment."""
        return Snapshot(self._draws.snapshot())

    async def halt(self) -> None:
        """Nothing goes on that the trainer does not wait for."""

    def restore(self, state: Mapping[str, Any], kept: Sequence[BufferedGroup]) -> None:
        """Nothing is kept from one step to the next."""
        self._draws.restore(state)
        self._draws.give_back_unsettled()
