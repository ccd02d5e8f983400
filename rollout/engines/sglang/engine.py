"""One SGLang server as a `RolloutEngine`: each step of a publication calls a route of the server.

The order of the calls follows from how the server behaves. Weights take effect bucket by bucket,
and no route detects a missing bucket: `WeightState` does. The server refuses to flush its cache
while requests run, so the flush comes last. After an `in_place` pause there is no flush: the cache
is keyed by the version under which a request began. The version is set at the very end, since the
server then stamps tokens with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rlcore.adapter_folder import AdapterFolder
from rlcore.config.sections.policy import LoraConfig
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.training import TLSConfig
from rlcore.data.generation import Completion, GenerateRequest, MemoryTag, PauseMode
from rlcore.errors import EngineFailed, EngineHangs, RlcoreError, UserError
from rlcore.weights import Bucket, TensorSpec, are_factors
from rollout.asyncio_utils import gather_or_cancel, within
from rollout.engines.checks import check_versions
from rollout.engines.child_process import Server
from rollout.engines.factories import Keys
from rollout.engines.server_client import ServerClient, raise_explained
from rollout.engines.sglang import patches
from rollout.engines.sglang.adapters import AdapterVersions
from rollout.engines.sglang.answers import MARK, no_sglang, read_digests, version_name
from rollout.engines.sglang.generation import Generation, Under
from rollout.engines.sglang.pause_gate import PauseGate
from rollout.weight_sync.adapter import PackedAdapter
from rollout.weight_sync.base import CALLS_AT_ONCE
from rollout.weight_sync.process_group import GroupAddress
from rollout.weight_sync.version_state import WeightState

# The next abort ends a request that reached the server after this one.
ABORT_AGAIN_S = 0.2
# Counters of /v1/loads that change only when the scheduler has run a batch.
COUNTERS = ("decode_moments", "total_prefill_uncached_tokens", "num_used_tokens")
# Sent to each route that loads weights.
KEEP_REQUESTS = {"flush_cache": False, "abort_all_requests": False}


class SGLangEngine:
    """`rlcore.interfaces.RolloutEngine`. Use it from one event loop.

    Args:
        server: starts and ends the process, or connects to a running one.
        model_path: the Hugging Face folder that the trainer started from.
        mark: the names of this trainer's versions end with it.
        tls: `cluster.tls`.
        lora: the adapters of a run that publishes them.
        policies: `rollout.policies`.
        trains_draft: publications have the layers with which the server drafts.
    """

    transports: tuple[str, ...] = ("distributed", "tensor", "disk", "delta")
    adapter_transports: tuple[str, ...] = ("adapter",)

    def __init__(
        self,
        server: Server,
        *,
        config: EngineConfig,
        keys: Keys,
        model_path: str,
        mark: str = MARK,
        tls: TLSConfig | None = None,
        lora: LoraConfig | None = None,
        policies: Mapping[str, AdapterFolder] = MappingProxyType({}),
        trains_draft: bool = False,
    ) -> None:
        self.server = server
        self._mark = mark
        self.config = config
        self.model_path = model_path
        self.name = server.name
        self.managed = server.managed
        self.group_ranks = config.tensor_parallel
        self.weights = WeightState(self.name)
        self._keys = keys
        self._tls = tls
        self._lora = lora
        self._policies = policies
        # Another draft keeps its weights, which may have the policy's names.
        self._loading = {"selector": "all" if trains_draft else "target"}
        self._adapters: AdapterVersions | None = None
        # Whether the open update is one of adapters.
        self._adapts = False
        self._pause_gate = PauseGate()
        self._client: ServerClient | None = None
        # None unless requests go through the user's router.
        self._router: ServerClient | None = None
        self._generation: Generation | None = None
        # The server's device, "cpu" or "cuda".
        self._device = ""
        self._mode: PauseMode | None = None
        # The server's process group, on this connection and on any.
        self.in_group: str | None = None
        self._server_group: str | None = None
        # Whether the server digests received weights, and orders calls of buckets: one of ours, or
        # of `rlcore engine`.
        self.digests_weights = self.queues_buckets = False

    # --- life -------------------------------------------------------------------------------------

    @property
    def ended(self) -> asyncio.Future[Any] | None:
        return self.server.ended

    async def start(self) -> None:
        """Start the server, unless it runs, and connect to it.

        Raises RunFailed or DeadlineExceeded with the last lines of the server's log, EngineFailed
        if the server is not sglang 0.5.23.
        """
        if self._client is not None:
            return
        url = await self.server.start()
        client = ServerClient(self.name, url, self._keys, config=self.config, tls=self._tls)
        self.weights = WeightState(self.name)
        self._mode = None
        self._pause_gate.open()
        self._client = client
        if self._lora is not None:
            self._adapters = AdapterVersions(self._lora, self._policies, self._control, self._mark)
        self._generation = await Generation.connect(client, self.model_path, mark=self._mark)
        if self.config.router_url is not None:
            name = f"{self.name} behind rollout.engine.router_url"
            self._router = ServerClient(
                name, self.config.router_url, self._keys, config=self.config, tls=self._tls
            )
            self._generation = Generation(
                self._router, self._generation.limits, through_router=True, mark=self._mark
            )
        info = await self._running.get("/server_info")
        try:
            self._device = str(info["device"])
            # A router's answer has no internal states.
            states = info.get("internal_states") or [{}]
            self.digests_weights = patches.HAS_DIGESTS in states[0]
            self.queues_buckets = patches.HAS_TURNS in states[0]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise no_sglang(self.name, error) from error

    @property
    def max_total_tokens(self) -> int | None:
        """The most tokens of prompt and response: of the context, or of a smaller KV pool."""
        return None if self._generation is None else self._generation.limits.total_tokens

    async def kill(self) -> None:
        """End the server at once. Calls in flight fail."""
        await self._leave()
        await self.server.kill()

    async def close(self) -> None:
        """Ask the server to end; the user's server only leaves its group. Calls in flight fail."""
        if not self.managed:
            # recovery: the server keeps the group's memory until it ends
            with suppress(RlcoreError):
                await within(self.config.health_timeout_s, self._leave_group(), lambda: "")
        await self._leave()
        await self.server.stop()

    async def _leave(self) -> None:
        if self._adapters is not None:
            await self._adapters.close()
        clients = (self._client, self._router)
        self._client = self._router = None
        self.in_group = None
        for client in clients:
            if client is not None:
                await client.close()

    async def health(self) -> dict[str, Any]:
        """Return name, version (None without whole weights), device and gpu.

        `gpu` is None on the CPU, and if the trainer uses the same one. The route is one that the
        scheduler itself must answer, paused or not: SGLang's /health would generate a token.
        """
        try:
            await self._running.get("/server_info")
        except EngineFailed as error:
            # The scheduler answers nothing while it builds a kernel, at the kernel's first use.
            if not await self.server.compiles():
                await raise_explained(error, self.server)
        version = self.weights.version if self.weights.state == "ready" else None
        own_gpu = self._device == "cuda" and not self.config.colocated
        gpu = f"of engine {self.name}" if own_gpu else None
        found = {"name": self.name, "version": version, "base": self.weights.holds_base}
        return {**found, "device": self._device, "gpu": gpu}

    # --- generation -------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """Return `n` completions a request, in order.

        Raises UserError for a request that cannot be served, EngineFailed if the engine failed.
        """
        try:
            async with self._pause_gate:
                oldest = self.weights.require_ready()
                if self._generation is None:
                    raise EngineFailed(f"engine {self.name} does not run; start it first")
                # The adapters of now, whatever is published before the answer.
                names = {} if self._adapters is None else self._adapters.names
                calls = [
                    self._generation.one(each, Under.of(each, oldest, names), self._policies)
                    for each in requests
                ]
                # The dispatcher sends one at a time: a task would cost half as much as the call.
                answers = [await calls[0]] if len(calls) == 1 else await gather_or_cancel(*calls)
        except EngineFailed as error:
            await raise_explained(error, self.server)
        # Behind a router another engine may have answered.
        if self._router is None:
            check_versions(self.name, answers, oldest, self.weights.version)
        return answers

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        """End the requests of these ids, or all. Behind a router, ids have no effect."""
        if rids is None:
            await self._control("/abort_request", {"rid": "", "abort_all": True})
        elif self._generation is not None and self._router is None:
            sent = [name for rid in rids for name in self._generation.sent(rid)]
            bodies = ({"rid": name, "abort_all": False} for name in sent)
            await gather_or_cancel(*(self._control("/abort_request", body) for body in bodies))

    async def progress(self) -> Any:
        """Return what the scheduler has done so far, which it reports every 15 decoding steps.

        None while paused, behind a router (requests may be at other engines), and where the server
        publishes no load.
        """
        if self._mode is not None or self._router is not None:
            return None
        loads = (await self._running.get("/v1/loads?include=core"))["loads"]
        return [[load[name] for name in COUNTERS] for load in loads] or None

    # --- pause ------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Stop generation and return when it has stopped. New requests wait until `resume`.

        `drain` lets the requests in flight finish, `abort` ends them. After `resume`, `retract`
        makes the server compute their keys and values again, and `in_place` keeps the old ones. A
        second pause does nothing.
        """
        self._pause_gate.close()
        if mode == "drain":
            await self._pause_gate.emptied()
        elif mode == "abort":
            await self._abort_all()
        # Those under an adapter go on, unless the pause is to free the server's memory.
        adapts = self._adapters is not None and self.weights.holds_base
        if not adapts or self.config.colocated:
            server_mode = "in_place" if mode == "in_place" else "retract"
            await self._control("/pause_generation", {"mode": server_mode})
        self._mode = mode

    async def _abort_all(self) -> None:
        """Abort until no request is in flight. Raises EngineHangs when requests do not end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.update_timeout_s
        while self._pause_gate.inside:
            if loop.time() > deadline:
                raise EngineHangs(
                    f"engine {self.name} did not end its requests within"
                    f" {self.config.update_timeout_s:g} s (rollout.engine.update_timeout_s)"
                )
            await self.abort()
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self._pause_gate.emptied()

    async def resume(self) -> None:
        """Continue generation. Raises EngineFailed unless the weights have a version."""
        self.weights.require_ready()
        # It was paused for the base, if not for the adapters.
        await self._control("/continue_generation", {})
        self._mode = None
        self._pause_gate.open()

    # --- weights ----------------------------------------------------------------------------------

    async def begin_update(self, buckets: Sequence[Bucket]) -> None:
        """Open an update. Raises EngineFailed unless the engine is paused."""
        if self._mode is None:
            raise EngineFailed(
                f"engine {self.name}: weights can be updated only while it is paused; call pause"
                " first"
            )
        self.weights.begin(buckets)
        specs = [spec for bucket in buckets for spec in bucket.tensors]
        self._adapts = self._adapters is not None and are_factors(specs)
        if self._adapts:
            return
        if self._adapters is not None:
            self._adapters.forget()
        try:
            await self._control("/begin_weight_update", self._loading)
        except EngineHangs:
            raise
        # recovery: close the update that a dead trainer has left open
        except EngineFailed:
            await self._control("/end_weight_update", {})
            await self._control("/begin_weight_update", self._loading)

    async def join_group(self, address: GroupAddress, rank: int) -> None:
        """See `rollout.weight_sync.distributed.DistributedTransport`."""
        # recovery: a restarted server is in no group
        with suppress(EngineFailed):
            await self._leave_group()
        self.in_group = self._server_group = address.name
        await self._control(
            "/init_weights_update_group",
            {
                "master_address": address.host,
                "master_port": address.port,
                "rank_offset": rank,
                "world_size": address.world_size,
                "group_name": address.name,
                "backend": address.backend,
            },
        )

    async def _leave_group(self) -> None:
        if (name := self._server_group) is not None:
            await self._control("/destroy_weights_update_group", {"group_name": name})

    async def receive_bucket(
        self, index: int, flat: Tensor | None, order: str | None = None
    ) -> None:
        """Take bucket `index` over the process group, and load it; `flat` must be None."""
        if flat is not None:
            raise EngineFailed(
                f"engine {self.name} is another process: it takes buckets over the process group"
            )
        specs = self.weights.bucket(index).tensors
        load_format = patches.LOAD_FORMAT if order is None else patches.ORDERED + order
        if self.queues_buckets:
            load_format += f"{patches.TURN}{index}"
        times = CALLS_AT_ONCE if self.queues_buckets else 1
        await self._receive(specs, load_format, times)
        self.weights.received(index)

    async def _receive(self, specs: Sequence[TensorSpec], load_format: str, times: int = 1) -> Any:
        body = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": self.in_group,
            "load_format": load_format,
            **KEEP_REQUESTS,
            **self._loading,
        }
        return await self._control("/update_weights_from_distributed", body, times=times)

    async def received_digests(self) -> list[str]:
        """See `rollout.weight_sync.distributed.DistributedTransport`."""
        return read_digests(self.name, await self._receive((), patches.DIGESTS))

    async def receive_serialized(self, index: int, payloads: Sequence[str]) -> None:
        """Take bucket `index` in the request's body: one payload for each tensor-parallel rank."""
        self.weights.bucket(index)
        await self._control(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": list(payloads),
                "load_format": patches.LOAD_FORMAT,
                **KEEP_REQUESTS,
                **self._loading,
            },
        )
        self.weights.received(index)

    async def receive_adapter(self, index: int, packed: PackedAdapter) -> None:
        """Take the adapters of a publication; they are loaded when they get a version."""
        if self._adapters is None or len(self.weights.open_buckets()) > 1:
            raise EngineFailed(f"engine {self.name} takes no adapters, or takes them in one bucket")
        self._adapters.receive(packed)
        self.weights.received(index)

    async def load_folder(self, folder: Path) -> None:
        """Load all weights from a Hugging Face folder.

        The server's machine must have it under the same path.
        """
        # Raises EngineFailed if no update is open.
        self.weights.open_buckets()
        await self._control(
            "/update_weights_from_disk",
            {"model_path": str(folder), "load_format": "safetensors", **KEEP_REQUESTS},
        )
        self.weights.received_all()

    async def end_update(self) -> None:
        """Close the update. Raises EngineFailed, and stays stale, if a bucket is missing."""
        self.weights.check_whole()
        if not self._adapts:
            await self._control("/end_weight_update", {})
        self.weights.end()

    async def set_version(self, version: int) -> None:
        """Stamp all further tokens with `version`, and flush the cache unless paused in_place."""
        self.weights.check_version(version)
        if self._adapters is not None:
            await self._adapters.load(version, self.config.tensor_parallel)
            self.weights.set_version(version)
            return
        if self._mode != "in_place":
            await self._control("/flush_cache", {})
        name = version_name(version, self._mark)
        await self._control(
            "/update_weight_version", {"new_version": name, "abort_all_requests": False}
        )
        self.weights.set_version(version)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The names of its GPUs, one a tensor-parallel rank; () where we do not know them."""
        return self.server.gpus

    @property
    def url(self) -> str:
        """The server's URL. Raises EngineFailed if it does not run."""
        return self._running.url

    # --- memory -----------------------------------------------------------------------------------

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Give device memory back.

        Raises EngineFailed unless the engine is paused and has no requests: a request would end the
        server's scheduler.
        """
        if self._mode in (None, "in_place"):
            raise EngineFailed(
                f"engine {self.name}: memory can be released only while it is paused, and not"
                " in_place"
            )
        await self._control("/release_memory_occupation", {"tags": list(tags)})
        if "weights" in tags:
            self.weights.release()

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take device memory again. Released weights must be published again."""
        await self._control("/resume_memory_occupation", {"tags": list(tags)})
        if "weights" in tags:
            self.weights.restore()

    # --- routes -----------------------------------------------------------------------------------

    @property
    def _running(self) -> ServerClient:
        if self._client is None:
            raise EngineFailed(f"engine {self.name} does not run; start it first")
        return self._client

    async def _control(self, route: str, body: dict[str, Any], *, times: int = 1) -> Any:
        """Call a control route. Raises EngineFailed with the server's own words if it refuses.

        Args:
            times: so many calls, one after the other, have this one's limit.
        """
        try:
            answer = await self._running.post(route, body, times=times, admin=True)
        # A 4xx of a control route blames the engine's state, not the user's input.
        except UserError as error:
            raise EngineFailed(str(error)) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineFailed(f"engine {self.name} refused {route}: {answer.get('message')}")
        return answer
