"""A PEFT folder: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

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


def read_settings(folder: Path, key: str) -> dict[str, Any]:
    """Return the settings of a PEFT folder.

    Args:
        key: the configuration key with the folder, for messages.

    Raises ModelError if they cannot be read, or ask for another product than `alpha / rank * B A`.
    """
    path = folder / SETTINGS_FILE
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{key}: {path} cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise ModelError(f"{key}: {path} has no settings: expected a JSON object")
    for name, allowed in _FIXED.items():
        if given.get(name, allowed[0]) not in allowed:
            raise ModelError(f"{key}: {path} has {name} {given[name]!r}, expected {allowed[0]!r}")
    return given


def read_policies(policies: Mapping[str, str]) -> dict[str, AdapterFolder]:
    """Read the settings of `rollout.policies`. Raises ModelError as `AdapterFolder.read`."""
    return {
        name: AdapterFolder.read(path, f"rollout.policies.{name}")
        for name, path in policies.items()
    }


@dataclass(frozen=True)
class AdapterFolder:
    """The settings of adapters that engines serve as they are.

    Attributes:
        targets: the last parts of the names of the adapted matrices.
        base: the weights below, as the folder names them.
    """

    path: Path
    key: str
    rank: int  # the largest
    alpha: float
    targets: tuple[str, ...]
    base: str = ""

    @classmethod
    def read(cls, path: str, key: str) -> AdapterFolder:
        """Read the settings of a PEFT folder.

        Raises ModelError for settings or targets that engines do not take.
        """
        folder = Path(path)
        given = read_settings(folder, key)
        rank: Any = given.get("r")
        alpha: Any = given.get("lora_alpha")
        targets: Any = given.get("target_modules")
        ranks: Any = given.get("rank_pattern") or {}
        for name, value, fits, wanted in (
            ("r", rank, isinstance(rank, int) and rank > 0, "a whole number from 1"),
            ("lora_alpha", alpha, isinstance(alpha, int | float), "a number"),
            ("rank_pattern", ranks, isinstance(ranks, dict), "ranks by name"),
            ("target_modules", targets, isinstance(targets, list) and targets, "a list of names"),
        ):
            if not fits:
                raise ModelError(
                    f"{key}: {folder / SETTINGS_FILE} has {name} {value!r}, expected {wanted}"
                )
        base = str(given.get("base_model_name_or_path") or "")
        return cls(folder, key, max((rank, *ranks.values())), float(alpha), tuple(targets), base)

    def factors(self) -> dict[str, Tensor]:
        """Read A and B of every matrix, by `<matrix>.lora_A.weight` and `lora_B`.

        Raises ModelError if the file cannot be read or holds anything else.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from rlcore.weights import FACTORS, PEFT_PREFIX

        path = self.path / ADAPTER_FILE
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.key}: {path} cannot be read: {error}") from error
        for name in found:
            if not (name.startswith(PEFT_PREFIX) and name.endswith(FACTORS)):
                raise ModelError(
                    f"{self.key}: {path} has a tensor {name!r}, expected"
                    f" {PEFT_PREFIX}<matrix>{FACTORS[0]} or {FACTORS[1]}"
                )
        return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in found.items()}
