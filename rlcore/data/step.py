"""The records of one training step: its rollouts, and the report of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlcore.algorithms import Moments
from rlcore.data.sample import Sample


@dataclass(frozen=True)
class UpdateResult:
    """The report of one optimizer step; the same on every rank."""

    # loss/policy_avg, policy/approxkl_avg, train/grad_norm, lr, ... by public name
    metrics: dict[str, float]
    moments: Moments  # sums behind the token means among the metrics
    skipped: bool = False  # whether no step was taken (non-finite gradients)


@dataclass(frozen=True)
class StepRollouts:
    """The samples of one step, and what their source knows of them."""

    samples: list[Sample]
    metrics: dict[str, float]  # rollout/*, time/generation: known to the source alone
    epoch: float  # passes over the prompts so far
    snapshot: dict[str, Any]  # of the source right after this step, without its buffer; JSON-able
    engines: Mapping[int, str] = field(default_factory=dict)  # draw -> its engine, if known
    # Version in `samples` -> updates behind those weights.
    policy_steps: Mapping[int, int] = field(default_factory=dict)
    # In a replay: the step that was recorded, and the version of the weights that it trained.
    recorded_step: int | None = None
    recorded_version: int | None = None
