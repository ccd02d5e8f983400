from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator

from rlcore.config.sections.base import (
    NonNegativeFloat,
    NonNegativeInt,
    Plugin,
    PositiveInt,
    Probability,
    Section,
)

KLKind = Literal["k1", "k2", "k3"]
Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
Normalization = Literal["batch", "group", "none"]
_YES = {"true", "yes", "on", "1"}
_NO = {"false", "no", "off", "0"}


class EstimatorConfig(Plugin):
    """`name` and the estimator's own keywords."""

    name: str = "grpo"


class LossConfig(Plugin):
    """`name`, how tokens are weighted, and the loss's own keywords."""

    name: str = "ppo_clip"
    aggregation: Aggregation = "token-mean"
    norm_length: PositiveInt | None = None  # for seq-mean-token-sum-norm
    # samples that came from one rollout count as one sequence
    per_rollout: bool = False


class KLConfig(Section):
    """KL against the reference: in the reward, in the loss, or only watched."""

    reward_kind: KLKind = "k1"
    loss_kind: KLKind = "k3"
    reward_coef: NonNegativeFloat = 0.0
    loss_coef: NonNegativeFloat = 0.0
    # weigh the loss's KL by the ratio to the policy before the step
    loss_unbiased: bool = False
    monitor: bool = False  # load the reference for the metrics alone


class DistillationConfig(Section):
    """On-policy distillation: `+ coef * (teacher's log-prob - policy's)` in the reward of each
    token.
    """

    coef: NonNegativeFloat = 0.0


class CorrectionConfig(Plugin):
    """Correction of the policy loss for the ratio of the trainer's to the engine's probabilities,
    and for old tokens.
    """

    model_config = ConfigDict(extra="forbid")
    keywords: ClassVar[frozenset[str]] = frozenset({"level", "lower", "upper", "veto"})

    name: Literal["none", "tis", "mis", "icepop"] = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    lower: Probability | None = None  # bounds of the ratio; defaults by name
    upper: float | None = Field(default=None, ge=1)
    # a token less likely than this drops its sequence
    veto: float | None = Field(default=None, gt=0, lt=1)
    # tokens that more versions than this lie behind are not trained on
    max_staleness: NonNegativeInt | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords for the correction's constructor."""
        return {name: getattr(self, name) for name in sorted(self.keywords)}


class AlgorithmConfig(Section):
    estimator: EstimatorConfig = Field(default_factory=EstimatorConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    entropy_coef: NonNegativeFloat = 0.0
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    epochs: PositiveInt = 1  # passes over one batch
    minibatches: PositiveInt = 1  # optimizer steps a pass
    old_logprobs: Literal["auto", "recompute", "rollout"] = "auto"
    # whole batch, each group, not; default: the estimator's custom
    normalize_advantages: Normalization | None = None

    @field_validator("normalize_advantages", mode="before")
    @classmethod
    def _yes_is_batch(cls, value: Any) -> Any:
        """`true` and `false`, as YAML users write them, for `batch` and `none`."""
        word = str(value).lower()
        return "batch" if word in _YES else "none" if word in _NO else value
