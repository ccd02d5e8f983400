"""Megatron models from an architecture: configuration, chunks, and their wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from torch import Tensor, nn

from backends.megatron.batch.pack import PackedSequences
from backends.megatron.batch.rotary import RotaryPositions
from backends.megatron.checks.transformer_fields import (
    INIT_METHODS,
    check_overrides,
    check_recompute,
)
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.rope import Rope
from backends.megatron.cpu.shim import replaced
from backends.megatron.model.head import LogprobHead, Targets
from backends.megatron.model.layer_specs import layer_specs, prediction_layer_spec
from backends.megatron.model.layers import LOCAL_FIELDS
from backends.megatron.model.moe import keep_no_graphs, moe_fields
from backends.megatron.model.mtp import MultiTokenPrediction, Prediction
from backends.megatron.model.value_head import ValueHead
from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import ConfigError
from rlcore.weights import DTYPES

# By the families' names: functions that Megatron accepts. Its own layers compute by the modules of
# `local_layer_spec`.
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": F.gelu, "relu2": F.relu}


def transformer_config(
    arch: Architecture,
    parallel: ParallelConfig,
    dtype: str,
    device: torch.device,
    overrides: Mapping[str, Any],
    layers: Mapping[str, Any] = LOCAL_FIELDS,
) -> TransformerConfig:
    """Make a fresh configuration. Each model needs its own: Megatron keeps a model's hooks on it.

    Args:
        overrides: the user's fields, `policy.megatron`.
        layers: the fields of the chosen layers, of `layer_fields`.
    """
    te_layers = layers["transformer_impl"] == "transformer_engine"
    check_overrides(overrides, arch, te_layers=te_layers)
    check_recompute(overrides, arch, parallel, te_layers=te_layers)
    torch_dtype = DTYPES[dtype]
    interleaved = parallel.virtual_pipeline > 1
    fields = {
        **arch.transformer,
        "activation_func": ACTIVATIONS[arch.table.activation],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if interleaved else None,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "context_parallel_size": parallel.context,
        "sequence_parallel": parallel.sequence,
        "params_dtype": torch_dtype,
        "pipeline_dtype": torch_dtype,
        "bf16": torch_dtype == torch.bfloat16,
        # `perform_initialization` stays on: without it weights have no tensor-parallel mark, and
        # all ranks but the first leave them out of the gradient norm. The rows that pad the
        # vocabulary must be zero as well.
        **dict.fromkeys(INIT_METHODS, nn.init.zeros_),
        "use_cpu_initialization": False,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": False,
        # Batched p2p is ambiguous if two stages exchange several chunks (PP 2 with VPP), and the
        # gradients come out wrong.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": not interleaved,
        **moe_fields(arch, parallel),
        **layers,
        **overrides,
    }
    try:
        return (MLATransformerConfig if arch.latent_attention else TransformerConfig)(**fields)
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"policy.megatron {dict(overrides)}: megatron.core refuses the model: {error}"
        ) from error


class PackModel(GPTModel):
    """A GPTModel over packs, whose last stage returns the results of `head` for its `labels`."""

    def __init__(self, *args: Any, ropes: Iterable[Rope | None], **kwargs: Any) -> None:
        # Megatron's own positions would be computed sequence by sequence.
        super().__init__(*args, position_embedding_type="none", **kwargs)
        self.rotary_positions = RotaryPositions(ropes, torch.cuda.current_device())

    def _preprocess(
        self, *args: Any, packed_seq_params: PackedSequences | None = None, **kwargs: Any
    ) -> Any:
        """Write the rotary angles of the pack into `packed_seq_params`, for all layers."""
        packed = packed_seq_params
        if not isinstance(packed, PackedSequences) or packed.layout is None:
            raise TypeError(
                f"the model takes packed sequences only, got packed_seq_params={packed!r}"
            )
        packed.angles = self.rotary_positions.angles(packed.layout)
        return super()._preprocess(*args, packed_seq_params=packed, **kwargs)

    def head(self, hidden: Tensor, targets: Targets) -> Any:
        """Compute the results of the last stage from its hidden states."""
        raise NotImplementedError

    def _postprocess(
        self, hidden_states: Tensor, *args: Any, labels: Targets | None = None, **kwargs: Any
    ) -> Any:
        if not self.post_process:
            return hidden_states
        assert labels is not None, "pass labels=Targets(...) with the micro-batch"
        return self.head(hidden_states, labels)


class PolicyModel(PackModel):
    """A language model; its output is (logprobs [M], entropy [M] or None)."""

    def __init__(
        self,
        *args: Any,
        true_vocab_size: int,
        logit_cap: float | None = None,
        prediction: Prediction | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.true_vocab_size = true_vocab_size
        # The first stage's embedding during a training pass, where the last stage has none.
        self.received_embedding: Tensor | None = None
        if self.post_process:
            self.output_layer.__class__ = LogprobHead
            self.output_layer.logit_cap = logit_cap
            if prediction is not None:
                self.prediction = MultiTokenPrediction(
                    self.config, prediction, vp_stage=self.vp_stage, groups=self.pg_collection
                )

    def head(self, hidden: Tensor, targets: Targets) -> Any:
        """Call the output layer, with the embedding as its weight if they are tied.

        With gradients the log-probs of multi-token prediction follow, if the model has its layer.
        """
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        output = self.output_layer(hidden, targets, self.true_vocab_size, weight)
        if not hasattr(self, "prediction") or not torch.is_grad_enabled():
            return output
        weight = self.output_layer.weight if weight is None else weight
        states, own = self.prediction(hidden, targets, self._embedding())
        predicted = self.output_layer(states, own, self.true_vocab_size, weight.detach())
        return (*output, predicted[0])

    def _embedding(self) -> Tensor:
        """The word embedding [V/tp, H], which multi-token prediction reads."""
        if self.pre_process or self.share_embeddings_and_output_weights:
            own = self.embedding.word_embeddings if self.pre_process else self.output_layer
            weight: Tensor = own.weight
            return weight
        assert self.received_embedding is not None, "the pass is outside `prediction_pass`"
        return self.received_embedding


class ValueModel(PackModel):
    """A model with a value head; its output is values [M], in fp32."""

    def __init__(self, *args: Any, seed: int, **kwargs: Any) -> None:
        super().__init__(*args, share_embeddings_and_output_weights=False, **kwargs)
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config, self.pg_collection.tp, seed=seed)

    def head(self, hidden: Tensor, targets: Targets) -> Any:
        """Call the value head."""
        return self.value_head(hidden, targets)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        """Call MegatronModule's function, since GPTModel's own expects an output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


def build_chunks(
    arch: Architecture,
    config: TransformerConfig,
    *,
    padded_vocab: int,
    value_head: bool = False,
    seed: int = 0,
) -> list[GPTModel]:
    """Build this rank's model chunks on the device: one, or one per virtual stage.

    All weights are 0 except norms and the value head. Collective if embedding and head are tied
    over pipeline stages.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    chunks: list[GPTModel] = []
    prediction = None
    if arch.mtp and arch.table.prediction is not None:
        spec = prediction_layer_spec(arch, config)
        prediction = Prediction(spec, arch.table.prediction.hidden_first)
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        common: dict[str, Any] = {
            "config": config,
            "transformer_layer_spec": layer_specs(arch, config, vp_stage),
            "vocab_size": padded_vocab,
            "max_sequence_length": arch.max_position_embeddings,
            "pre_process": mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            "post_process": mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            "parallel_output": True,
            "ropes": arch.ropes,
            "vp_stage": vp_stage,
        }
        # With `gradient_accumulation_fusion` Megatron's output layer requires Apex's kernel, which
        # our head does not use.
        with replaced(tensor_parallel_layers, "_grad_accum_fusion_available", True):
            if value_head:
                chunk: GPTModel = ValueModel(**common, seed=seed)
            else:
                chunk = PolicyModel(
                    **common,
                    share_embeddings_and_output_weights=arch.tie_word_embeddings,
                    true_vocab_size=arch.vocab_size,
                    logit_cap=arch.logit_cap,
                    prediction=prediction,
                )
        keep_no_graphs(chunk)
        if arch.table.scaled_embeddings and chunk.pre_process:
            chunk.embedding.register_forward_hook(_scaled)
        # A router makes its weight on the CPU.
        chunks.append(chunk.to(torch.cuda.current_device()))
    return chunks


def _scaled(module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
    """Embeddings times the square root of the hidden size, which is rounded to their dtype."""
    scale = torch.tensor(embedded.size(-1) ** 0.5, dtype=embedded.dtype)
    return embedded * scale.to(embedded.device)


def in_dtype(chunks: list[GPTModel], config: TransformerConfig) -> list[nn.Module]:
    """Wrap chunks in bf16 in Megatron's Float16Module, whose last stage returns fp32."""
    return [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else list(chunks)


def with_gradients(
    modules: list[nn.Module],
    config: TransformerConfig,
    *,
    distributed_optimizer: bool,
    grad_reduce_in_fp32: bool = True,
    overlap: bool = False,
) -> list[nn.Module]:
    """Wrap the chunks in Megatron's DDP, which sums gradients over micro-batches and replicas.

    Parameters are always gathered before the optimizer step ends, since publication and scoring
    read them immediately.

    Args:
        grad_reduce_in_fp32: sum in fp32; otherwise in the dtype of the parameters.
        overlap: sum each bucket when the backward pass of the last micro-batch has filled it. The
            schedule marks the last micro-batch by `no_sync_func`.
    """
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=overlap,
        # A non-finite norm skips the step instead of ending the run.
        check_for_nan_in_grad=False,
        average_in_collective=False,
    )
    wrapped = [
        DistributedDataParallel(config, ddp, module, disable_bucketing=stage > 0)
        for stage, module in enumerate(modules)
    ]
    if overlap:
        waits = [module.no_sync for module in wrapped]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return list(wrapped)
