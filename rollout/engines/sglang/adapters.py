"""The versions of a policy's adapters at one SGLang server: each is an adapter of its own name.

A request names the adapter that it was sent under and keeps it to its end, whatever is published
meanwhile, and SGLang shares no keys and values between adapters. So a publication needs neither a
flush nor a pause. An old version is unloaded when its last request has ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from rlcore.adapter_folder import AdapterFolder
from rlcore.config.sections.policy import LoraConfig
from rlcore.errors import EngineFailed, RlcoreError
from rollout.engines.checks import ExpertLayers, language_config
from rollout.weight_sync.adapter import PackedAdapter, pack

Control = Callable[[str, dict[str, Any]], Awaitable[Any]]

POLICY = "policy-"
"""How the names of our adapters begin."""

logger = logging.getLogger(__name__)


def linear_layers(model: str) -> set[str]:
    """The names of all linear layers of a Hugging Face folder's model but head and routers.

    SGLang's own "all" includes the head. It computes a head that may have adapters by a layer of
    its own, in bf16 even with `enable_fp32_lm_head`.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(language_config(model), trust_remote_code=False)
    names = {
        name.rpartition(".")[2]
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    experts = set() if ExpertLayers.of(model) is None else {"gate_proj", "up_proj", "down_proj"}
    return {name for name in names if name.endswith(("_proj", "_mqa"))} | experts


def server_arguments(
    lora: LoraConfig, device: str, model: str, policies: Collection[AdapterFolder] = ()
) -> dict[str, Any]:
    """The arguments of a server that takes the adapters of a run, and its frozen policies.

    Two versions may be in one batch, and requests without an adapter count as one more.
    """
    targets = {*lora.targets, *(name for folder in policies for name in folder.targets)}
    if "all-linear" in targets:
        targets = (targets - {"all-linear"}) | linear_layers(model)
    ranks = [lora.rank, lora.expert_rank or 0, *(folder.rank for folder in policies)]
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": max(ranks),
        "lora_target_modules": sorted(targets),
        "max_loras_per_batch": 3 + len(policies),
    }
    # The others are kernels for GPUs.
    return arguments | ({"lora_backend": "torch_native"} if device == "cpu" else {})


class AdapterVersions:
    """Loads, names and unloads the versions, and the frozen policies beside them.

    Args:
        policies: `rollout.policies`.
        control: calls a control route of the server.
        mark: the names end with it.
    """

    def __init__(
        self, lora: LoraConfig, policies: Mapping[str, AdapterFolder], control: Control, mark: str
    ) -> None:
        self._lora = lora
        self._policies = policies
        self._control = control
        self._mark = mark
        self._received: PackedAdapter | None = None
        # By name.
        self._unloading: dict[str, asyncio.Task[None]] = {}
        # The adapter of new requests by policy, the trained one under None.
        self.names: dict[str | None, str] = {}

    def receive(self, packed: PackedAdapter) -> None:
        """Keep the adapters of an update, until they get a version."""
        self._received = packed

    def forget(self) -> None:
        """Load everything again: the weights below are on their way."""
        self.names.clear()

    async def load(self, version: int, ranks: int) -> None:
        """Load what was received as a version, for new requests; unload all older ones.

        Args:
            ranks: the server's tensor-parallel ranks.
        """
        if self._received is None:
            raise EngineFailed(f"version {version}: no adapters were received")
        for name, folder in self._policies.items():
            if name not in self.names:
                packed = await asyncio.to_thread(_packed, folder)
                self.names[name], _ = await self._load(name, packed, folder.alpha, ranks)
        name, loaded = await self._load(
            str(version), self._received, float(self._lora.alpha), ranks
        )
        self._received = None
        self.names[None] = name
        kept = {*self.names.values(), *self._unloading}
        for other in loaded:
            if other.startswith(POLICY) and other not in kept:
                self._unloading[other] = asyncio.ensure_future(self._unload(other))

    async def _load(
        self, title: str, packed: PackedAdapter, alpha: float, ranks: int
    ) -> tuple[str, Sequence[str]]:
        """Load adapters under a name of their own; return it, and all names at the server.

        A name is never used again: a server may still have a version that was given up.
        """
        modules = {name.split(".lora_")[0].rpartition(".")[2] for name in packed.checksums}
        name = f"{POLICY}{title}{self._mark}.{secrets.token_hex(3)}"
        answer = await self._control(
            "/load_lora_adapter_from_tensors",
            {
                "lora_name": name,
                "config_dict": {
                    "peft_type": "LORA",
                    "r": packed.rank,
                    "lora_alpha": alpha,
                    "target_modules": sorted(modules),
                    "bias": "none",
                },
                "serialized_named_tensors": [packed.payload] * ranks,
                "expected_checksums": dict(packed.checksums),
            },
        )
        return name, answer.get("loaded_adapters") or ()

    async def _unload(self, name: str) -> None:
        """Unload a version; the server first waits for its requests."""
        try:
            await self._control("/unload_lora_adapter", {"lora_name": name})
        # A version too many takes memory, and ends with the server.
        except RlcoreError as error:
            logger.warning("adapter %s was not unloaded: %s", name, error)
        finally:
            self._unloading.pop(name, None)

    async def close(self) -> None:
        """Give up unloading."""
        tasks = list(self._unloading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _packed(folder: AdapterFolder) -> PackedAdapter:
    """Read and pack a policy's factors, which takes as long as its file is large."""
    return pack(folder.factors())
