"""The whole configuration. `rlcore.config.checks` checks across sections, `load` reads files."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from rlcore.config.built_in import ESTIMATORS
from rlcore.config.sections.algorithm import AlgorithmConfig
from rlcore.config.sections.base import ModelPath, Section, TokenizerPath
from rlcore.config.sections.data import DataConfig
from rlcore.config.sections.evaluation import EvaluationConfig
from rlcore.config.sections.policy import CriticConfig, PolicyConfig, ReferenceConfig, TeacherConfig
from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.rollout import RolloutConfig
from rlcore.config.sections.training import (
    CheckpointConfig,
    ClusterConfig,
    RunConfig,
    TrackingConfig,
    TrainingConfig,
)


class ModelConfig(Section):
    """The policy's architecture, tokenizer and initial weights: a Hugging Face folder."""

    path: ModelPath
    """Hugging Face folder of the policy."""
    tokenizer: TokenizerPath | None = None
    """Folder of the tokenizer; default: `path`."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of the trained weights and activations."""
    vocab_divisible_by: PositiveInt = 1
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""


class Config(Section):
    """One run, complete."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)

    @property
    def is_sft(self) -> bool:
        """Supervised fine-tuning: batches come from the labels, no engine, no reward."""
        return self.algorithm.loss.name == "sft"

    @property
    def is_preference(self) -> bool:
        """The estimator learns from rows with chosen and rejected answers, as DPO does.

        An estimator that is not built in has `data.format: preference`.
        """
        declared = ESTIMATORS.get(self.algorithm.estimator.name)
        if declared is None:
            return self.data.format == "preference" and not self.is_sft
        return declared.preferences and not self.is_sft

    @property
    def learns_from_rows(self) -> bool:
        """Answers come from the rows of the data: nothing generates, and nothing is graded."""
        return self.is_sft or self.is_preference

    @property
    def kind_of_learning(self) -> str:
        """The kind of learning in words, for messages."""
        if self.is_preference:
            return "learning from preferences"
        return "supervised fine-tuning" if self.is_sft else "reinforcement learning"
