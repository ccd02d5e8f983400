"""An architecture whose conversion table comes from another package.

A package's names and conversions become rows of a table of ours, with a proof that the conversions
are the same. Where we lack the family, its TransformerConfig fields come from there too. They must
be fields that our layers carry; other fields are ours to decide, or refused by name.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from backends.megatron.convert.architecture import Architecture, BridgeKind
from backends.megatron.convert.bridges.packages import BRIDGES, PREDICTED_LAYERS, FamilyBridge
from backends.megatron.convert.config_fields import SIGMOID_ROUTER
from backends.megatron.convert.families import FAMILIES, TRUNK
from backends.megatron.convert.fields import sigmoid_fields
from backends.megatron.convert.hf_tensors import hf_shapes
from backends.megatron.convert.layout import pack
from backends.megatron.convert.load import SafetensorsFolder
from backends.megatron.convert.table import (
    OUTPUT_LAYER,
    VALUE_HEAD,
    WORD_EMBEDDING,
    Entry,
    Layers,
    Split,
    local_spelling,
)
from backends.megatron.cpu.shim import importing_megatron
from rlcore.errors import ModelError
from rlcore.hf_config.fields import check_fields

# Options that change a model and that a bridge may ignore, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "embedding_multiplier": (1,), "residual_multiplier": (1,), "logits_scaling": (1,),
    "logit_scale": (1,), "attention_multiplier": (), "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (), "final_logit_softcapping": (), "clip_qkv": (), "scale_emb": (1,),
    "scale_depth": (), "no_rope_layers": (), "use_mla": (False,),
}  # fmt: skip
_UNREAD = re.compile(r"rotary_emb\.inv_freq$|\.mtp_layers\.|^mtp\.")

# the fields of TransformerConfig that our layers carry
_CARRIED = frozenset({
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "layernorm_epsilon", "qk_layernorm", "add_qkv_bias", "num_moe_experts",
    "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk", "moe_router_score_function",
    "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_dtype",
    "moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
})  # fmt: skip
# fields with the only value that our layers carry
_EXPECTED: dict[str, Any] = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False,
    "activation_func": F.silu,
}  # fmt: skip
# fields that `transformer_config` decides, and losses of pre-training
_OURS = frozenset({
    "params_dtype", "pipeline_dtype", "bf16", "fp16", "autocast_dtype",
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "sequence_parallel", "variable_seq_lengths", "overlap_p2p_comm",
    "batch_p2p_comm", "use_cpu_initialization", "perform_initialization", "init_method",
    "output_layer_init_method", "embedding_init_method", "init_method_std",
    "embedding_init_method_std", "hidden_dropout", "attention_dropout", "attention_softmax_in_fp32",
    "attention_backend", "masked_softmax_fusion", "persist_layer_norm", "bias_activation_fusion",
    "bias_dropout_fusion", "apply_rope_fusion", "gradient_accumulation_fusion",
    "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "transformer_impl",
    "deallocate_pipeline_outputs", "async_tensor_model_parallel_allreduce", "cuda_graph_scope",
    "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion",
    "moe_shared_expert_overlap", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "moe_z_loss_coeff", "moe_router_bias_update_rate", "mtp_loss_scaling_factor",
    "moe_router_enable_expert_bias",  # belongs to sigmoid routers, see `_router_fields`
})  # fmt: skip
# `read_architecture` has them from config.json
_FROM_CONFIG = ("vocab_size", "max_sequence_length", "rotary_base")
# placeholders for the numbers of layer and expert, which no name contains otherwise
_LAYER = 7919
_EXPERT = 6007


def through_bridge(arch: Architecture, kind: BridgeKind, *, weights: bool) -> Architecture:
    """Return `arch` with the bridge's table.

    A family of ours keeps its configuration, which is tested against transformers; the bridge gives
    that of another family. With `weights`, every tensor of the folder must belong to the model.
    Raises ModelError: the package is missing or does not know the family, or our layers do not
    carry it.
    """
    if arch.latent_attention:
        raise ModelError(
            f"model.bridge: {kind}: {arch.family} has latent attention, which our own table"
            " carries; set none"
        )
    bridge = BRIDGES[kind](arch)
    if arch.family not in FAMILIES:
        arch = _configured(bridge, arch)
    table = replace(arch.table, entries=bridged_entries(bridge, arch))
    arch = replace(arch, bridged=table)
    if weights:
        with SafetensorsFolder(arch.folder) as folder:
            _check_complete(bridge, arch, folder.names)
    return arch


def _configured(bridge: FamilyBridge, arch: Architecture) -> Architecture:
    """Return `arch` with the bridge's fields, and without the layers that are left out."""
    config = arch.hf_config
    for key, neutral in _NEUTRAL.items():
        if (value := config.get(key)) is not None and value not in neutral:
            raise ModelError(
                f"{arch.folder}/config.json: {key}: {value!r} is not known to be in {bridge.name}"
            )
    fields = _bridged_fields(bridge, arch)
    rotary = {**(arch.rope_scaling or {}), **_rotary_arguments(bridge)}
    config = {key: 0 if key in PREDICTED_LAYERS else value for key, value in config.items()}
    return replace(arch, transformer=fields, rope_scaling=rotary or None, hf_config=config)


def _bridged_fields(bridge: FamilyBridge, arch: Architecture) -> dict[str, Any]:
    """Read `arch.transformer` of a family that only the bridge knows."""
    with importing_megatron():
        from megatron.core.transformer import TransformerConfig
    defaults = {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(TransformerConfig)
    }
    carried: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    given = dict(bridge.fields())
    # layers that predict further tokens: Megatron says None for none
    if given.get("mtp_num_layers") == 0:
        del given["mtp_num_layers"]
    for name, value in given.items():
        if name in _CARRIED:
            carried |= {name: value} if value is not None else {}
        elif name in _EXPECTED:
            if value != _EXPECTED[name]:
                raise ModelError(
                    f"{bridge.name} sets {name} to {value!r}; our layers have {_EXPECTED[name]!r}"
                    " alone"
                )
            carried |= {name: value} if name != "activation_func" else {}
        elif name not in _OURS and value != defaults.get(name):
            raise ModelError(
                f"{bridge.name} sets {name} to {value!r}, which our layers do not carry; the family"
                " needs its own"
            )
    if missing := sorted((_EXPECTED.keys() - {"activation_func"}) - carried.keys()):
        raise ModelError(
            f"{bridge.name} leaves {missing[0]} to Megatron's default; our layers have"
            f" {_EXPECTED[missing[0]]!r}"
        )
    if carried.get("num_moe_experts"):
        carried["moe_layer_freq"] = _layer_pattern(
            carried.get("moe_layer_freq", 1), arch.num_layers
        )
        carried |= _router_fields(bridge, arch, carried)
        return carried
    return {name: value for name, value in carried.items() if not name.startswith("moe_")}


def _router_fields(
    bridge: FamilyBridge, arch: Architecture, carried: dict[str, Any]
) -> dict[str, Any]:
    """The fields of our routers beside `carried`.

    Bridges leave them out where Megatron's own router knows only one kind.
    """
    config = arch.hf_config
    score = carried.get("moe_router_score_function", "softmax")
    bias = bool(bridge.fields().get("moe_router_enable_expert_bias"))
    if score == "sigmoid" and bias:
        router = check_fields(arch.folder, config, SIGMOID_ROUTER)
        return {
            **sigmoid_fields(arch.folder, router, carried["num_moe_experts"]),
            "moe_router_pre_softmax": not router["norm_topk_prob"],
        }
    if score != "softmax" or bias:
        raise ModelError(
            f"{bridge.name}: {score} routers {'with' if bias else 'without'} a bias are not"
            " supported"
        )
    normalized = not carried.get("moe_router_pre_softmax", False)
    if bool(config.get("norm_topk_prob", normalized)) != normalized or config.get(
        "n_group"
    ) not in (None, 1):
        raise ModelError(
            f"{bridge.name} passes over norm_topk_prob {config.get('norm_topk_prob')} or n_group"
            f" {config.get('n_group')} of {arch.folder}/config.json: its routers would be other"
            " ones"
        )
    return {}


def _layer_pattern(every: int | list[int], num_layers: int) -> int | list[int]:
    """The value of `moe_layer_freq`: for each layer whether it has experts, or 1 where all have."""
    pattern = (
        every
        if isinstance(every, list)
        else [int(layer % every == 0) for layer in range(num_layers)]
    )
    return 1 if all(pattern) else [int(has) for has in pattern]


def _rotary_arguments(bridge: FamilyBridge) -> dict[str, Any]:
    """The keyword arguments of `GPTModel` for rotary positions that `config.json` does not tell."""
    given = {key: value for key, value in bridge.gpt_arguments().items() if key not in _FROM_CONFIG}
    if (kind := given.pop("position_embedding_type", "rope")) != "rope":
        raise ModelError(
            f"{bridge.name}: position_embedding_type {kind!r} is not supported, expected 'rope'"
        )
    percent = float(given.pop("rotary_percent", 1.0))
    if given:
        raise ModelError(f"{bridge.name}: GPTModel's {min(given)} is not supported")
    return {} if percent == 1.0 else {"rotary_percent": percent}


def _check_complete(bridge: FamilyBridge, arch: Architecture, names: Iterable[str]) -> None:
    """Refuse a folder with a tensor that the model does not compute with."""
    known = {name for entry in arch.entries() for name in entry.hf} | {"lm_head.weight"}
    predicted = tuple(
        f"model.layers.{layer}." for layer in range(arch.num_layers, arch.num_layers + 8)
    )
    for name in sorted(set(names) - known):
        if not _UNREAD.search(name) and not name.startswith(predicted):
            raise ModelError(
                f"{arch.folder}: tensor {name!r} has no place in the model that {bridge.name}"
                " describes"
            )


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Question:
    """A parameter of our model, by its name in the spelling of Transformer Engine's layers."""

    name: str
    split: Split
    layers: Layers = "all"
    dtype: str | None = None

    @property
    def asked(self) -> str:
        """The name with placeholders for the numbers."""
        return self.name.format(layer=_LAYER, expert=_EXPERT)

    def entry(self, hf_names: list[str]) -> Entry:
        """The row of the table, from the bridge's answer."""
        layer = f"decoder.layers.{_LAYER}."
        ours = (
            layer + local_spelling(self.asked.removeprefix(layer))
            if self.asked.startswith(layer)
            else self.asked
        )
        megatron, *hf = (
            name.replace(str(_LAYER), "{layer}").replace(str(_EXPERT), "{expert}")
            for name in (ours, *hf_names)
        )
        return Entry(megatron, tuple(hf), self.split, self.layers, dtype=self.dtype)


def bridged_entries(bridge: FamilyBridge, arch: Architecture) -> tuple[Entry, ...]:
    """Make the table of a model with `arch.transformer` of the bridge's names.

    The row of the value head is ours. Raises ModelError where the bridge has no name for a
    parameter, or converts it in a way that our table cannot express.
    """
    narrow = replace(arch, transformer={**arch.transformer, "hidden_size": 1})
    entries: list[Entry] = []
    for question in _questions(arch):
        entry = question.entry(list(bridge.hf_names(question.asked)))
        _prove(bridge, narrow, question, entry)
        if entry.megatron == OUTPUT_LAYER and entry.hf == entries[0].hf:
            raise ModelError(
                f"{bridge.name} ties the output layer to the embedding, which"
                f" {arch.folder}/config.json does not say; set its tie_word_embeddings to true"
            )
        entries.append(entry)
    return (*entries, *(entry for entry in TRUNK if entry.megatron == VALUE_HEAD))


def _prove(bridge: FamilyBridge, narrow: Architecture, question: _Question, entry: Entry) -> None:
    """Convert numbered elements in both ways: the results must be equal."""
    one = entry.at(0, 0) if entry.per_expert else entry.at(0)
    shapes = hf_shapes(narrow, one)
    if len(shapes) == len(entry.hf):
        sizes = [math.prod(shape) for shape in shapes]
        numbered = torch.arange(sum(sizes), dtype=torch.float32).split(sizes)
        pieces = [part.view(shape) for part, shape in zip(numbered, shapes)]
        theirs = bridge.to_megatron(question.asked, pieces)
        ours = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:])
        pack(entry.split, pieces, narrow.transformer["kv_channels"], ours)
        if torch.equal(theirs, ours):
            return
    raise ModelError(
        f"{bridge.name} makes {entry.megatron} of {', '.join(entry.hf)} in another way than a"
        f" {entry.split.value} split; the family needs a table of its own"
    )


def _questions(arch: Architecture) -> Iterator[_Question]:
    """Yield every parameter of a model with these fields, in the order of a forward pass."""
    fields = arch.transformer
    layer = "decoder.layers.{layer}."
    attention = layer + "self_attention."
    yield _Question(WORD_EMBEDDING, Split.VOCAB)
    yield _Question(attention + "linear_qkv.layer_norm_weight", Split.REPLICATED)
    yield _Question(attention + "linear_qkv.weight", Split.QKV)
    if fields.get("add_qkv_bias"):
        yield _Question(attention + "linear_qkv.bias", Split.QKV)
    if fields.get("qk_layernorm"):
        yield _Question(attention + "q_layernorm.weight", Split.REPLICATED)
        yield _Question(attention + "k_layernorm.weight", Split.REPLICATED)
    yield _Question(attention + "linear_proj.weight", Split.ROW)
    if not all(arch.moe_layers):
        mlp = layer + "mlp."
        yield _Question(mlp + "linear_fc1.layer_norm_weight", Split.REPLICATED, "dense")
        yield _Question(mlp + "linear_fc1.weight", Split.GATED, "dense")
        yield _Question(mlp + "linear_fc2.weight", Split.ROW, "dense")
    if any(arch.moe_layers):
        yield from _expert_questions(arch, layer)
    yield _Question("decoder.final_layernorm.weight", Split.REPLICATED)
    if not arch.tie_word_embeddings:
        yield _Question(OUTPUT_LAYER, Split.VOCAB)


def _expert_questions(arch: Architecture, layer: str) -> Iterator[_Question]:
    fields = arch.transformer
    mlp = layer + "mlp."
    yield _Question(layer + "pre_mlp_layernorm.weight", Split.REPLICATED, "moe")
    yield _Question(mlp + "router.weight", Split.REPLICATED, "moe")
    if fields.get("moe_router_score_function") == "sigmoid":
        yield _Question(mlp + "router.expert_bias", Split.REPLICATED, "moe", dtype="float32")
    yield _Question(mlp + "experts.linear_fc1.weight{expert}", Split.GATED, "moe")
    yield _Question(mlp + "experts.linear_fc2.weight{expert}", Split.ROW, "moe")
    if fields.get("moe_shared_expert_intermediate_size"):
        yield _Question(mlp + "shared_experts.linear_fc1.weight", Split.GATED, "moe")
        yield _Question(mlp + "shared_experts.linear_fc2.weight", Split.ROW, "moe")
        if fields.get("moe_shared_expert_gate"):
            yield _Question(mlp + "shared_experts.gate_weight", Split.REPLICATED, "moe")
