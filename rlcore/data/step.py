"""What one training step is given and what it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlcore.algorithms import Moments
from rlcore.data.sample import Sample


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step reports; the same on every rank."""

    # loss/policy_avg, policy/approxkl_avg, train/grad_norm, lr, ... by public name
    metrics: dict[str, float]
    moments: Moments  # what the token means among them were made of
    skipped: bool = False  # no step was taken (non-finite gradients)


@dataclass(frozen=True)
class StepRollouts:
    samples: list[Sample]
    metrics: dict[str, float]  # rollout/*, time/generation: what only the source knows
    epoch: float  # passes over the prompts so far
    # right after this step's hand-over, JSON-able: as the source's, without a buffer
    snapshot: dict[str, Any]
    # draw -> the engine that answered it, where that is known
    engines: Mapping[int, str] = field(default_factory=dict)
    # version in `samples` -> updates behind those weights
    policy_steps: Mapping[int, int] = field(default_factory=dict)
    recorded_step: int | None = None  # of a replay: the step that these samples were made for
    # ... and the version of the weights that were trained on them
    recorded_version: int | None = None
