"""The whole configuration. `rlcore.config.checks` checks across sections, `load` reads files."""

from __future__ import annotations

from pydantic import Field

from rlcore.config.sections.algorithm import AlgorithmConfig
from rlcore.config.sections.base import Section
from rlcore.config.sections.data import DataConfig
from rlcore.config.sections.evaluation import EvaluationConfig
from rlcore.config.sections.model import ModelConfig
from rlcore.config.sections.policy import CriticConfig, PolicyConfig, ReferenceConfig, TeacherConfig
from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.rollout import RolloutConfig
from rlcore.config.sections.run import RunConfig
from rlcore.config.sections.training import (
    CheckpointConfig,
    ClusterConfig,
    TrackingConfig,
    TrainingConfig,
)


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
