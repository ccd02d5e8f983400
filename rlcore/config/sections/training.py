from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlcore.config.sections.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class TrainingConfig(Section):
    """How long to train. One of `steps`, `episodes` (samples) or `epochs` (passes over the
    prompts).
    """

    steps: PositiveInt | None = None
    episodes: PositiveInt | None = None
    epochs: PositiveFloat | None = None
    batch_size: PositiveInt = 256  # sft: sequences a step
    early_stopping: bool = False
    target_kl: NonNegativeFloat | None = None
    max_update_kl: PositiveFloat | None = None
    debug: Literal["rollout_only", "train_only"] | None = None
    # train_only: a rollouts/step_*.jsonl.zst file to train on again
    replay: str | None = None
    # ... from this training checkpoint, its optimizer state included
    replay_from: str | None = None


class EvaluationConfig(Section):
    """Held-out prompts, scored with the run's reward before the first step, every `every` steps and
    at the end.
    """

    # 0: only when `data` is given, at the start and the end
    every: NonNegativeInt = 0
    paths: list[str] = Field(default_factory=list)
    samples_per_prompt: PositiveInt = 1
    temperature: NonNegativeFloat = 0.0
    max_new_tokens: PositiveInt | None = None  # default: the rollouts'
    max_prompts: PositiveInt | None = None


class CheckpointConfig(Section):
    every: NonNegativeInt = 0  # 0: only at the end
    keep: PositiveInt = 2
    # written from a copy in host memory while training goes on
    async_save: bool = False
    export_hf: bool = True  # a Hugging Face folder at the end


class HubConfig(Section):
    """Push the final model to a hub. Off unless `repo` is given."""

    repo: str | None = None
    private: bool = True


class WandbConfig(Section):
    enabled: bool = False
    project: str = "rlcore"
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"
    tags: list[str] = Field(default_factory=list)


class TrackingConfig(Section):
    """metrics.jsonl is always written."""

    wandb: WandbConfig = Field(default_factory=WandbConfig)
    tensorboard: bool = False
    hub: HubConfig = Field(default_factory=HubConfig)
    show_samples: NonNegativeInt = 2  # generated samples shown at each report
    show_every: PositiveInt = 10
    save_rollouts: bool = True
    # of one GPU, for perf/mfu; default: the data sheet's, for a GPU that we know
    peak_tflops: PositiveFloat | None = None


class RayConfig(Section):
    """What the ray launcher asks a cluster for. CPUs and GPUs are Ray's: shares that it counts, and
    does not enforce.
    """

    # HOST:PORT; default: the running cluster that Ray knows of, else a local one
    address: str | None = None
    rank_cpus: NonNegativeFloat = 1.0  # of a trainer process
    rank_gpus: NonNegativeFloat = 1.0  # ... where the cluster has GPUs
    engine_cpus: NonNegativeFloat = 1.0
    engine_gpus: NonNegativeFloat = 1.0  # of each tensor-parallel rank of an engine
    service_cpus: NonNegativeFloat = 1.0  # of the rollout service
    runtime_env: dict[str, Any] = Field(default_factory=dict)  # Ray's: env_vars, working_dir, ...


class ClusterConfig(Section):
    launcher: Literal["local", "torchrun", "ray"] = "local"
    nodes: PositiveInt = 1
    # local: more than one are started and supervised by us
    processes_per_node: PositiveInt = 1
    collective_timeout_s: PositiveFloat = 600.0  # a collective that takes longer ends the run
    # a process that is silent for longer is taken for hung and named
    heartbeat_timeout_s: PositiveFloat = 120.0
    start_timeout_s: PositiveFloat = 600.0
    max_restarts: NonNegativeInt = 3  # ray: of the trainer's ranks, when one is lost
    ray: RayConfig = Field(default_factory=RayConfig)
