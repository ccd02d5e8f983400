"""Reading a Hugging Face folder as an architecture.

Imports neither torch nor Megatron, unless a bridge is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backends.megatron.convert.architecture import Architecture, BridgeKind
from backends.megatron.convert.families import FAMILIES
from backends.megatron.convert.fields import (
    expert_fields,
    integer,
    latent_fields,
    rope_arguments,
)
from backends.megatron.convert.table import Family
from rlcore.errors import ModelError


def read_architecture(
    folder: Path | str, *, weights: bool = True, bridge: BridgeKind = "none"
) -> Architecture:
    """Read `config.json` of a folder.

    Args:
        weights: also check that the folder has weights.
        bridge: the package that gives the table and knows families that we lack; it imports torch
            and Megatron.

    Raises ModelError: no such folder, no config.json or weights, an architecture or an option that
    we do not convert.
    """
    folder = Path(folder)
    config = _read_config(folder)
    family = _family(folder, config, bridge)
    _check_supported(folder, config, bridged=family.model_type not in FAMILIES)
    if weights:
        _check_weights(folder)
    transformer = _transformer_fields(folder, config, family)
    if family.latent_attention:
        theta = float(transformer["rotary_base"])
        scaling = None
    else:
        theta, scaling = rope_arguments(folder, config)
    arch = Architecture(
        family=family.model_type,
        hf_config=config,
        vocab_size=integer(folder, config, "vocab_size"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=integer(folder, config, "max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        transformer=transformer,
        head="value" if _is_classifier(config) else "lm",
        folder=folder,
        bridged=None if family.model_type in FAMILIES else family,
    )
    if bridge == "none":
        return arch
    from backends.megatron.convert.bridges.read import through_bridge

    return through_bridge(arch, bridge, weights=weights)


def _transformer_fields(folder: Path, config: dict[str, Any], family: Family) -> dict[str, Any]:
    heads = integer(folder, config, "num_attention_heads")
    hidden = integer(folder, config, "hidden_size")
    fields: dict[str, Any] = {
        "num_layers": integer(folder, config, "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": integer(folder, config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": int(config.get("num_key_value_heads") or heads),
        "kv_channels": int(config.get("head_dim") or family.head_dim or hidden // heads),
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "qk_layernorm": family.qk_norm,
        "add_qkv_bias": family.qkv_bias,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if family.latent_attention:
        fields |= latent_fields(folder, config)
    if family.experts is not None:
        fields |= expert_fields(folder, config, family.experts, fields["num_layers"])
    return fields


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: no such folder; expected a local Hugging Face folder (config.json,"
            " *.safetensors)"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder}: no config.json; expected a Hugging Face model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: got a JSON {type(config).__name__}, expected an object")
    return config


def _is_classifier(config: dict[str, Any]) -> bool:
    return any(
        str(name).endswith("ForSequenceClassification")
        for name in config.get("architectures") or ()
    )


def _family(folder: Path, config: dict[str, Any], bridge: BridgeKind) -> Family:
    """Find the family by `model_type`; `architectures`, where given, must name one of its classes.

    A family that we lack has no entries until the bridge has given them.
    """
    known = ", ".join(name for family in FAMILIES.values() for name in family.classes)
    family = FAMILIES.get(str(config.get("model_type")))
    names = [str(name) for name in config.get("architectures") or ()]
    if family is None and bridge != "none" and names:
        return Family(str(config.get("model_type")), names[0].split("For")[0], ())
    if family is None:
        kind = f"model_type {config.get('model_type')!r}"
        got = names[0] if names else kind
        if got in known:  # Kimi K2 borrows the class of DeepSeek-V3
            got += f" with {kind}"
        raise ModelError(
            f"{folder}: architecture {got} is not converted; converted are: {known}; others may"
            " come by model.bridge: mbridge"
        )
    if names and not set(names) & set(family.classes):
        raise ModelError(
            f"{folder}: architecture {names[0]} is not converted; converted are: {known}"
        )
    return family


def _check_supported(folder: Path, config: dict[str, Any], *, bridged: bool) -> None:
    """Refuse options that change the model and are not converted; a bridge may convert some."""
    rotary = config.get("rope_parameters") or {}
    partial = rotary.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    refused = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias", False)) and not bridged,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "qkv_bias": not config.get("qkv_bias", True) and not bridged,  # Qwen2-MoE has the choice
        "use_sliding_window": bool(config.get("use_sliding_window", False)),
        # Qwen gives a window and says that it is not used; Mixtral uses the window that it gives.
        "sliding_window": bool(config.get("sliding_window")) and "use_sliding_window" not in config,
        "quantization_config": config.get("quantization_config") is not None,
        "partial_rotary_factor": float(partial) != 1.0 and not bridged,
    }
    for key, bad in refused.items():
        if bad:
            raise ModelError(
                f"{folder}/config.json: {key}: {config.get(key, partial)!r} is not supported by the"
                " conversion"
            )
    if _is_classifier(config):
        labels = config.get("num_labels") or len(config.get("id2label") or ("", ""))
        if int(labels) != 1:
            raise ModelError(
                f"{folder}: a sequence classifier with {labels} labels; expected one (num_labels:"
                " 1), a value or reward"
            )


def _check_weights(folder: Path) -> None:
    if (folder / "model.safetensors.index.json").is_file() or any(folder.glob("*.safetensors")):
        return
    hint = ""
    if any(folder.glob("pytorch_model*.bin")):
        hint = (
            "; it has pytorch_model*.bin: load it in transformers and save it again with"
            " safe_serialization=True"
        )
    raise ModelError(
        f"{folder}: no weights: no *.safetensors and no model.safetensors.index.json{hint}"
    )
