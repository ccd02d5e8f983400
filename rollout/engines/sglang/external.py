"""An SGLang server that the user runs, found by its URL and checked when we connect."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from rlcore.config.checks.engine import FLASH_RL, FP32_HEAD, QUANTISING
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.training import TLSConfig
from rlcore.errors import ConfigError, DeadlineExceeded, EngineFailed, UserError
from rlcore.hf_config.read import read_config
from rlcore.quantised_weights import QUANTIZATION_CONFIG
from rollout.engines.checks import folder_vocab_size
from rollout.engines.factories import ADMIN_KEY, Keys
from rollout.engines.server_client import ServerClient
from rollout.engines.sglang.entry import VERSION

POLL_S = 1.0
NO_TOKEN = (1 << 31) - 1  # in no vocabulary: the server's refusal names the vocabulary's size

logger = logging.getLogger(__name__)


class ExternalServer:
    """Has the methods of `ManagedServer`, but neither starts nor ends the server.

    Use it from one event loop.

    Args:
        fp32_head: whether the server's logits are to be in fp32; None if that is the same.
    """

    managed = False
    gpus: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        url: str,
        model_path: str,
        *,
        config: EngineConfig,
        keys: Keys,
        fp32_head: bool | None = None,
        tls: TLSConfig | None = None,
    ) -> None:
        self.name = name
        self._named_by = config.named_by
        self.url = url.rstrip("/")
        self.model_path = model_path
        self.config = config
        self.keys = keys
        self.fp32_head = fp32_head
        self.tls = tls
        # we cannot see the process
        self.ended: asyncio.Future[Any] | None = None
        self.pid: int | None = None

    async def start(self) -> str:
        """Wait until the server answers, check it, and return its URL.

        The checks cover the version of sglang, the model's type, architecture and vocabulary (its
        weights come from us), the ranks of the server, the precision of its head, and both keys.

        Raises:
            ConfigError, UserError: the server is not the configured one, or refuses our keys.
            DeadlineExceeded: it did not answer within `rollout.engine.start_timeout_s`.
        """
        client = ServerClient(self.name, self.url, self.keys, config=self.config, tls=self.tls)
        try:
            self._check_server(await self._reach(client))
            self._check_model(await client.get("/model_info"))
            await self._check_admin_key(client)
            await self._wake(client)
            await self._check_vocabulary(client)
        finally:
            await client.close()
        return self.url

    async def _reach(self, client: ServerClient) -> Any:
        loop = asyncio.get_running_loop()
        limit = self.config.start_timeout_s
        deadline = loop.time() + limit
        warn = logger.warning
        while True:
            try:
                return await client.get("/server_info")
            except EngineFailed as error:
                # The server may still be starting.
                if loop.time() + POLL_S > deadline:
                    raise DeadlineExceeded(
                        f"engine {self.name}: nothing answers at {self.url}"
                        f" (rollout.engine.start_timeout_s: {limit:g} s); is it up, and is that"
                        f" URL right ({self._named_by})? {error}"
                    ) from error
                warn("engine %s: %s; it may be starting, for %g s at most", self.name, error, limit)
                warn = logger.debug
            await asyncio.sleep(POLL_S)

    def _check_server(self, info: Any) -> None:
        version = info.get("version") if isinstance(info, dict) else None
        if version != VERSION:
            raise self._other(
                f"runs sglang {version}", f"{VERSION}; install that one where the server runs"
            )
        wanted = {"tp_size": self.config.tensor_parallel, "dp_size": 1, "pp_size": 1}
        for name, size in wanted.items():
            if info.get(name) != size:
                hint = (
                    "set rollout.engine.tensor_parallel"
                    if name == "tp_size"
                    else "give each replica's URL"
                )
                raise self._other(
                    f"has {name} {info.get(name)}", f"{size}; {hint}, or start the server so"
                )
        if self.fp32_head not in (None, bool(info.get(FP32_HEAD))):
            raise self._other(
                f"has {FP32_HEAD} {info.get(FP32_HEAD)}",
                f"{self.fp32_head}, as the trainer's head (policy.logprobs.fp32_head); start the"
                f" server {'with' if self.fp32_head else 'without'} --enable-fp32-lm-head, or"
                " change the key",
            )
        quantization = info.get("quantization")
        if self.config.quantization is not None:
            self._check_blocks(info)
        elif quantization not in QUANTISING["quantization"] and info.get("load_format") != FLASH_RL:
            raise self._other(
                f"has quantization {quantization} and load_format {info.get('load_format')}",
                "none, or fp8 with load_format flash_rl: weights are published in fp32 or bf16,"
                " which SGLang does not load into other quantised layers; rollout.engine."
                "quantization: fp8 publishes in FP8",
            )

    def _check_blocks(self, info: Mapping[str, Any]) -> None:
        """Check that the server takes FP8 by blocks, as `server_process` starts it."""
        override = info.get("json_model_override_args") or "{}"
        found = json.loads(override).get("quantization_config", {})
        wanted = QUANTIZATION_CONFIG["weight_block_size"]
        if (info.get("quantization"), found.get("weight_block_size")) != ("fp8", wanted):
            raise self._other(
                f"has quantization {info.get('quantization')} with json_model_override_args"
                f" {override}",
                f"fp8 with a quantization_config of {dict(QUANTIZATION_CONFIG)}, as `rlcore engine`"
                " starts it (rollout.engine.quantization)",
            )

    def _check_model(self, info: Any) -> None:
        ours = read_config(self.model_path)
        info = info if isinstance(info, dict) else {}
        for name in ("model_type", "architectures"):
            if info.get(name) != ours.get(name):
                raise self._other(
                    f"serves a model of {name} {info.get(name)!r} ({info.get('model_path')})",
                    f"{ours.get(name)!r}, as {self.model_path} has (model.path)",
                )

    async def _wake(self, client: ServerClient) -> None:
        """Resume a server that a trainer left paused when it died in a publication.

        A paused server would not even refuse a request.
        """
        try:
            await client.get("/ready")
            return
        # recovery: resume the server, which is harmless while it is still starting
        except EngineFailed:
            logger.warning(
                "engine %s at %s takes no requests; it is resumed, in case a trainer died in a"
                " publication. Does another trainer still use it?",
                self.name,
                self.url,
            )
        await client.post("/continue_generation", {}, limit="health_timeout_s", admin=True)

    async def _check_vocabulary(self, client: ServerClient) -> None:
        """Compare the size of the vocabulary.

        No route reports it. The refusal of a token outside it does, and generates nothing.
        """
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1},
            "token_ids_logprob": [NO_TOKEN],
        }
        refusal = "nothing: token 2147483647 was taken"
        try:
            await client.post("/generate", body, limit="health_timeout_s")
        except UserError as error:
            refusal = str(error)
        found = re.search(r"valid range is \[0, (\d+)\)", refusal)
        ours = folder_vocab_size(self.model_path)
        if found is None:
            raise self._other(f"does not report its vocabulary ({refusal})", f"one of {ours}")
        if int(found[1]) != ours:
            raise self._other(
                f"has a vocabulary of {found[1]}", f"{ours}, as {self.model_path} has (model.path)"
            )

    async def _check_admin_key(self, client: ServerClient) -> None:
        try:
            await client.get("/hicache/storage-backend", admin=True)
        except UserError as error:
            if "without one (admin-api-key)" not in str(error):
                raise
            logger.warning(
                "engine %s at %s has no admin key: whoever reaches it can replace its weights."
                " Start it with --admin-api-key and set %s here",
                self.name,
                self.url,
                ADMIN_KEY,
            )

    def _other(self, got: str, expected: str) -> ConfigError:
        return ConfigError(
            f"engine {self.name} at {self.url} ({self._named_by}) {got}, expected {expected}"
        )

    async def compiles(self) -> bool:
        """Unknown: the server may be on another machine."""
        return False

    def describe_end(self) -> str:
        """Where to look when the server is gone."""
        return f"{self.url} was not started by us: look at its own log"

    async def stop(self) -> None:
        """Do nothing: the server is the user's."""

    async def kill(self) -> None:
        """Do nothing: the server is the user's. If it does not answer, the user must restart it."""
