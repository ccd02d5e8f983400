"""The policy and how it is laid out over ranks and optimised. The critic shares these sections."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from rlcore.config.sections.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)


class ParallelConfig(Section):
    """Sizes of Megatron's process groups. The data-parallel size is what is left of the world size."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = 1
    # of the pipeline; default: all stages hold the same number of layers
    first_stage_layers: PositiveInt | None = None
    last_stage_layers: PositiveInt | None = None
    context: PositiveInt = 1  # every sequence is cut over so many ranks
    expert: PositiveInt = 1
    expert_tensor: PositiveInt | None = None  # default: `tensor`
    # sequence parallelism inside the tensor-parallel group
    sequence: bool = False


class OptimizerConfig(Section):
    """AdamW with gradient clipping, warm-up and decay, counted in optimizer steps."""

    lr: NonNegativeFloat = 1e-6
    min_lr: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None  # default: every optimizer step of the run
    weight_decay: NonNegativeFloat = 0.0
    beta1: Probability = 0.9
    beta2: Probability = 0.95
    eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0  # global norm; 0 turns clipping off
    distributed: bool = False  # shard optimizer state over data-parallel ranks
    # sum gradients over them while the last backward pass still runs
    overlap: bool = False
    offload: bool = False  # keep optimizer state in host memory between steps


def default_chunk_elements(device: str) -> int:
    """2 MiB of fp32 logits on a CPU, for its caches; 64 MiB on "cuda", where a kernel has to be
    worth its launch.
    """
    return 1 << 24 if device == "cuda" else 1 << 19


class LogprobsConfig(Section):
    """The LM head is worked through in chunks, so that `[tokens, vocabulary]` never exists."""

    # logits that exist at one time; default: the device's, as above
    chunk_elements: PositiveInt | None = None
    # log-probs over the tokens that top-p and top-k left, as they were sampled
    keep_sets: bool = False


class Fp8Config(Section):
    """Matmuls in FP8, with Transformer Engine. The names are Megatron's, without `fp8_`."""

    format: Literal["hybrid", "e4m3"] = "hybrid"
    recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "tensorwise"
    # the last two and this one belong to recipe `delayed`
    margin: NonNegativeInt = 0
    amax_history: PositiveInt = 1
    amax_compute: Literal["most_recent", "max"] = "most_recent"


class PolicyConfig(Section):
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    # over all context-parallel ranks, with the pads that they need
    max_tokens_per_microbatch: PositiveInt = 16384
    # weights from a training checkpoint instead of `model.path`
    checkpoint: str | None = None
    logprobs: LogprobsConfig = Field(default_factory=LogprobsConfig)
    # its layers, where it is installed on CUDA
    transformer_engine: Literal["auto", "off"] = "auto"
    fp8: Fp8Config | None = None  # default: none
    # whose choice of experts training repeats
    routing_replay: Literal["none", "logprobs", "engine"] = "none"
    # any field of megatron.core's TransformerConfig
    megatron: dict[str, Any] = Field(default_factory=dict)

    @field_validator("transformer_engine", mode="before")
    @classmethod
    def _false_is_off(cls, value: Any) -> Any:
        """YAML reads an unquoted `off` as false."""
        return "off" if value is False else value


class ReferenceConfig(Section):
    """The frozen model that KL is measured against."""

    path: str | None = None  # default: the initial policy
    offload: bool = False  # keep it in host memory between passes


class TeacherConfig(Section):
    """The frozen model that the policy learns from, token by token: `algorithm.distillation`."""

    path: str | None = None  # a Hugging Face folder with the policy's vocabulary
    offload: bool = False  # keep it in host memory between passes


class CriticConfig(Section):
    """The value model, laid out as the policy is. Used only when the estimator needs values."""

    # default: the initial policy; a reward model brings its head
    path: str | None = None
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    value_clip: PositiveFloat | None = None
    value_loss_coef: PositiveFloat = 1.0
    warmup_steps: NonNegativeInt = 0  # steps that train the critic alone
    # keep it, its gradients and optimizer in host memory between passes
    offload: bool = False
