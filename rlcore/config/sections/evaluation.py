"""The section `evaluation`."""

from __future__ import annotations

from pydantic import Field, field_validator

from rlcore.config.sections.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class EvaluationConfig(Section):
    """Held-out prompts, scored with the run's reward at the start, in between and at the end.

    `evaluation=null` switches it off.
    """

    paths: list[str] = Field(default_factory=list)
    """Files with the prompts; default: no evaluation."""
    every: NonNegativeInt = 0
    """Steps from one evaluation to the next; 0: never in between."""
    at_start: bool = True
    """Evaluate before the first step: the baseline."""
    at_end: bool = True
    """Evaluate after the last step."""
    samples_per_prompt: PositiveInt = 1
    """Samples of one prompt."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of the samples; 0 is greedy."""
    max_new_tokens: PositiveInt | None = None
    """Longest response; default: that of the rollouts."""
    max_prompts: PositiveInt | None = None
    """Use the first prompts alone; default: all."""

    @field_validator("paths", mode="before")
    @classmethod
    def _any_number_of_paths(cls, value: object) -> object:
        return [] if value is None else [value] if isinstance(value, str) else value
