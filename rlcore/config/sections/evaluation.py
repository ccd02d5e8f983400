"""The section `evaluation`."""

from __future__ import annotations

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from rlcore.config.sections.base import Entry, RowsPath, Section, a_text_is_a_name, as_list
from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.rollout import WorkflowConfig


def _listed(value: object) -> object:
    """Accept a single path instead of a list, and null for none."""
    return [] if value is None else as_list(value)


class EvaluationSettings(Section):
    """When held-out prompts are scored, and how their samples are drawn."""

    every: NonNegativeInt = 0
    """Steps from one evaluation to the next; 0: never in between."""
    at_start: bool = True
    """Evaluate before the first step: the baseline."""
    at_end: bool = True
    """Evaluate after the last step."""
    samples_per_prompt: PositiveInt = 1
    """Samples of one prompt, the n of avg@n."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of the samples; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities reach this sum."""
    max_new_tokens: PositiveInt | None = None
    """Longest response; default: that of the rollouts."""
    max_prompts: PositiveInt | None = None
    """Use the first prompts alone; default: all."""
    k: list[PositiveInt] | None = None
    """The k of pass@k and maj@k, with intervals; default: none for `paths`, 1 and
    `samples_per_prompt` for a named set."""


class EvaluationSetConfig(Entry, EvaluationSettings):
    """A named set of held-out prompts. Keys that it leaves out are those of `evaluation`."""

    paths: list[RowsPath]
    """Files with the prompts; a single path may stand without the list."""
    prompt_key: str | None = None
    """Column of the prompt; default: `data.prompt_key`."""
    label_key: str | None = None
    """Column of the label; default: `data.label_key`."""
    reward: RewardConfig | None = None
    """The reward of this set; default: the run's."""
    workflow: WorkflowConfig | None = None
    """The workflow of this set; default: the run's."""
    policy: str | None = None
    """The policy of `rollout.policies` that this set evaluates; default: the trained one."""

    _one_or_no_path = field_validator("paths", mode="before")(_listed)
    _a_text_is_a_name = field_validator("workflow", mode="before")(a_text_is_a_name)


class EvaluationConfig(EvaluationSettings):
    """Held-out prompts, scored at the start, between steps and at the end.

    The prompts of `paths` are one set without a name; `sets` are more. `evaluation=null` switches
    all of it off.
    """

    paths: list[RowsPath] = Field(default_factory=list)
    """Files with the prompts; default: none."""
    sets: dict[str, EvaluationSetConfig] = Field(default_factory=dict)
    """Named sets."""

    _one_or_no_path = field_validator("paths", mode="before")(_listed)

    @model_validator(mode="after")
    def _sets_inherit(self) -> EvaluationConfig:
        for entry in self.sets.values():
            entry.inherit(self, EvaluationSettings)
        return self
