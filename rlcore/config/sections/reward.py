"""The section `reward`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from rlcore.config.sections.base import Probability, Section
from rlcore.config.sections.reward_services import JudgeConfig, RewardServiceConfig
from rlcore.config.sections.sandbox import SandboxConfig


class RewardPartConfig(Section):
    """One named part of the reward: `function`, `service`, `judge` or `source`."""

    function: str | None = None
    """`exact_match`, `math`, `f1`, `choice`, `format`, `overlong`, `ifeval`, `code`, or
    `package.module:function`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function; those of the built-in ones: docs/rewards.md."""
    sources: list[str] | None = None
    """Score only rows whose value at `reward.by` is among these (`*` stands for any text)."""
    service: RewardServiceConfig | None = None
    """A reward service or reward model over HTTP, instead of a function."""
    judge: JudgeConfig | None = None
    """A model as a judge, instead of a function."""
    source: Literal["workflow"] | None = None
    """`workflow`: the reward that the environment or agent gave, instead of a function."""
    weight: float = 1.0
    """Factor of this part in the sum."""

    @model_validator(mode="after")
    def _one_source(self) -> RewardPartConfig:
        kinds = (self.function, self.service, self.judge, self.source)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError(
                "a reward part is one of `function: NAME`, `service: {url: URL}`,"
                " `judge: {url: URL, model: NAME}` or `source: workflow`"
            )
        if self.function is None and self.args:
            raise ValueError("`args` are for a function, and this part has none")
        return self


class RewardConfig(Section):
    """The reward is the weighted sum of its parts."""

    parts: dict[str, RewardPartConfig] = Field(
        default_factory=lambda: {"exact_match": RewardPartConfig(function="exact_match")}
    )
    """The parts by name; default: `exact_match` alone."""
    by: str | None = None
    """Column of the row, dotted (`data_source`), whose value chooses the parts: their `sources`."""
    non_stop_penalty: float | None = None
    """Score of a response that ended by a limit (length, context, turns or timeout), instead of its
    own; default: its own.
    """
    timeout_s: PositiveFloat = 10.0
    """Longest time for one call of a reward function."""
    on_error: Literal["drop"] | float = "drop"
    """A sample whose reward failed or timed out leaves its group and the loss (`drop`), or gets
    this score."""
    max_failed: Probability = 0.1
    """Largest share of a step's samples whose reward may fail; one always may, unless it is 0."""
    workers: PositiveInt = 2
    """Processes that run reward functions."""
    memory_gb: PositiveFloat = 8.0
    """Most memory that one of these processes may allocate, GiB."""
    environment: list[str] = Field(default_factory=list)
    """Names of more environment variables for reward functions, as OPENAI_API_KEY; keys of the run
    are not passed on automatically."""
    audit_rows: NonNegativeInt = 8
    """Rows on which `rlcore data`, and a run before its first step, check that the reward does not
    pay for answers that solve nothing; 0: none. Services and judges are not called."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)

    @field_validator("environment")
    @classmethod
    def _names_alone(cls, names: list[str]) -> list[str]:
        for name in names:
            if not name.isidentifier():
                raise ValueError(
                    f"names of variables alone, got {name.partition('=')[0]!r}...; set the value in"
                    " the shell that starts rlcore"
                )
        return names

    @model_validator(mode="after")
    def _sources_need_a_column(self) -> RewardConfig:
        named = [name for name, part in self.parts.items() if part.sources is not None]
        if named and self.by is None:
            raise ValueError(
                f"parts.{named[0]}.sources is given, but `by` does not say which column has the"
                " source (verl's is data_source)"
            )
        if self.by is not None and not named:
            raise ValueError(f"by is {self.by!r}, but no part has `sources` that list its values")
        return self
