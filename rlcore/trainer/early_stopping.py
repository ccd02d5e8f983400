"""Early stopping: end the run after a step in which the policy has moved too far."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlcore.config.sections.training import TrainingConfig
from rlcore.errors import RunFailed


@dataclass(frozen=True)
class EarlyStopping:
    """Stop after a step whose `objective/kl` is strictly above `target_kl` (nats a sequence)."""

    target_kl: float

    @classmethod
    def of(cls, training: TrainingConfig) -> EarlyStopping | None:
        """Make it from `training.early_stopping`; None unless that is armed."""
        if not training.early_stopping or not training.target_kl:
            return None
        return cls(training.target_kl)

    def trips(self, kl: float | None) -> bool:
        """Whether a step with this `objective/kl` is the last one.

        A KL equal to the target does not trip, nor does None.

        Raises:
            RunFailed: the KL is not a number.
        """
        if kl is None:
            return False
        if math.isnan(kl):
            raise RunFailed(
                "early stopping: objective/kl is NaN, so there is nothing to compare with"
                f" training.target_kl ({self.target_kl:g}); look for the first NaN in metrics.jsonl"
            )
        return kl > self.target_kl

    @property
    def armed(self) -> str:
        """The line that says at the start of a run that early stopping is on."""
        return (
            f"early stopping is armed: objective/kl above training.target_kl {self.target_kl:g}"
            " ends the run after that step"
        )

    def tripped(self, step: int, kl: float) -> str:
        """Return the line that says why the run stops."""
        return (
            f"early stopping: objective/kl {kl:.6g} of step {step} is above training.target_kl"
            f" {self.target_kl:g}; the model is saved and the run ends as a success"
        )
