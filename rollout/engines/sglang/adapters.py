"""The versions of a policy's adapters at one SGLang server: each is an adapter of its own name.

A request names the adapter that it was sent under and keeps it to its end, whatever is published
meanwhile, and SGLang shares no keys and values between adapters. So a publication needs neither a
flush nor a pause. An old version is unloaded when its last request has ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from rlcore.config.sections.policy import LoraConfig
from rlcore.errors import EngineFailed, RlcoreError
from rollout.weight_sync.adapter import PackedAdapter

Control = Callable[[str, dict[str, Any]], Awaitable[Any]]

POLICY = "policy-"
"""How the names of our adapters begin."""

logger = logging.getLogger(__name__)


def server_arguments(lora: LoraConfig, device: str) -> dict[str, Any]:
    """The arguments of a server that takes the adapters of a run.

    Two versions may be in one batch, and requests without an adapter count as one more.
    """
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": max(lora.rank, lora.expert_rank or 0),
        "lora_target_modules": ["all"] if "all-linear" in lora.targets else list(lora.targets),
        "max_loras_per_batch": 3,
    }
    # The others are kernels for GPUs.
    return arguments | ({"lora_backend": "torch_native"} if device == "cpu" else {})


class AdapterVersions:
    """Loads, names and unloads the versions.

    Args:
        control: calls a control route of the server.
        mark: the names end with it.
    """

    def __init__(self, lora: LoraConfig, control: Control, mark: str) -> None:
        self._lora = lora
        self._control = control
        self._mark = mark
        self._received: PackedAdapter | None = None
        # By name.
        self._unloading: dict[str, asyncio.Task[None]] = {}
        # The adapter of new requests; None before the first version.
        self.name: str | None = None

    def receive(self, packed: PackedAdapter) -> None:
        """Keep the adapters of an update, until they get a version."""
        self._received = packed

    async def load(self, version: int, ranks: int) -> None:
        """Load what was received as a version, for new requests; unload all older ones.

        A name is never used again: a server may still have a version that was given up.

        Args:
            ranks: the server's tensor-parallel ranks.
        """
        if self._received is None:
            raise EngineFailed(f"version {version}: no adapters were received")
        packed = self._received
        modules = {name.split(".lora_")[0].rpartition(".")[2] for name in packed.checksums}
        name = f"{POLICY}{version}{self._mark}.{secrets.token_hex(3)}"
        answer = await self._control(
            "/load_lora_adapter_from_tensors",
            {
                "lora_name": name,
                "config_dict": {
                    "peft_type": "LORA",
                    "r": packed.rank,
                    "lora_alpha": self._lora.alpha,
                    "target_modules": sorted(modules),
                    "bias": "none",
                },
                "serialized_named_tensors": [packed.payload] * ranks,
                "expected_checksums": dict(packed.checksums),
            },
        )
        self._received = None
        self.name = name
        for other in answer.get("loaded_adapters") or ():
            if other.startswith(POLICY) and other != name and other not in self._unloading:
                self._unloading[other] = asyncio.ensure_future(self._unload(other))

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
