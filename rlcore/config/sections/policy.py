"""The policy, its layout over ranks and its optimizer. The critic shares these sections."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from rlcore.config.sections.base import (
    AdapterPath,
    CheckpointPath,
    Found,
    ModelPath,
    Probability,
    Section,
)


class ParallelConfig(Section):
    """Sizes of Megatron's process groups; the data-parallel size follows from the world size."""

    tensor: PositiveInt = 1
    """Tensor-parallel ranks, which share each matrix."""
    pipeline: PositiveInt = 1
    """Pipeline stages, which share the layers."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks of each pipeline stage."""
    first_stage_layers: PositiveInt | None = None
    """Layers of the first pipeline stage; default: all stages hold the same number."""
    last_stage_layers: PositiveInt | None = None
    """Layers of the last pipeline stage; default: all stages hold the same number."""
    context: PositiveInt = 1
    """Context-parallel ranks, which share each sequence."""
    expert: PositiveInt = 1
    """Expert-parallel ranks, which share the experts of each layer."""
    expert_tensor: PositiveInt | None = None
    """Tensor-parallel ranks of each expert; default: `tensor`."""
    sequence: bool = False
    """Sequence parallelism inside the tensor-parallel group."""

    def errors(self) -> Found:
        """A virtual pipeline, uneven stages and sequence parallelism have the ranks they need."""
        if self.sequence and self.tensor == 1:
            message = "sequence parallelism needs policy.parallel.tensor > 1: set it to false"
            yield "sequence", message
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            message = "a virtual pipeline needs policy.parallel.pipeline > 1: set it to 1"
            yield "virtual_pipeline", message
        for key in ("first_stage_layers", "last_stage_layers"):
            if getattr(self, key) is not None and self.pipeline == 1:
                yield key, "there is one stage: leave it out, or set policy.parallel.pipeline"


class OptimizerConfig(Section):
    """AdamW with gradient clipping, warm-up and decay, counted in optimizer steps."""

    lr: NonNegativeFloat = 1e-6
    """Highest learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps in which the learning rate grows from 0."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps to the end of the decay; default: those of the run that train the model."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    beta1: Probability = 0.9
    """Decay of the mean of gradients."""
    beta2: Probability = 0.95
    """Decay of the mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator of an update."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""
    distributed: bool = False
    """Shard the optimizer's state over the data-parallel ranks."""
    grad_reduce_in_fp32: bool = True
    """Sum gradients in fp32; false: those of a bf16 model in bf16, which halves their memory."""
    overlap: bool = False
    """Sum gradients over the data-parallel ranks while the last backward pass still runs."""
    offload: bool = False
    """Keep the optimizer's state in host memory; a step has a GiB of it on the device at a time."""

    def errors(self) -> Found:
        """Learning-rate schedules run downhill and end after their warm-up."""
        if self.min_lr > self.lr:
            yield "min_lr", f"got {self.min_lr:g}, more than lr ({self.lr:g})"
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            message = f"got {self.decay_steps}, not more than warmup_steps ({self.warmup_steps})"
            yield "decay_steps", message

    def warnings(self) -> Found:
        """Yield a key that a constant schedule ignores."""
        if self.schedule == "constant" and (self.min_lr or self.decay_steps):
            unused = "min_lr" if self.min_lr else "decay_steps"
            yield unused, "is ignored: the schedule is constant"


def default_chunk_elements(device: str) -> int:
    """Return 2 MiB of fp32 logits for a CPU's caches, 64 MiB for "cuda": fewer launches."""
    return 1 << 24 if device == "cuda" else 1 << 19


class LogprobsConfig(Section):
    """Log-probs: the LM head works in chunks, so that `[tokens, vocabulary]` never exists."""

    chunk_elements: PositiveInt | None = None
    """Logits that exist at one time; default: 2^19 on a CPU, on CUDA 2^24, or 2^26 if compiled."""
    keep_sets: bool = False
    """Sampling masks: log-probs over the tokens that top-p and top-k left, as sampled."""
    fp32_head: bool = False
    """Logits of a bf16 model in fp32, not rounded to bf16, in the trainer and in its engines."""


class Fp8Config(Section):
    """Matmuls in FP8, with Transformer Engine. The names are Megatron's, without `fp8_`."""

    format: Literal["hybrid", "e4m3"] = "hybrid"
    """Number format: `hybrid` has e5m2 gradients."""
    recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "tensorwise"
    """How the scaling factors are made."""
    margin: NonNegativeInt = 0
    """Recipe `delayed`: margin of the scaling factors."""
    amax_history: PositiveInt = 1
    """Recipe `delayed`: length of the history of largest values."""
    amax_compute: Literal["most_recent", "max"] = "most_recent"
    """Recipe `delayed`: which value of the history is used."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA): they alone are trained, the model stays as it was."""

    rank: PositiveInt = 32
    """Rank of an adapter's two factors."""
    alpha: PositiveFloat = 32.0
    """An adapter's product counts `alpha / rank` times."""
    targets: list[str] = Field(default_factory=lambda: ["all-linear"], min_length=1)
    """Linear layers with adapters, such as `q_proj`; `all-linear`: all but the head."""
    expert_rank: NonNegativeInt | None = None
    """Rank in routed experts, 0 for none; default: `rank` over the experts that a token takes."""
    path: AdapterPath | None = None
    """PEFT folder with the initial adapters; default: fresh ones."""
    merged: bool = False
    """Publish the whole weights with the adapters merged, for engines that take no adapters."""


class PolicyConfig(Section):
    """The trained model: layout, optimizer, micro-batches, layers."""

    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    max_tokens_per_microbatch: PositiveInt = 16384
    """Tokens of a micro-batch over all context-parallel ranks, padding included."""
    checkpoint: CheckpointPath | None = None
    """Run, checkpoint or folder of shards with the initial weights; default: `model.path`."""
    lora: LoraConfig | None = None
    """Train low-rank adapters; default: every weight."""
    logprobs: LogprobsConfig = Field(default_factory=LogprobsConfig)
    transformer_engine: Literal["auto", "off"] = "auto"
    """`auto`: Transformer Engine's layers where it is installed, on CUDA."""
    fp8: Fp8Config | None = None
    """FP8 matmuls; default: none."""
    share_prefixes: Literal["auto", "on", "off"] = "auto"
    """Compute common prefixes of a micro-batch's sequences once; `auto`: where supported."""
    routing_replay: Literal["none", "logprobs", "engine"] = "none"
    """Source of the experts that training replays: the log-prob pass or the engine."""
    mtp_coef: NonNegativeFloat = 0.0
    """Train the layer for multi-token prediction, with this coefficient of its loss; 0: keep it."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Fields of megatron.core's TransformerConfig that are proven here; others are refused."""

    @field_validator("transformer_engine", "share_prefixes", mode="before")
    @classmethod
    def _yaml_switch(cls, value: Any) -> Any:
        """YAML reads a bare on and off as booleans."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class ReferenceConfig(Section):
    """The frozen model against which KL is measured."""

    path: ModelPath | None = None
    """Hugging Face folder of the reference; default: the initial policy."""
    policy: str | None = None
    """The reference is this one of `rollout.policies`, with adapters of the run's shapes."""
    offload: bool = False
    """Keep the reference in host memory between passes."""


class TeacherConfig(Section):
    """The frozen model from which the policy learns, token by token: `algorithm.distillation`."""

    path: ModelPath | None = None
    """Hugging Face folder of the teacher, which has the policy's vocabulary."""
    offload: bool = False
    """Keep the teacher in host memory between passes."""


class CriticConfig(Section):
    """The value model, with the policy's layout. Used only if the estimator needs values."""

    path: ModelPath | None = None
    """Hugging Face folder of the critic; default: the initial policy. A reward model has a head."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    value_clip: PositiveFloat | None = None
    """Clip values to this distance from the old ones in the loss; default: no clip."""
    value_loss_coef: PositiveFloat = 1.0
    """Coefficient of the value loss."""
    warmup_steps: NonNegativeInt = 0
    """First steps, which train the critic alone."""
    offload: bool = False
    """Keep the critic, its gradients and optimizer in host memory between passes."""
