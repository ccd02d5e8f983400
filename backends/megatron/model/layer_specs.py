"""The layers of a model over packs: Megatron's own, or Transformer Engine's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from torch import Tensor

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.rope import Rope
from backends.megatron.convert.table import MAMBA_2
from backends.megatron.model.attention.core import (
    CoreAttention,
    HeadsRMSNorm,
    LocalRMSNorm,
    PackedAttention,
)
from backends.megatron.model.attention.divided_heads import (
    DividedHeads,
    GatedAttention,
    divides_heads,
)
from backends.megatron.model.attention.latent import LatentAttention, LatentRMSNorm
from backends.megatron.model.attention.normed_values import NormedValues
from backends.megatron.model.elementwise import (
    ClampedSwiGLU,
    GeGLU,
    SquaredReLU,
    SwiGLU,
    rotate_heads,
)
from backends.megatron.model.grouped_experts import GroupedExperts
from backends.megatron.model.moe import router_class
from backends.megatron.model.recurrent.gated_delta import GatedDelta
from backends.megatron.model.recurrent.grouped import RecurrentParts
from backends.megatron.model.recurrent.mamba import Mamba
from rlcore.errors import ConfigError

# Adds an output and its bias to the residual stream.
Add = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def layer_specs(
    arch: Architecture, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The specifications of the layers of one chunk."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(arch, config, first + index) for index in range(count)],
        layer_norm=norm_class(config),
    )


def prediction_layer_spec(arch: Architecture, config: TransformerConfig) -> ModuleSpec:
    """The specification of the decoder layer for multi-token prediction, as of the last layer."""
    return _layer_spec(arch, config, arch.num_layers - 1)


def norm_class(config: TransformerConfig) -> Any:
    """The norm of hidden states."""
    return TENorm if config.transformer_impl == "transformer_engine" else LocalRMSNorm


def _layer_spec(arch: Architecture, config: TransformerConfig, layer: int) -> ModuleSpec:
    """The specification of a layer, by its number in the model."""
    te = config.transformer_impl == "transformer_engine"
    layer_spec = te_layer_spec if te else local_layer_spec
    experts = config.num_moe_experts if arch.moe_layers[layer] else None
    spec = layer_spec(config, experts, arch.ropes[layer])
    if arch.recurrent_layers[layer]:
        recurrent = Mamba if arch.table.recurrence is MAMBA_2 else GatedDelta
        spec.submodules.self_attention = ModuleSpec(recurrent, submodules=RecurrentParts())
    elif divides_heads(config):
        spec.submodules.self_attention.module = DividedHeads
    elif config.attention_output_gate:
        spec.submodules.self_attention.module = GatedAttention
    if arch.table.normed_values:
        attention = spec.submodules.self_attention
        attention.module = NormedValues
        full = arch.full_heads if arch.windows[layer] is None else None
        attention.params = {**attention.params, "full_heads": full}
    if arch.table.norm_over_heads:
        norm_over_heads(spec, config)
    if arch.table.windows:
        core = spec.submodules.self_attention.submodules.core_attention
        core.params |= {"window": arch.windows[layer], "sinks": arch.table.sinks}
    if arch.table.norms_behind:
        spec.module = ScaledLayer if arch.table.scaled_layers else NormedOutputs
    if not arch.table.norms_before:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
    if arch.blocks:
        _keep_block(spec.submodules, feeds_forward=arch.blocks[layer] in ("dense", "moe"))
    return spec


def _keep_block(parts: Any, *, feeds_forward: bool) -> None:
    """Leave out a layer's attention, or its feed-forward net: a layer without a part adds 0."""
    if feeds_forward:
        parts.input_layernorm = parts.self_attention = IdentityOp
        parts.self_attn_bda = IdentityFuncOp
    else:
        parts.pre_mlp_layernorm = parts.mlp = IdentityOp
        parts.mlp_bda = IdentityFuncOp


def local_layer_spec(
    config: TransformerConfig, num_experts: int | None, rope: Rope | None
) -> ModuleSpec:
    """Megatron's local layer with packed attention and torch's RMSNorm."""
    layer = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=num_experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
        )
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = LocalRMSNorm
    if config.multi_latent_attention:
        parts.self_attention.module = LatentAttention
        parts.self_attention.params = {**parts.self_attention.params, "rope": rope}
        latent = parts.self_attention.submodules
        latent.core_attention = CoreAttention
        latent.q_layernorm = latent.kv_layernorm = LatentRMSNorm
    else:
        attention = parts.self_attention.submodules
        attention.core_attention = ModuleSpec(PackedAttention, params={"rope": rope})
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = LocalRMSNorm
    mlp = submodules_of(parts.mlp)
    activation = SwiGLU if config.activation_func_clamp_value is None else ClampedSwiGLU
    if config.activation_func is F.gelu:
        activation = GeGLU
    if config.activation_func is F.relu:
        activation = SquaredReLU
    if num_experts is None:
        mlp.activation_func = activation
    else:
        mlp.router = router_class(config)
        mlp.experts = _of_class(GroupedExperts, mlp.experts)
        for net in (mlp.experts, mlp.shared_experts):
            submodules_of(net).activation_func = activation
    return layer


def norm_over_heads(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Give a layer's queries and keys each one norm over all heads."""
    parts = layer.submodules.self_attention.submodules
    heads = {"heads": config.num_attention_heads}
    groups = {"heads": config.num_query_groups}
    parts.q_layernorm = ModuleSpec(module=HeadsRMSNorm, params=heads)
    parts.k_layernorm = ModuleSpec(module=HeadsRMSNorm, params=groups)


def submodules_of(spec: Any) -> Any:
    """The parts of a specification, which is a partial call in megatron-core 0.17 and later."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def _of_class(module: type, spec: Any) -> Any:
    """The specification with another class. A partial call takes no other `module`."""
    if isinstance(spec, partial):
        return partial(module, *spec.args, **spec.keywords)
    spec.module = module
    return spec


class TEAttention(MegatronModule):
    """Transformer Engine's core attention over a pack.

    It rotates q and k like `PackedAttention`. Under context parallelism Transformer Engine itself
    exchanges keys and values. It accepts sequences in our layout: padded to a multiple of 2 * CP,
    each rank with an early and a late chunk.
    """

    def __init__(self, config: Any, *args: Any, rope: Rope | None, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.rope = rope
        self.attention = TEDotProductAttention(config, *args, **kwargs)

    def forward(
        self, query: Tensor, key: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
    ) -> Tensor:
        """q [T, heads, d], k and v [T, groups, d] -> [T, heads * d]."""
        packed = packed_seq_params
        if self.rope is not None:
            query, key = rotate_heads(query, key, packed.angles[self.rope])
        # Offsets of the sequences over all CP ranks.
        cu = packed.layout.cu_seqlens
        longest = packed.layout.longest
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        out: Tensor = self.attention(query, key, *args, packed_seq_params=params, **kwargs)
        return out.reshape(query.size(0), -1)


def te_layer_spec(
    config: TransformerConfig, num_experts: int | None, rope: Rope | None
) -> ModuleSpec:
    """The specification of one Transformer Engine layer.

    With experts it has grouped matmuls, and the router that leaves pads out. Raises ConfigError if
    Transformer Engine is installed but cannot be imported.
    """
    if not HAVE_TE:
        raise ConfigError(
            "transformer_engine is installed, but Megatron cannot import it (`import"
            " transformer_engine.pytorch` has the reason); repair it, or set"
            " policy.transformer_engine: off"
        )
    layer = copy.deepcopy(
        get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=num_experts is not None,
            qk_layernorm=config.qk_layernorm,
        )
    )
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(TEAttention, params={"rope": rope})
    if num_experts is not None:
        submodules_of(layer.submodules.mlp).router = router_class(config)
    return layer


class NormedOutputs(TransformerLayer):
    """Megatron's layer, in which outputs of attention and MLP pass a norm before they are added."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # Megatron's switches gradients on, so that scoring passes would keep the norms' inputs.
        self.bias_dropout_add_exec_handler = nullcontext
        for name in ("self_attn", "mlp"):
            norm = LocalRMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.add_module(f"post_{name}_layernorm", norm)
            setattr(self, f"{name}_bda", _normed(getattr(self, f"{name}_bda"), norm))


class ScaledLayer(NormedOutputs):
    """A layer whose output is multiplied by a number of the folder."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As of Megatron's layer."""
        output, context = super().forward(*args, **kwargs)
        return output * self.layer_scalar, context


def _normed(make: Callable[[bool, bool], Add], norm: LocalRMSNorm) -> Callable[[bool, bool], Add]:
    def make_normed(training: bool, fused: bool) -> Add:
        add = make(training, fused)

        def normed(
            output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
        ) -> Tensor:
            out, bias = output
            return add((norm(out if bias is None else out + bias), None), residual, dropout)

        return normed

    return make_normed
