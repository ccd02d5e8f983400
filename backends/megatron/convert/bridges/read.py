"""An architecture whose table, and where we lack the family whose fields too, come from another
package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from backends.megatron.convert.architecture import Architecture, BridgeKind
from backends.megatron.convert.bridges.fields import bridged_fields, rotary_arguments
from backends.megatron.convert.bridges.mbridge import open_mbridge
from backends.megatron.convert.bridges.megatron_bridge import open_megatron_bridge
from backends.megatron.convert.bridges.protocol import PREDICTED_LAYERS, FamilyBridge, OpenBridge
from backends.megatron.convert.bridges.table import bridged_entries
from backends.megatron.convert.families import FAMILIES
from backends.megatron.convert.load import SafetensorsFolder
from rlcore.errors import ModelError

BRIDGES: dict[str, OpenBridge] = {"mbridge": open_mbridge, "megatron-bridge": open_megatron_bridge}

# Options that change a model, which a bridge may pass over in silence, and the values at which they
# change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "embedding_multiplier": (1,), "residual_multiplier": (1,), "logits_scaling": (1,),
    "logit_scale": (1,), "attention_multiplier": (), "query_pre_attn_scalar": (), "attn_logit_softcapping": (),
    "final_logit_softcapping": (), "clip_qkv": (), "scale_emb": (1,), "scale_depth": (), "no_rope_layers": (),
    "use_mla": (False,),
}  # fmt: skip
_UNREAD = re.compile(r"rotary_emb\.inv_freq$|\.mtp_layers\.|^mtp\.")


def through_bridge(arch: Architecture, kind: BridgeKind, *, weights: bool) -> Architecture:
    """`arch` with the bridge's table.

    A family of ours keeps its configuration, which is tested against transformers; of another one
    the bridge gives it. Where `weights`, every tensor of the folder must have a place in the model.
    Raises ModelError: the package is missing, does not know the family, or what it says cannot be
    carried by our layers.
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
    """With the bridge's fields; `config.json` no longer speaks of layers that are left out."""
    config = arch.hf_config
    for key, neutral in _NEUTRAL.items():
        if (value := config.get(key)) is not None and value not in neutral:
            raise ModelError(
                f"{arch.folder}/config.json: {key}: {value!r} is not known to be in {bridge.name}"
            )
    if kinds := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ModelError(
            f"{arch.folder}/config.json: layer_types: {min(kinds)!r} is not supported, only"
            " 'full_attention'"
        )
    fields = bridged_fields(bridge, arch)
    rotary = {**(arch.rope_scaling or {}), **rotary_arguments(bridge)}
    config = {key: 0 if key in PREDICTED_LAYERS else value for key, value in config.items()}
    return replace(arch, transformer=fields, rope_scaling=rotary or None, hf_config=config)


def _check_complete(bridge: FamilyBridge, arch: Architecture, names: Iterable[str]) -> None:
    """A tensor without a place would be a part of the model that nobody computes."""
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
