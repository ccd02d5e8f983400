"""The settings of a PEFT folder: adapter_config.json beside adapter_model.safetensors.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backends.megatron.convert.adapters import ALL_LINEAR, adapted_layers, target_name
from backends.megatron.convert.architecture import Architecture
from rlcore.config.sections.policy import LoraConfig
from rlcore.errors import ModelError

SETTINGS_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"

# Settings that change what an adapter computes, with the only value that we have.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "target_parameters": (None, []),
}


def settings(arch: Architecture, config: LoraConfig, base: Path) -> dict[str, Any]:
    """The content of adapter_config.json for the adapters of a run on the weights of `base`."""
    layers = list(adapted_layers(arch, config).values())
    names = {target_name(layer.entry.hf[index]) for layer in layers for index in layer.pieces}
    ranks = {
        layer.entry.hf[index].removesuffix(".weight"): layer.rank
        for layer in layers
        for index in layer.pieces
        if layer.rank != config.rank
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(names),
        "rank_pattern": ranks,
        "alpha_pattern": {},
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def check_settings(folder: Path, config: LoraConfig, arch: Architecture) -> None:
    """Raise ModelError unless a folder has adapters such as the run's."""
    path = folder / SETTINGS_FILE
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"policy.lora.path: {path} cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise ModelError(f"policy.lora.path: {path} has no settings: expected a JSON object")
    for key, allowed in _FIXED.items():
        if given.get(key, allowed[0]) not in allowed:
            raise ModelError(
                f"policy.lora.path: {path} has {key} {given[key]!r}, expected {allowed[0]!r}"
            )
    wanted = settings(arch, config, arch.folder)
    for key, ours in (("r", "rank"), ("lora_alpha", "alpha"), ("rank_pattern", "expert_rank")):
        if given.get(key, wanted[key]) != wanted[key]:
            raise ModelError(
                f"policy.lora.path: {path} has {key} {given[key]!r}, policy.lora.{ours} makes it"
                f" {wanted[key]!r}"
            )
    targets = given.get("target_modules")
    names = set(wanted["target_modules"])
    if (isinstance(targets, list) and set(targets) != names) or targets in (None, ""):
        raise ModelError(
            f"policy.lora.path: {path} targets {targets!r}, policy.lora.targets {sorted(names)}"
        )
    if isinstance(targets, str) and targets != ALL_LINEAR:
        raise ModelError(
            f"policy.lora.path: {path} has the pattern {targets!r} as target_modules, expected a"
            " list of names"
        )
