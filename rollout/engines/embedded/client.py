"""An embedded engine in its own process, as a `RolloutEngine` over HTTP."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from torch import Tensor

from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.training import TLSConfig
from rlcore.data.generation import (
    Completion,
    Drafts,
    GenerateRequest,
    MemoryTag,
    PauseMode,
    Prefix,
    SamplingParams,
)
from rlcore.data.sample import SamplingMasks, VersionSpan, decode_experts, encode_experts
from rlcore.deadlines import ENGINE_GRACE_S
from rlcore.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineHangs,
    InvalidAnswer,
    ModelError,
    RlcoreError,
    RunFailed,
    UserError,
)
from rlcore.weights import Bucket
from rollout.engines.checks import ExpertLayers, check_records, check_versions
from rollout.engines.child_process import Server
from rollout.engines.factories import Keys
from rollout.engines.server_client import CONTROL_BYTES, Limit, ServerClient, raise_explained
from rollout.weight_sync.base import CALLS_AT_ONCE
from rollout.weight_sync.process_group import GroupAddress

# Errors by their names at the server; any other becomes EngineFailed.
ERRORS: dict[str, type[RlcoreError]] = {
    UserError.__name__: UserError,
    ModelError.__name__: ModelError,
    DeadlineExceeded.__name__: EngineHangs,
}
COMPLETIONS_BYTES = 1 << 30  # limit of an answer with completions, and of requests at the server
PROBES = ("health", "progress")  # the verbs that `health_timeout_s` limits


class RemoteEngine:
    """`rlcore.interfaces.RolloutEngine` over a server process. Use it from one event loop.

    Args:
        key: the server's key, which every request carries.
        experts: the model's experts, if records of them are requested.
        tls: `cluster.tls`.
    """

    group_ranks = 1
    transports: tuple[str, ...] = ("distributed",)
    managed = True
    digests_weights = True
    queues_buckets = True

    def __init__(
        self,
        server: Server,
        *,
        config: EngineConfig,
        key: str,
        experts: ExpertLayers | None = None,
        tls: TLSConfig | None = None,
    ) -> None:
        self.name = server.name
        self._tls = tls
        self.config = config
        self._key = key
        self._experts = experts
        self._server = server
        self._client: ServerClient | None = None
        # Calls of `generate` in flight.
        self._generating = 0
        # of the newest weights
        self._version: int | None = None
        # The address of the process, once it was started.
        self.url = ""
        # The server's process group for weights.
        self.in_group: str | None = None

    # --- life -------------------------------------------------------------------------------------

    async def warm_up(self) -> None:
        """Let the process begin to import, if it is ours; `start` does the rest."""
        warm_up = getattr(self._server, "warm_up", None)
        if warm_up is not None:
            await warm_up()

    async def start(self) -> None:
        """Start the process. Raises RunFailed or DeadlineExceeded with the end of its log."""
        if self._client is not None:
            return
        self.url = await self._server.start()
        self.in_group = None
        self._version = None
        keys = Keys(self._key, admin="")
        self._client = VerbClient(self.name, self.url, keys, config=self.config, tls=self._tls)
        await self.health()

    async def close(self) -> None:
        """Ask the process to end, then end it."""
        await self._hang_up()
        await self._server.stop()

    async def kill(self) -> None:
        """End the process at once, even one that does not answer."""
        await self._hang_up()
        await self._server.kill()

    async def _hang_up(self) -> None:
        client = self._client
        self._client = None
        if client is not None:
            await client.close()

    @property
    def ended(self) -> asyncio.Future[Any] | None:
        """See `RolloutEngine.ended`."""
        return self._server.ended

    @property
    def pid(self) -> int | None:
        return self._server.pid

    # --- verbs ------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """See `RolloutEngine.generate`."""
        encoded = [encode_request(request) for request in requests]
        version = self._version
        self._generating += 1
        try:
            results = await self._call("generate", {"requests": encoded})
        finally:
            self._generating -= 1
        try:
            found = [[decode_completion(value) for value in completions] for completions in results]
            for request, completions in zip(requests, found):
                for place, completion in enumerate(completions):
                    check_records(completion, request, place, self._experts)
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise InvalidAnswer(
                f"engine {self.name}: /generate was answered with nonsense: {error!r}"
            ) from error
        check_versions(self.name, found, version, self._version)
        return found

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`."""
        await self._call("pause", {"mode": mode})

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self._call("resume")

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.abort`."""
        await self._call("abort", {"rids": None if rids is None else list(rids)})

    async def progress(self) -> int | None:
        """See `RolloutEngine.progress`."""
        steps: int | None = await self._call("progress")
        return steps

    async def join_group(self, address: GroupAddress, rank: int) -> None:
        """Enter a process group for weights, leaving the last one. Returns when it is complete."""
        await self._call("join_group", {"address": address, "rank": rank})
        self.in_group = address.name

    async def begin_update(self, buckets: Sequence[Bucket]) -> None:
        """See `RolloutEngine.begin_update`."""
        await self._call("begin_update", {"buckets": list(buckets)})

    async def receive_bucket(
        self, index: int, flat: Tensor | None, order: str | None = None
    ) -> None:
        """Receive a bucket over the process group; `flat` must be None.

        Returns when the bucket is in the model.
        """
        if flat is not None:
            raise RunFailed(
                f"engine {self.name} is another process: it takes buckets over the process group"
            )
        await self._call("receive_bucket", {"index": index, "order": order})

    async def received_digests(self) -> list[str]:
        """See `rollout.weight_sync.distributed.DistributedTransport`."""
        return [str(await self._call("received_digest"))]

    async def end_update(self) -> None:
        """See `RolloutEngine.end_update`."""
        await self._call("end_update")

    async def set_version(self, version: int) -> None:
        """See `RolloutEngine.set_version`."""
        await self._call("set_version", {"version": version})
        self._version = version

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """See `RolloutEngine.release_memory`."""
        await self._call("release_memory", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """See `RolloutEngine.resume_memory`."""
        await self._call("resume_memory", {"tags": list(tags)})

    async def health(self) -> dict[str, Any]:
        """See `RolloutEngine.health`; here with pid, device and gpu (its identity, or None) too."""
        health: dict[str, Any] = await self._call("health")
        return health

    # --- HTTP -------------------------------------------------------------------------------------

    async def _call(self, verb: str, body: dict[str, Any] | None = None) -> Any:
        """Return the result of a verb.

        Raises the server's own error, EngineFailed if it died or its answer is bad, EngineHangs.
        """
        if self._client is None:
            raise EngineFailed(f"engine {self.name} does not run (asked to {verb}); start it first")
        limit: Limit | None = "health_timeout_s" if verb in PROBES else "update_timeout_s"
        if verb == "generate" or (verb == "pause" and self._generating):
            # The call takes as long as its requests, whose time the caller limits.
            limit = None
        try:
            answer = await self._client.post(
                f"/{verb}",
                body or {},
                limit=limit,
                times=CALLS_AT_ONCE if verb == "receive_bucket" else 1,
                answer_bytes=COMPLETIONS_BYTES if verb == "generate" else CONTROL_BYTES,
            )
            return answer["result"]
        except EngineFailed as error:
            # With a cause, the connection broke; without one, the server has answered.
            if error.__cause__ is None:
                raise
            await raise_explained(error, self._server)
        except (LookupError, TypeError) as error:
            said = f"/{verb} was answered with nonsense (HTTP 200): {str(answer)[:80]!r}"
            raise EngineFailed(f"engine {self.name}: {said}") from error


class VerbClient(ServerClient):
    """Raises the errors of an embedded engine's server as what they are there."""

    # The server ends a control call itself, with the reason.
    grace_s = ENGINE_GRACE_S

    def _refusal(self, route: str, status: int, content: bytes) -> RlcoreError:
        try:
            answer = orjson.loads(content)
            kind = ERRORS.get(answer["type"], EngineFailed)
            text = str(answer["error"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            kind = EngineFailed
            text = f"{route} was answered with nonsense (HTTP {status}): {content[:80]!r}"
        return kind(text if self.name in text else f"engine {self.name}: {text}")


# --- requests and answers as JSON -----------------------------------------------------------------
# Arrays are base64, little-endian. The server (server.py) reads and writes the same.


def encode_array(array: NDArray[Any], dtype: str) -> str:
    """Encode an array as text."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()


def decode_array(text: str, dtype: str) -> NDArray[Any]:
    """Decode the text of `encode_array`."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype).astype(
        dtype[1:], copy=True
    )


def encode_request(request: GenerateRequest) -> dict[str, Any]:
    """Encode a request."""
    prefixes = [[prefix.sample, encode_array(prefix.tokens, "<i4")] for prefix in request.prefixes]
    return asdict(replace(request, prefixes=())) | {
        "prompt": encode_array(request.prompt, "<i4"),
        "prefixes": prefixes,
    }


def decode_request(value: dict[str, Any]) -> GenerateRequest:
    """Decode the value of `encode_request`."""
    sampling = dict(value["sampling"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    sampling["stop"] = tuple(sampling["stop"])
    prefixes = tuple(
        Prefix(sample, decode_array(tokens, "<i4")) for sample, tokens in value["prefixes"]
    )
    prompt = decode_array(value["prompt"], "<i4")
    return GenerateRequest(
        **value | {"prompt": prompt, "sampling": SamplingParams(**sampling), "prefixes": prefixes}
    )


def encode_completion(completion: Completion) -> dict[str, Any]:
    """Encode a completion."""
    mask = completion.sampling_mask
    routed = completion.routed_experts
    return {
        "tokens": encode_array(completion.tokens, "<i4"),
        "logprobs": encode_array(completion.logprobs, "<f4"),
        "finish_reason": completion.finish_reason,
        "versions": [[span.version, span.start, span.end] for span in completion.versions],
        "keep_sets": (
            mask
            and {
                "tokens": encode_array(mask.tokens, "<i4"),
                "counts": encode_array(mask.counts, "<i4"),
            }
        ),
        "routed_experts": None if routed is None else encode_experts(routed),
        "cached_tokens": completion.cached_tokens,
        "drafts": None if completion.drafts is None else asdict(completion.drafts),
    }


def decode_completion(value: dict[str, Any]) -> Completion:
    """Decode the value of `encode_completion`."""
    mask = value["keep_sets"]
    routed = value["routed_experts"]
    drafts = value["drafts"]
    spans = value["versions"]
    if not all(type(number) is int for span in spans for number in span):
        raise ValueError(f"version spans {str(spans)[:80]}, expected whole numbers")
    return Completion(
        decode_array(value["tokens"], "<i4"),
        decode_array(value["logprobs"], "<f4"),
        value["finish_reason"],
        tuple(VersionSpan(*span) for span in spans),
        None
        if mask is None
        else SamplingMasks(
            decode_array(mask["tokens"], "<i4"), decode_array(mask["counts"], "<i4")
        ),
        None if routed is None else decode_experts(routed),
        value["cached_tokens"],
        None if drafts is None else Drafts(**drafts),
    )
