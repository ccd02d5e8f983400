"""The rotary positions of a `config.json`, in either spelling, like transformers 5.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backends.megatron.convert.config_fields import ROPE, SCALED_QUERIES
from backends.megatron.convert.table import FULL_ATTENTION, Family
from rlcore.hf_config.fields import Field, check_fields, refusal

# A set of positions for the layers of all types.
_ALL = ""


@dataclass(frozen=True)
class Rope:
    """The rotary positions of a layer, by transformers' names.

    Attributes:
        kind: the scaling beyond the original length; `inverse_frequencies` has the formulas.
        theta: the base.
        dim: rotated dimensions of a head, the first ones.
        interleaved: the two dimensions of a rotated pair are adjacent; otherwise they are half of
            `dim` apart.
        original_length: `original_max_position_embeddings`.
        attention_factor: cosines and sines are multiplied by this.
        query_beta: queries at position p are multiplied by
            1 + query_beta * ln(1 + floor(p / original_length)).
        mscale_all_dim: YaRN's second factor, by which latent attention scales its scores.
    """

    kind: str
    theta: float
    dim: int
    interleaved: bool = False
    factor: float = 1.0
    original_length: int = 0
    attention_factor: float = 1.0
    query_beta: float = 0.0
    # proportional
    turned_pairs: int = 0
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = 0.0
    # longrope
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def by_length(self) -> bool:
        """Whether a token's angle depends on the length of its sequence."""
        return self.kind == "longrope"


def read_ropes(
    folder: Path, given: Mapping[str, Any], config: Mapping[str, Any], family: Family, head_dim: int
) -> dict[str, Rope]:
    """Read the rotary positions of each type of layer.

    transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`.
    A value that is given twice must be the same.

    Args:
        given: the unchanged `config.json`, to distinguish given values from defaults.
        head_dim: dimensions of a head, or of its part with positions.
    """
    types = sorted({*(config["layer_types"] or [FULL_ATTENTION])})
    old = _spelled(folder, "rope_scaling", given)
    new = _spelled(folder, "rope_parameters", given)
    default = family.fields["rope_parameters"].default
    if not old and given.get("rope_parameters") is None and default is not None:
        new = _spelled(folder, "rope_parameters", {**config, "rope_parameters": default})
    if old and new and old != new:
        raise refusal(
            folder,
            "rope_parameters and rope_scaling",
            [new.get(_ALL, new), old.get(_ALL, old)],
            "the same in both, or one of them alone",
        )
    name = "rope_scaling" if old else "rope_parameters"
    sets = old or new or {_ALL: {}}
    if _ALL not in sets and (config["layer_types"] is None or {*types} - {*sets}):
        first = min(sets)
        expected = "one set of positions for all layers, or one for each type in layer_types"
        raise refusal(folder, f"{name}.{first}", sets[first], expected)
    ropes = {}
    for kind in types:
        said = sets.get(_ALL, sets.get(kind, {}))
        within = f"{name}." if _ALL in sets else f"{name}.{kind}."
        _check_repeated(folder, given, said, within)
        if _ALL not in sets and said.get("rope_type") == "yarn":
            # transformers does not look for it in a set of one type of layers.
            check_fields(folder, said, {"truncate": Field("flag", True, only=True)}, within)
        full = kind == FULL_ATTENTION and config.get("full_heads")
        size = config["full_heads"][1] if full else head_dim
        ropes[kind] = _rope(folder, within, said, config, family, size)
    return ropes


def _spelled(folder: Path, name: str, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings under one name, for all layers or by type; `{}` if none are given."""
    said: dict[str, Any] = given.get(name) or {}
    # transformers reads a key that names a layer type as the settings of these layers.
    types = {FULL_ATTENTION, *(given.get("layer_types") or ())}
    nested = [key for key, value in said.items() if key in types or isinstance(value, dict)]
    for key in nested:
        if not isinstance(said[key], dict):
            raise refusal(folder, f"{name}.{key}", said[key], "an object with settings")
    if nested:
        return {key: _with_type(folder, f"{name}.{key}", said[key]) for key in nested}
    return {_ALL: _with_type(folder, name, said)} if said else {}


def _with_type(folder: Path, name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with `rope_type`, which may have its old name `type`."""
    found = dict(said)
    kind = found.pop("type", found.get("rope_type", "default"))
    if found.setdefault("rope_type", kind) != kind:
        got = [found["rope_type"], kind]
        raise refusal(folder, f"{name}.rope_type and {name}.type", got, "the same")
    return found


def _check_repeated(
    folder: Path, given: Mapping[str, Any], said: Mapping[str, Any], within: str
) -> None:
    """Refuse settings that `config.json` gives outside too, with another value or as null."""
    original = "original_max_position_embeddings"
    kind = said.get("rope_type", "default")
    scaled = isinstance(kind, str) and original in ROPE.get(kind, {})
    if scaled and given.get(original, ...) is None:
        raise refusal(folder, original, None, "a positive integer, or none at all")
    for key in ("rope_theta", "original_max_position_embeddings"):
        outer = given.get(key)
        if outer is not None and said.get(key, outer) != outer:
            raise refusal(
                folder,
                f"{key} and {within}{key}",
                [outer, said[key]],
                "the same in both, or one of them alone",
            )


def _rope(
    folder: Path,
    within: str,
    said: Mapping[str, Any],
    config: Mapping[str, Any],
    family: Family,
    head_dim: int,
) -> Rope:
    kind = said.get("rope_type", "default")
    _check_kind(folder, within, kind, family)
    longest = config["max_position_embeddings"]
    said = {
        "rope_theta": config["rope_theta"],
        "original_max_position_embeddings": config["original_max_position_embeddings"] or longest,
        "partial_rotary_factor": config["partial_rotary_factor"] or 1.0,
        **said,
    }
    partial = family.fields["partial_rotary_factor"]
    # transformers multiplies a null, except without scaling.
    partial = replace(partial, nullable=partial.nullable and kind == "default")
    fields = {**ROPE[kind], "partial_rotary_factor": partial}
    if family.scaled_queries:
        fields |= SCALED_QUERIES
    settings = check_fields(folder, said, fields, within)
    part = settings["partial_rotary_factor"]
    dim = head_dim if kind == "proportional" else _rotated(folder, head_dim, part)
    common: dict[str, Any] = {
        "kind": kind,
        "theta": float(settings["rope_theta"]),
        "dim": dim,
        "interleaved": config.get("rope_interleave", False),
    }
    if kind == "default":
        return Rope(**common)
    if kind == "proportional":
        turned = int(part * head_dim // 2)
        return Rope(**common, factor=float(settings["factor"]), turned_pairs=turned)
    original = settings.get("original_max_position_embeddings", 0)
    factor = settings["factor"]
    common |= {
        "factor": float(longest / original if factor is None else factor),
        "original_length": original,
        "query_beta": float(settings.get("llama_4_scaling_beta", 0.0)),
    }
    if kind == "llama3":
        low = settings["low_freq_factor"]
        high = settings["high_freq_factor"]
        if high <= low:
            above = f"more than low_freq_factor {low}"
            raise refusal(folder, f"{within}high_freq_factor", high, above)
        return Rope(**common, low_freq_factor=float(low), high_freq_factor=float(high))
    if kind == "yarn":
        if common["theta"] == 1:
            raise refusal(folder, f"{within}rope_theta", 1, "another base than 1 for yarn")
        return Rope(
            **common,
            attention_factor=_yarn_attention(common["factor"], settings),
            beta_fast=float(settings["beta_fast"] or 32.0),
            beta_slow=float(settings["beta_slow"] or 1.0),
            truncate=settings["truncate"],
            mscale_all_dim=float(settings["mscale_all_dim"] or 0.0),
        )
    if kind == "longrope":
        return Rope(**common, **_longrope(folder, within, settings, common))
    return Rope(**common)


def _check_kind(folder: Path, within: str, kind: Any, family: Family) -> None:
    """Refuse a kind of positions that the family's attention does not have."""
    kinds = ("default", "yarn") if family.latent_attention else tuple(ROPE)
    if family.scaled_queries:
        kinds = ("llama3", "yarn", "longrope")
    if kind not in kinds:
        attention = "latent attention" if family.latent_attention else "its attention"
        expected = f"{', '.join(kinds)}, which {attention} supports"
        if kind == "dynamic":
            expected += "; dynamic gives a token another angle whenever its sequence grows"
        raise refusal(folder, f"{within}rope_type", kind, expected)


def _rotated(folder: Path, head_dim: int, part: float | None) -> int:
    """The rotated dimensions of a head."""
    if part in (None, 1):
        return head_dim
    assert part is not None
    rotary = int(head_dim * part)
    if not 0 < rotary <= head_dim or rotary % 2:
        expected = (
            f"an even share of the head_dim {head_dim} (hidden_size / num_attention_heads), for"
            " rope"
        )
        raise refusal(folder, "partial_rotary_factor", part, expected)
    return rotary


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention with the context: 0.1 mscale ln(factor) + 1 (Peng et al. 2023)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention(factor: float, settings: Mapping[str, Any]) -> float:
    if settings["attention_factor"] is not None:
        return float(settings["attention_factor"])
    mscale = settings["mscale"]
    mscale_all_dim = settings["mscale_all_dim"]
    if mscale and mscale_all_dim:
        return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return yarn_scale(factor)


def _longrope(
    folder: Path, within: str, settings: Mapping[str, Any], common: Mapping[str, Any]
) -> dict[str, Any]:
    """LongRoPE's factors of each frequency, and its attention factor (Ding et al. 2024)."""
    pairs = common["dim"] // 2
    for key in ("short_factor", "long_factor"):
        if len(settings[key]) != pairs:
            expected = f"{pairs} numbers, one for each pair of rotated dimensions"
            raise refusal(folder, f"{within}{key}", settings[key], expected)
    attention = settings["attention_factor"]
    original = common["original_length"]
    if attention is None:
        if original < 2:
            expected = "at least 2, or an attention_factor"
            raise refusal(folder, f"{within}original_max_position_embeddings", original, expected)
        growth = math.log(max(common["factor"], 1.0)) / math.log(original)
        attention = math.sqrt(1 + growth)
    return {
        "attention_factor": float(attention),
        "short_factor": tuple(map(float, settings["short_factor"])),
        "long_factor": tuple(map(float, settings["long_factor"])),
    }
