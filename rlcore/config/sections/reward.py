"""The section `reward`."""

from __future__ import annotations

from pydantic import Field, model_validator

from rlcore.config.sections.base import PositiveFloat, PositiveInt, Section


class RewardModelConfig(Section):
    """A reward model: a Hugging Face sequence-classification folder with one output."""

    path: str
    """Hugging Face folder of the reward model."""
    batch_size: PositiveInt = 16
    """Samples that the model scores at a time."""
    device: str | None = None
    """Torch device of the model; default: chosen by rlcore."""


class RewardPartConfig(Section):
    """One named part of the reward: `function` or `model`."""

    function: str | None = None
    """`exact_match`, `math`, or `package.module:function`."""
    model: RewardModelConfig | None = None
    """A reward model instead of a function."""
    weight: float = 1.0
    """Factor of this part in the sum."""

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
    """The parts by name; default: `exact_match` alone."""
    non_stop_penalty: float | None = None
    """Score of a response that ended by length, instead of its own; default: its own."""
    timeout_s: PositiveFloat = 10.0
    """Longest time for one call of a reward function."""
    on_error: float = 0.0
    """Score of a sample whose reward failed or timed out; such samples are counted."""
    workers: PositiveInt = 2
    """Processes that run reward functions."""
