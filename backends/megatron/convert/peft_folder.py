"""The settings of a PEFT folder with the adapters of a run. Does not import Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.megatron.convert.adapters import ALL_LINEAR, adapted_layers, linear_entries
from backends.megatron.convert.architecture import Architecture, tensor_shapes
from rlcore.adapter_folder import SETTINGS_FILE, AdapterFolder, read_settings
from rlcore.config.sections.policy import LoraConfig
from rlcore.errors import ModelError


def settings(arch: Architecture, config: LoraConfig, base: Path) -> dict[str, Any]:
    """The content of adapter_config.json for the adapters of a run on the weights of `base`."""
    layers = list(adapted_layers(arch, config).values())
    names = {module.rpartition(".")[2] for layer in layers for module in layer.modules.values()}
    ranks = {
        module: layer.rank
        for layer in layers
        for module in layer.modules.values()
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


def check_settings(folder: Path, config: LoraConfig, arch: Architecture, key: str) -> None:
    """Raise ModelError unless a folder has adapters such as the run's."""
    path = folder / SETTINGS_FILE
    given = read_settings(folder, key)
    wanted = settings(arch, config, arch.folder)
    for name, ours in (("r", "rank"), ("lora_alpha", "alpha"), ("rank_pattern", "expert_rank")):
        if given.get(name, wanted[name]) != wanted[name]:
            raise ModelError(
                f"{key}: {path} has {name} {given[name]!r}, policy.lora.{ours} makes it"
                f" {wanted[name]!r}"
            )
    targets = given.get("target_modules")
    names = set(wanted["target_modules"])
    if (isinstance(targets, list) and set(targets) != names) or targets in (None, ""):
        raise ModelError(f"{key}: {path} targets {targets!r}, policy.lora.targets {sorted(names)}")
    if isinstance(targets, str) and targets != ALL_LINEAR:
        raise ModelError(
            f"{key}: {path} has the pattern {targets!r} as target_modules, expected a list of names"
        )


def check_factors(adapters: AdapterFolder, arch: Architecture) -> None:
    """Raise ModelError unless every factor of a folder fits a matrix of the model and has its pair.

    An engine takes half an adapter without a word.
    """
    shapes = {
        name.removesuffix(".weight"): shape
        for entry in linear_entries(arch)
        for name, shape in tensor_shapes(arch, entry).items()
    }
    found = {name: tuple(factor.shape) for name, factor in adapters.factors().items()}
    if not found:
        raise ModelError(f"{adapters.key}: {adapters.path} has no adapters")
    for name, shape in found.items():
        module, _, factor = name.rpartition(".lora_")
        other = found.get(f"{module}.lora_{'B' if factor.startswith('A') else 'A'}.weight")
        if module not in shapes:
            raise ModelError(
                f"{adapters.key}: {adapters.path} has {name}, but {arch.family} has no linear layer"
                f" {module}"
            )
        if other is None:
            raise ModelError(f"{adapters.key}: {adapters.path} has {name} without its other factor")
        out, width = shapes[module]
        a, b = (shape, other) if factor.startswith("A") else (other, shape)
        if a[1:] != (width,) or b[:1] != (out,) or a[0] != b[1]:
            raise ModelError(
                f"{adapters.key}: {adapters.path} has factors {a} and {b} of {module}, whose shape"
                f" is {(out, width)}"
            )
