"""The section `evaluation`."""

from __future__ import annotations

from pydantic import Field, field_validator

from rlcore.config.sections.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    RowsPath,
    Section,
    a_text_is_a_name,
    as_list,
)
from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.rollout import WorkflowConfig


def _listed(value: object) -> object:
    """Take a single path without its list, and null for none."""
    return [] if value is None else as_list(value)


class EvaluationSetConfig(Section):
    """A named set of held-out prompts. What it leaves out is as in `evaluation`."""

    paths: list[RowsPath]
    """Files with the prompts; a single path may stand without the list."""
    every: NonNegativeInt | None = None
    """Steps from one evaluation of this set to the next; 0: never in between."""
    at_start: bool | None = None
    """Evaluate this set before the first step: the baseline."""
    at_end: bool | None = None
    """Evaluate this set after the last step."""
    samples_per_prompt: PositiveInt | None = None
    """Samples of one prompt, the n of avg@n."""
    temperature: NonNegativeFloat | None = None
    """Temperature of the samples; 0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities reach this sum."""
    max_new_tokens: PositiveInt | None = None
    """Longest response."""
    max_prompts: PositiveInt | None = None
    """Use the first prompts alone."""
    k: list[PositiveInt] | None = None
    """The k of pass@k and maj@k; default: that of `evaluation`, else 1 and `samples_per_prompt`."""
    prompt_key: str | None = None
    """Column of the prompt; default: `data.prompt_key`."""
    label_key: str | None = None
    """Column of the label; default: `data.label_key`."""
    reward: RewardConfig | None = None
    workflow: WorkflowConfig | None = None
    """Its `name` and keywords, as in `rollout.workflow`; default: the run's workflow."""

    _one_or_no_path = field_validator("paths", mode="before")(_listed)
    _a_text_is_a_name = field_validator("workflow", mode="before")(a_text_is_a_name)


class EvaluationConfig(Section):
    """Held-out prompts, scored at the start, in between and at the end.

    The prompts of `paths` are one set without a name; `sets` are more. `evaluation=null` switches
    all of it off.
    """

    paths: list[RowsPath] = Field(default_factory=list)
    """Files with the prompts; default: none."""
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
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities reach this sum."""
    max_new_tokens: PositiveInt | None = None
    """Longest response; default: that of the rollouts."""
    max_prompts: PositiveInt | None = None
    """Use the first prompts alone; default: all."""
    k: list[PositiveInt] | None = None
    """The k of pass@k and maj@k, with intervals; default: none for `paths`."""
    sets: dict[str, EvaluationSetConfig] = Field(default_factory=dict)
    """Named sets."""

    _one_or_no_path = field_validator("paths", mode="before")(_listed)
