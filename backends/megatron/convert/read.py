"""Reading a Hugging Face folder as an architecture.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.config_fields import ARCHITECTURES
from backends.megatron.convert.families import FAMILIES
from backends.megatron.convert.fields import (
    complete_blocks,
    expert_fields,
    full_heads,
    gated_delta_fields,
    hybrid_layers,
    latent_fields,
    latent_scale,
    mamba_fields,
)
from backends.megatron.convert.rope import Rope, read_ropes
from backends.megatron.convert.table import (
    FULL_ATTENTION,
    GATED_DELTA,
    LINEAR_ATTENTION,
    MAMBA_2,
    OUTPUT_LAYER,
    SLIDING_ATTENTION,
    WORD_EMBEDDING,
    Family,
)
from rlcore.config import Config
from rlcore.config.derived import other_folders
from rlcore.errors import ModelError, named_by
from rlcore.hf_config.fields import Field, check_fields, refusal
from rlcore.hf_config.read import read_config

INDEX = "model.safetensors.index.json"


def read_architecture(folder: Path | str, *, weights: bool = True) -> Architecture:
    """Read `config.json` of a folder.

    Args:
        weights: also check that the folder has weights.

    Raises ModelError: no such folder, no config.json or weights, an architecture or an option that
    we do not convert, a field that transformers would refuse, or contradictory fields.
    """
    folder = Path(folder)
    whole = read_config(folder)
    family = _family(folder, whole)
    given = _within(folder, whole, family) if family.within else whole
    inside = f"{family.within}." if family.within else ""
    config = check_fields(folder, given, family.fields, inside)
    if config.get("rotary_dim") and "partial_rotary_factor" not in given:
        config["partial_rotary_factor"] = config["rotary_dim"] / config["head_dim"]
    if family.single_blocks:
        complete_blocks(folder, config)
    if family.windows:
        _complete_windows(folder, config, family)
    else:
        _check_supported(folder, given, config, family)
    if family.normed_values:
        config["full_heads"] = full_heads(folder, config)
    if config.get("quantization_config") is not None:
        _check_mxfp4(folder, config)
    if "rope_local_base_freq" in config:
        given = _with_ropes_by_type(given, config)
    if "index_topk" in config:
        # Full attention, for sequences that are short enough.
        config["layer_types"] = None
    if "full_attention_interval" in config:
        config["layer_types"] = hybrid_layers(config)
    classes = whole.get("architectures") or ()
    is_classifier = any(name.endswith("ForSequenceClassification") for name in classes)
    if is_classifier:
        _check_labels(folder, config)
    fields = _transformer_fields(folder, config, family)
    rotated = fields.get("qk_pos_emb_head_dim", fields["kv_channels"])
    ropes = {}
    if "rope_theta" in config:
        ropes = read_ropes(folder, given, config, family, rotated)
    if family.latent_attention:
        fields |= latent_scale(ropes[FULL_ATTENTION])
    arch = Architecture(
        family=family.key,
        # An export is in the dtype of the model.
        hf_config={key: value for key, value in whole.items() if key != "quantization_config"},
        vocab_size=config["vocab_size"],
        tie_word_embeddings=config["tie_word_embeddings"],
        max_position_embeddings=config["max_position_embeddings"],
        ropes=_layer_ropes(folder, config, ropes),
        transformer=fields,
        windows=_layer_windows(config, family),
        blocks=_blocks(config) if family.single_blocks else (),
        full_heads=config.get("full_heads"),
        logit_cap=config.get("final_logit_softcapping"),
        max_tokens=config.get("index_topk"),
        head="value" if is_classifier else "lm",
        folder=folder,
    )
    if weights:
        _check_weights(folder, arch)
    return arch


def read_policy(config: Config, *, weights: bool = True) -> Architecture:
    """Read the folder of `model.path`; the other arguments and errors are `read_architecture`'s.

    With `policy.mtp_coef` the model has its layer for multi-token prediction.
    """
    arch = read_architecture(config.model.path, weights=weights)
    return with_prediction(arch) if config.policy.mtp_coef else arch


def with_prediction(arch: Architecture) -> Architecture:
    """The model with its layer for multi-token prediction, as `policy.mtp_coef` trains it.

    Raises ModelError for a family or a model without such a layer, or with several.
    """
    count = arch.hf_config.get("num_nextn_predict_layers")
    if arch.table.prediction is None or count != 1:
        raise ModelError(
            f"{arch.folder}: policy.mtp_coef trains the one layer for multi-token prediction of"
            f" DeepSeek-V3, GLM-4.5 and MiMo, got {arch.family} with num_nextn_predict_layers"
            f" {count!r}: set it to 0"
        )
    return replace(arch, mtp=True)


def _within(folder: Path, whole: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The object with the language model's fields, and whether its embeddings are tied."""
    given: dict[str, Any] = {
        **check_fields(folder, whole, {family.within: Field("map")})[family.within]
    }
    tied = "tie_word_embeddings"
    if tied not in whole:
        return given
    if given.setdefault(tied, whole[tied]) != whole[tied]:
        raise refusal(
            folder,
            f"{tied} and {family.within}.{tied}",
            [whole[tied], given[tied]],
            "the same in both",
        )
    return given


def _layer_ropes(
    folder: Path, config: Mapping[str, Any], ropes: Mapping[str, Rope]
) -> tuple[Rope | None, ...]:
    """The rotary positions of each layer, by its type; None in a layer without."""
    layers = config["num_hidden_layers"]
    kinds = config["layer_types"] or [FULL_ATTENTION] * layers
    rotates = [True] * layers
    if every := config.get("no_rope_layer_interval"):
        rotates = [(layer + 1) % every != 0 for layer in range(layers)]
    if (given := config.get("no_rope_layers")) is not None:
        if len(given) < layers:
            expected = f"a number for each of the {layers} layers"
            raise refusal(folder, "no_rope_layers", given, expected)
        rotates = [bool(flag) for flag in given[:layers]]
    return tuple(
        ropes.get(kind) if flag and kind != LINEAR_ATTENTION else None
        for kind, flag in zip(kinds, rotates)
    )


def read_models(
    config: Config, *, weights: bool = True
) -> tuple[Architecture, dict[str, Architecture]]:
    """Read the folder of `model.path`, and the other models' folders by their keys.

    Args:
        weights: see `read_architecture`.

    Raises:
        ModelError: as `read_architecture`; the message begins with the key of the folder.
    """
    found = {}
    with named_by("model.path"):
        policy = read_policy(config, weights=weights)
    for key, folder in other_folders(config).items():
        with named_by(key):
            found[key] = read_architecture(folder, weights=weights)
    return policy, found


def _transformer_fields(folder: Path, config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    # A family of which all layers have experts may have no other width.
    width = config["intermediate_size"]
    if width is None and family.experts is not None:
        width = config[family.experts.width]
    fields: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": width,
        "num_attention_heads": heads,
        "num_query_groups": config["num_key_value_heads"] or heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(config.get("rms_norm_eps") or config["layer_norm_epsilon"]),
        "qk_layernorm": family.qk_norm
        or (config.get("use_qk_norm", False) and not family.norm_over_heads),
        "add_qkv_bias": family.qkv_bias or config["attention_bias"],
        "add_bias_linear": family.sinks,
        "gated_linear_unit": family.activation != "relu2",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if family.latent_attention:
        rotary = config["qk_rope_head_dim"]
        # transformers uses this name for the part with rotary positions.
        if config["head_dim"] not in (None, rotary):
            raise refusal(
                folder, "head_dim", config["head_dim"], f"qk_rope_head_dim {rotary}, or no head_dim"
            )
        fields |= latent_fields(config)
    else:
        hidden = config["hidden_size"]
        # Llama's configuration class refuses this for any head_dim; the others accept a remainder.
        if hidden % heads and (not config["head_dim"] or family.model_type == "llama"):
            expected = f"a divisor of hidden_size {hidden}"
            raise refusal(folder, "num_attention_heads", heads, expected)
        fields["kv_channels"] = config["head_dim"] or hidden // heads
    _check_heads(folder, fields)
    if family.sinks:
        fields |= {"activation_func_clamp_value": config["swiglu_limit"], "glu_linear_offset": 1.0}
    if family.zero_centred_norms:
        fields["layernorm_zero_centered_gamma"] = True
    if family.normed_values:
        fields["softmax_scale"] = 1.0
        # The layers' weights have other shapes.
        fields["hetereogenous_dist_checkpoint"] = True
    if "query_pre_attn_scalar" in config:
        fields["softmax_scale"] = config["query_pre_attn_scalar"] ** -0.5
    if family.experts is not None and (not family.single_blocks or "moe" in config["layer_types"]):
        fields |= expert_fields(folder, config, family.experts, fields["num_layers"])
    if family.recurrence is GATED_DELTA:
        fields |= gated_delta_fields(folder, config)
    if family.recurrence is MAMBA_2:
        fields |= mamba_fields(folder, config)
    return fields


def _check_heads(folder: Path, fields: Mapping[str, Any]) -> None:
    heads = fields["num_attention_heads"]
    groups = fields["num_query_groups"]
    if fields.get("multi_latent_attention") and groups != heads:
        expected = f"the {heads} attention heads: latent attention makes keys and values for each"
        raise refusal(folder, "num_key_value_heads", groups, expected)
    if heads % groups:
        raise refusal(
            folder, "num_key_value_heads", groups, f"a divisor of the {heads} attention heads"
        )
    key = "qk_pos_emb_head_dim" if fields.get("multi_latent_attention") else "kv_channels"
    if fields[key] % 2:
        name = "qk_rope_head_dim" if key != "kv_channels" else "head_dim"
        raise refusal(folder, name, fields[key], "an even number, for rotary positions")


def _family(folder: Path, given: Mapping[str, Any]) -> Family:
    """Find the family by `model_type`; `architectures`, if given, must name one of its classes."""
    classes_of = [name for family in FAMILIES.values() for name in family.classes]
    known = ", ".join(dict.fromkeys(classes_of))
    names = check_fields(folder, given, ARCHITECTURES)
    classes = names["architectures"] or []
    model_type = str(given.get("model_type"))
    inner = given.get("text_config")
    text_type = inner.get("model_type") if isinstance(inner, dict) else None
    family = FAMILIES.get(model_type) or FAMILIES.get(f"{model_type}/{text_type}")
    if family is None:
        kind = f"model_type {given.get('model_type')!r}"
        if text_type is not None:
            kind += f" of {text_type!r}"
        got = classes[0] if classes else kind
        # Some models use the class of another family.
        if got in known:
            got += f" with {kind}"
        raise ModelError(f"{folder}: architecture {got} is not converted; converted are: {known}")
    if classes and not set(classes) & set(family.classes):
        raise ModelError(
            f"{folder}: architecture {classes[0]} is not converted; converted are: {known}"
        )
    return family


def _check_supported(
    folder: Path, given: Mapping[str, Any], config: Mapping[str, Any], family: Family
) -> None:
    """Refuse attention windows, which are not converted, and other kinds of layers."""
    # Qwen's configurations give a window and disable it; Mistral's use the window that they give.
    disabled = "use_sliding_window" in given and "use_sliding_window" in family.fields
    if config["sliding_window"] is not None and not disabled:
        raise refusal(
            folder,
            "sliding_window",
            config["sliding_window"],
            "null, or use_sliding_window: false with it, as windows are not converted",
        )
    # Their types are read by `complete_blocks`.
    kinds = None if family.single_blocks else config["layer_types"]
    layers = config["num_hidden_layers"]
    known = (FULL_ATTENTION, LINEAR_ATTENTION) if family.recurrence else (FULL_ATTENTION,)
    if "index_topk" in config:
        known = ("indexed_attention",)
    if kinds is not None and (len(kinds) != layers or not {*kinds} <= {*known}):
        expected = f"{' or '.join(map(repr, known))} for each of num_hidden_layers"
        raise refusal(folder, "layer_types", kinds, expected)


def _layer_windows(config: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    """The window of each layer, None in a layer without."""
    if not family.windows:
        return ()
    window = config["sliding_window"]
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in config["layer_types"])


def _blocks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The words by which the table chooses the entries of layers that are one block each."""
    return tuple("dense" if kind == "mlp" else kind for kind in config["layer_types"])


def _complete_windows(folder: Path, config: dict[str, Any], family: Family) -> None:
    """Set the types of layers that transformers derives."""
    layers = config["num_hidden_layers"]
    if config["layer_types"] is None:
        every = config.get("sliding_window_pattern", family.windows)
        config["layer_types"] = [
            FULL_ATTENTION if (layer + 1) % every == 0 else SLIDING_ATTENTION
            for layer in range(layers)
        ]
    kinds = config["layer_types"]
    if len(kinds) != layers or not {*kinds} <= {SLIDING_ATTENTION, FULL_ATTENTION}:
        expected = f"{SLIDING_ATTENTION!r} or {FULL_ATTENTION!r} for each of num_hidden_layers"
        raise refusal(folder, "layer_types", kinds, expected)


def _check_mxfp4(folder: Path, config: dict[str, Any]) -> None:
    """Refuse other weights than MXFP4."""
    quantised = config["quantization_config"]
    if quantised.get("quant_method") != "mxfp4":
        raise refusal(folder, "quantization_config", quantised, "quant_method 'mxfp4', or null")


def _with_ropes_by_type(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, with the positions of both types of layers as transformers 5 spells them."""
    sets = dict(config["rope_parameters"] or {})
    for kind, theta in (
        (FULL_ATTENTION, "rope_theta"),
        (SLIDING_ATTENTION, "rope_local_base_freq"),
    ):
        own = sets.get(kind) or {"rope_type": "default"}
        if isinstance(own, dict):
            scaled = (config["rope_scaling"] or {}) if kind == FULL_ATTENTION else {}
            sets[kind] = {"rope_theta": config[theta], **own, **scaled}
    others = {key: value for key, value in given.items() if key != "rope_theta"}
    return {**others, "rope_parameters": sets, "rope_scaling": None}


def _check_labels(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse any number of labels but one (a value or reward); transformers' default is two."""
    counts = {len(config["id2label"]) if config["id2label"] else None, config["num_labels"]}
    counts = counts - {None} or {2}
    if counts != {1}:
        raise ModelError(
            f"{folder}: a sequence classifier with {' or '.join(map(str, sorted(counts)))} labels;"
            " expected one (num_labels: 1, id2label with one entry), a value or reward"
        )
    if config["problem_type"] == "single_label_classification":
        raise refusal(folder, "problem_type", config["problem_type"], "regression, or null")


def _check_weights(folder: Path, arch: Architecture) -> None:
    """Refuse a folder without weights, and a tied model with a separate head.

    transformers 5 unties such a model by its weights; engines follow `config.json`.
    """
    if not (folder / INDEX).is_file() and not any(folder.glob("*.safetensors")):
        hint = ""
        if any(folder.glob("pytorch_model*.bin")):
            hint = (
                "; it has pytorch_model*.bin: load it in transformers and save it again with"
                " safe_serialization=True"
            )
        raise ModelError(f"{folder}: no weights: no *.safetensors and no {INDEX}{hint}")
    if not arch.tie_word_embeddings or arch.head == "value":
        return
    file_of = tensor_files(folder)
    named = {entry.megatron: entry.names[0] for entry in arch.table.expand((), 0)}
    names = [named[OUTPUT_LAYER], named[WORD_EMBEDDING]]
    if not set(names) <= file_of.keys():
        return
    tensors = []
    for name in names:
        with open_shard(folder / file_of[name], "pt") as shard:
            tensors.append(shard.get_tensor(name))
    head, embedding = tensors
    if head.dtype != embedding.dtype or not head.equal(embedding):
        raise refusal(
            folder,
            "tie_word_embeddings",
            True,
            f"false, as {names[0]} in the folder is not {names[1]}: set it, so that trainer and"
            " engines use this head, or remove the tensor",
        )


# --- safetensors files ----------------------------------------------------------------------------


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, from the index or from the files' headers.

    Raises:
        ModelError: the index or a file cannot be read.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ModelError(f"{index}: not a safetensors index: {error}") from error
    names: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open_shard(path, "numpy") as shard:
            names.update(dict.fromkeys(shard.keys(), path.name))
    return names


def open_shard(path: Path, framework: str) -> Any:
    """Open a file for reading, as a context manager.

    Raises:
        ModelError: the file is missing or cannot be read.
    """
    if not path.is_file():
        raise ModelError(f"{path.parent}: shard {path.name} is missing; {INDEX} names it")
    try:
        return safe_open(path, framework=framework, device="cpu")
    except SafetensorError as error:
        raise ModelError(
            f"{path}: not a readable safetensors file ({error}); copy the folder again"
        ) from error
