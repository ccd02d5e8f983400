from __future__ import annotations

from pydantic import Field, model_validator

from rlcore.config.sections.base import PositiveFloat, PositiveInt, Section


class RewardModelConfig(Section):
    """A Hugging Face sequence-classification folder with one output."""

    path: str
    batch_size: PositiveInt = 16
    device: str | None = None


class RewardPartConfig(Section):
    """One named part of the reward: `function` or `model`."""

    function: str | None = None  # exact_match | math | package.module:function
    model: RewardModelConfig | None = None
    weight: float = 1.0

    @model_validator(mode="after")
    def _one_source(self) -> RewardPartConfig:
        if (self.function is None) == (self.model is None):
            raise ValueError("a reward part is either `function: NAME` or `model: {path: FOLDER}`")
        return self


class RewardConfig(Section):
    """The reward is the weighted sum of its parts."""

    parts: dict[str, RewardPartConfig] = Field(
        default_factory=lambda: {"exact_match": RewardPartConfig(function="exact_match")}
    )
    # replaces the score of a response that ended by length
    non_stop_penalty: float | None = None
    timeout_s: PositiveFloat = 10.0  # for one call
    # the score of a sample whose reward failed or timed out; counted
    on_error: float = 0.0
    workers: PositiveInt = 2
