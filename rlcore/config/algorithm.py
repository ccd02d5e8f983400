from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlcore.config.base import NonNegativeFloat, Plugin, PositiveInt, Section

KLKind = Literal["k1", "k2", "k3"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


class EstimatorConfig(Plugin):
    """`name` and the estimator's own keywords."""

    name: str = "grpo"


class LossConfig(Plugin):
    """`name`, how tokens are weighted, and the loss's own keywords."""

    name: str = "ppo_clip"
    aggregation: Aggregation = "token-mean"
    norm_length: PositiveInt | None = None      # for seq-mean-token-sum-norm


class KLConfig(Section):
    """KL against the reference: in the reward, in the loss, or only watched."""

    reward_kind: KLKind = "k1"
    loss_kind: KLKind = "k3"
    reward_coef: NonNegativeFloat = 0.0
    loss_coef: NonNegativeFloat = 0.0
    monitor: bool = False                       # load the reference for the metrics alone


class DistillationConfig(Section):
    """On-policy distillation: `+ coef * (teacher's log-prob - policy's)` in the reward of each token."""

    coef: NonNegativeFloat = 0.0


class CorrectionConfig(Plugin):
    """Correction between the engine's and the trainer's log-probs."""

    name: Literal["none", "tis", "mis", "icepop"] = "none"


class AlgorithmConfig(Section):
    estimator: EstimatorConfig = Field(default_factory=EstimatorConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    entropy_coef: NonNegativeFloat = 0.0
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    epochs: PositiveInt = 1                     # passes over one batch
    minibatches: PositiveInt = 1                # optimizer steps a pass
    old_logprobs: Literal["auto", "recompute", "rollout"] = "auto"
    normalize_advantages: bool | None = None    # default: the estimator's custom
