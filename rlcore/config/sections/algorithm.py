"""The section `algorithm`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
)

from rlcore.config.sections.base import Found, Plugin, Probability, Section

KLKind = Literal["k1", "k2", "k3"]
Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
Normalization = Literal["batch", "group", "none"]
_YES = {"true", "yes", "on", "1"}
_NO = {"false", "no", "off", "0"}


class EstimatorConfig(Plugin):
    """The advantage estimator: its `name` and its own keywords."""

    name: str = "grpo"
    """A name of `rlcore config --algorithms`, or `package.module:Name`."""


class LossConfig(Plugin):
    """The policy loss: its `name`, the weights of tokens, and its own keywords."""

    name: str = "ppo_clip"
    """A name of `rlcore config --algorithms`, or `package.module:Name`; `sft` is supervised
    fine-tuning."""
    aggregation: Aggregation = "token-mean"
    """Weight of a token in the loss of an optimizer step."""
    norm_length: PositiveInt | None = None
    """The constant length of `seq-mean-token-sum-norm`."""
    per_rollout: bool | None = None
    """Count the samples of one rollout, or of one supervised row, as one sequence; default: true,
    except for the workflow `single_turn`."""

    def errors(self) -> Found:
        """The aggregation has the length that it divides by, and sequences to count."""
        constant = self.aggregation == "seq-mean-token-sum-norm"
        if constant and self.norm_length is None:
            yield "norm_length", "missing: aggregation seq-mean-token-sum-norm divides by it"
        if not constant and self.norm_length is not None:
            yield "norm_length", f"aggregation {self.aggregation} does not use it: remove it"
        if self.per_rollout and self.aggregation == "token-mean":
            message = "would change nothing, as aggregation token-mean counts tokens alone:"
            yield "per_rollout", f"{message} remove it"


class KLConfig(Section):
    """KL against the reference: in the reward, in the loss, or only logged."""

    reward_kind: KLKind = "k1"
    """Estimate of the KL in the reward and in the log."""
    loss_kind: KLKind = "k3"
    """Estimate of the KL in the loss."""
    reward_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL that is subtracted from the reward of each token."""
    loss_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL that is added to the loss."""
    loss_unbiased: bool = False
    """Weigh the loss's KL by the ratio to the policy before the step: an unbiased gradient."""
    monitor: bool = False
    """Load the reference for the metrics alone."""

    def errors(self) -> Found:
        """An unbiased KL is in the loss."""
        if self.loss_unbiased and not self.loss_coef:
            message = "there is no KL in the loss to weigh: set algorithm.kl.loss_coef too"
            yield "loss_unbiased", message


class DistillationConfig(Section):
    """On-policy distillation from `teacher.path`."""

    coef: NonNegativeFloat = 0.0
    """Adds `coef * (teacher's log-prob - policy's)` to the reward of each token."""


class CorrectionConfig(Plugin):
    """Correction of the policy loss for differences between engine and trainer, and old tokens."""

    model_config = ConfigDict(extra="forbid")
    keywords: ClassVar[frozenset[str]] = frozenset({"level", "lower", "upper", "veto"})

    name: Literal["none", "tis", "mis", "icepop"] = "none"
    """How the ratio of the trainer's to the engine's probabilities is applied."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Take the ratio of each token, of the sequence, or its geometric mean."""
    lower: Probability | None = None
    """Lower bound of the ratio; default: by `name`."""
    upper: float | None = Field(default=None, ge=1)
    """Upper bound of the ratio; default: by `name`."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """A token whose ratio is below this drops its sequence."""
    max_staleness: NonNegativeInt | None = None
    """Do not train on tokens older than this many training steps; default: no limit."""

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of the correction's constructor."""
        return {name: getattr(self, name) for name in sorted(self.keywords)}

    def errors(self) -> Found:
        """A correction with options has a name."""
        for key, value in self.options.items() if self.name == "none" else ():
            if value != type(self).model_fields[key].default:
                name = "algorithm.correction.name is none: name one (tis, mis, icepop) or remove it"
                yield key, f"got {value!r}, but {name}"


class AlgorithmConfig(Section):
    """From rewards to the loss."""

    estimator: EstimatorConfig = Field(default_factory=EstimatorConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the loss."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    epochs: PositiveInt = 1
    """Passes over one batch."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    old_logprobs: Literal["auto", "recompute", "rollout"] = "auto"
    """Source of the old log-probs: a pass where needed, always a pass, or the engine."""
    normalize_advantages: Normalization | None = None
    """Whiten advantages over the batch, over each group, or not; default: the estimator's."""

    @field_validator("normalize_advantages", mode="before")
    @classmethod
    def _yes_is_batch(cls, value: Any) -> Any:
        """Accept YAML's `true` and `false` as `batch` and `none`."""
        word = str(value).lower()
        return "batch" if word in _YES else "none" if word in _NO else value
