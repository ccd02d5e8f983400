"""Requests to one SGLang server: token ids in, token ids out.

The `n` samples of a prompt are separate requests in one call: each has its own id, by which it can
be aborted, and its own random numbers (which SGLang uses only under
`enable_deterministic_inference`). A long prompt is computed once, by an earlier request for no
tokens: the samples then find its keys and values in the server's cache.

A request beyond the server's limits is refused here, before it is sent. A token outside the
vocabulary would end the server. A request that exceeds its memory would be silently truncated.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data.generation import STOP_MARGIN, Completion, GenerateRequest, SamplingParams
from rlcore.data.sample import SamplingMasks
from rlcore.errors import EngineFailed, UserError
from rollout.asyncio_utils import gather_or_cancel
from rollout.engines.checks import check_request as check_common
from rollout.engines.server_client import ServerClient
from rollout.engines.sglang.answers import Limits, answer_bytes, asks_sampling_mask, decode

MIN_TEMPERATURE = 1e-6  # below it SGLang decodes greedily
MAX_STOP_STRINGS = 32
STOP_PATTERN_BYTES = 256
SHARED_PROMPT_TOKENS = 64  # a prompt of this length is computed once for all its samples

# All of these are sent, since a server may have other defaults.
NEUTRAL = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "no_stop_trim": True,
}


@dataclass(frozen=True)
class Under:
    """What a request is computed under.

    Attributes:
        cache_key: requests share keys and values only if they have the same cache key.
        adapter: the name of a loaded adapter. SGLang would look for another one on the hub.
        version: the adapter's; the server names versions of its whole weights alone.
    """

    cache_key: str | None = None
    adapter: str | None = None
    version: int | None = None

    @classmethod
    def of(cls, request: GenerateRequest, version: int, names: Mapping[str | None, str]) -> Under:
        """What a request begins under; `names`: the loaded adapters by policy."""
        return cls(str(version), names.get(request.policy), version if names else None)

    def body(self) -> dict[str, Any]:
        """The entries of /generate."""
        adapter = {} if self.adapter is None else {"lora_path": self.adapter}
        return {"extra_key": self.cache_key, **adapter}


PLAIN = Under()


class Generation:
    """Generates at one server, over a client that the caller opens and closes.

    Every attempt has its own ids, so the same request may be sent again at any time, here or to
    another engine. Tokens of an earlier attempt are dropped.
    """

    def __init__(
        self, client: ServerClient, limits: Limits, *, through_router: bool = False, mark: str = ""
    ) -> None:
        self.client = client
        self.limits = limits
        # The ending of our versions' names.
        self.mark = mark
        self.through_router = through_router
        # Distinguishes our requests from those of other clients and of earlier processes.
        self._life = secrets.token_hex(4)
        self._attempts = itertools.count()
        # Request id -> ids of its samples at the server.
        self._sent: dict[str, list[str]] = {}

    @classmethod
    async def connect(cls, client: ServerClient, model_path: str, *, mark: str = "") -> Generation:
        """Ask a running server, which serves the model in `model_path`, for its limits.

        Raises EngineFailed if it is not sglang 0.5.23.
        """
        info = await client.get("/server_info")
        limits = await asyncio.to_thread(Limits.of, info, model_path, client.name)
        return cls(client, limits, mark=mark)

    async def one(
        self, request: GenerateRequest, under: Under = PLAIN, policies: Collection[str] = ()
    ) -> list[Completion]:
        """Return the `n` completions of a request, in order.

        Responses that are too long to continue here count as aborted.

        Args:
            policies: the names of frozen policies that the server has.

        Raises:
            UserError: the server cannot serve the request. Either nothing was sent, or the message
                is the server's.
            EngineFailed: the server died, hangs, or returned an invalid completion.
        """
        check_request(request, self.limits, policies)
        # A response that was aborted close to its end may exceed the limit of prompts.
        places = [
            place
            for place in range(request.n)
            if len(request.prompt) + len(request.made(place)) <= self.limits.prompt_tokens
        ]
        if len(places) == request.n:
            return await self._asked(request, under)
        found = [aborted(request)] * request.n
        if places:
            rest = request.continued([request.prefixes[place] for place in places])
            for place, completion in zip(places, await self._asked(rest, under), strict=True):
                found[place] = completion
        return found

    async def _asked(self, request: GenerateRequest, under: Under) -> list[Completion]:
        """Send a request that is within the server's limits."""
        if self.through_router:
            return await self._each(request, under)
        if (
            request.n > 1
            and len(request.prompt) >= SHARED_PROMPT_TOKENS
            and await self._prefill(request, under)
        ):
            return [aborted(request)] * request.n
        answer = await self._send(request, encode(request, self._attempt(), under))
        return await self._decoded(answer, request, under)

    async def _decoded(
        self, answer: Any, request: GenerateRequest, under: Under
    ) -> list[Completion]:
        read = partial(
            decode,
            answer,
            request,
            self.limits,
            engine=self.client.name,
            mark=self.mark,
            version=under.version,
        )
        # Records of experts are long.
        return await asyncio.to_thread(read) if request.sampling.routed_experts else read()

    async def _each(self, request: GenerateRequest, under: Under) -> list[Completion]:
        """Send a call for each sample: sglang-router 0.3.2 takes no list of them."""

        async def sample(index: int) -> Completion:
            one = request.alone(index)
            body = encode(one, self._attempt(), under)
            alone = {
                name: value[0] if isinstance(value, list) else value for name, value in body.items()
            }
            answer = [await self._send(one, alone)]
            return (await self._decoded(answer, one, under))[0]

        return await gather_or_cancel(*(sample(index) for index in range(request.n)))

    async def _prefill(self, request: GenerateRequest, under: Under) -> bool:
        """Put the prompt into the server's cache. Returns whether the call was aborted."""
        body = {
            "rid": rid(request, self._attempt()),
            "input_ids": tokens(request.prompt),
            **under.body(),
            "sampling_params": {"max_new_tokens": 0},
        }
        answer = await self._send(request, body)
        try:
            return bool(answer["meta_info"]["finish_reason"]["type"] == "abort")
        except (KeyError, TypeError) as error:
            raise EngineFailed(
                f"engine {self.client.name} returned an invalid prefill for request {request.rid}"
            ) from error

    async def _send(self, request: GenerateRequest, body: dict[str, Any]) -> Any:
        """Return the server's answer to /generate. The caller has the deadline."""
        names = body["rid"] if isinstance(body["rid"], list) else [body["rid"]]
        self._sent[request.rid] = names
        try:
            longest = answer_bytes(request, self.limits)
            return await self.client.post("/generate", body, limit=None, answer_bytes=longest)
        finally:
            if self._sent.get(request.rid) is names:
                del self._sent[request.rid]

    def sent(self, rid: str) -> list[str]:
        """The ids at the server of the running samples of request `rid`."""
        return self._sent.get(rid, [])

    def _attempt(self) -> str:
        return f"{self._life}-{next(self._attempts)}"


def check_request(request: GenerateRequest, limits: Limits, policies: Collection[str] = ()) -> None:
    """Raise UserError for a request that the server would refuse, crash on, or misread."""
    check_common(
        request,
        vocab_size=limits.vocab_size,
        total_tokens=limits.total_tokens,
        limit="what the server takes (its context_length and KV pool, less a reserve of its own)",
        policies=policies,
    )
    what = f"draw {request.draw}"
    sampling = request.sampling
    if len(request.prompt) > limits.prompt_tokens:
        raise UserError(
            f"{what}: the prompt has {len(request.prompt)} tokens, the server takes"
            f" {limits.prompt_tokens} at most"
        )
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise UserError(
            f"{what}: SGLang draws greedily at a temperature of {sampling.temperature:g}: say"
            " temperature 0"
        )
    if sampling.top_k == 1 and sampling.temperature not in (0, 1):
        # Whether its log-probs are those at temperature 1 depends on the rest of the batch.
        raise UserError(
            f"{what}: top_k 1 at temperature {sampling.temperature:g} is greedy: say temperature 0"
        )
    _check_stops(what, sampling, limits)
    if sampling.routed_experts and limits.experts is None:
        raise UserError(
            f"{what}: asks for routed experts, but the model has none, or the server does not"
            " report them: set rollout.engine.server.enable_return_routed_experts to true, or"
            " policy.routing_replay to none"
        )
    if asks_sampling_mask(sampling) and not 1 < sampling.top_k <= limits.sampling_mask_tokens:
        raise UserError(
            f"{what}: SGLang reports keep-sets only for a top_k of 2 to"
            f" {limits.sampling_mask_tokens}, got {sampling.top_k}: set rollout.sampling.top_k, or"
            " policy.logprobs.keep_sets to false"
        )


def _check_stops(what: str, sampling: SamplingParams, limits: Limits) -> None:
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < limits.vocab_size]
    if outside:
        raise UserError(
            f"{what}: stop token {outside[0]} lies outside the model's vocabulary of"
            f" {limits.vocab_size}"
        )
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise UserError(
            f"{what}: SGLang takes {MAX_STOP_STRINGS} stop strings, got {len(sampling.stop)}"
        )
    for text in sampling.stop:
        if not text or len(stop_pattern(text).encode()) > STOP_PATTERN_BYTES:
            raise UserError(
                f"{what}: stop string {text!r} is empty or longer than SGLang takes"
                f" ({STOP_PATTERN_BYTES} bytes as a pattern)"
            )


def encode(request: GenerateRequest, attempt: str, under: Under = PLAIN) -> dict[str, Any]:
    """Make the body of /generate for one attempt at the `n` samples of a request."""
    sampling = request.sampling
    common = encode_sampling(sampling)
    made = [request.made(place) for place in range(request.n)]
    body: dict[str, Any] = {
        "rid": [rid(request, f"{attempt}.{sample}") for sample in request.samples],
        "input_ids": [tokens(request.prompt, prefix) for prefix in made],
        "sampling_params": [
            common
            | {
                "sampling_seed": seed(request, sample),
                "max_new_tokens": sampling.max_new_tokens - len(prefix),
            }
            for sample, prefix in zip(request.samples, made)
        ],
        **under.body(),
        "return_logprob": True,
    }
    if sampling.routed_experts:
        body["return_routed_experts"] = True
    if asks_sampling_mask(sampling):
        body["return_sampling_mask"] = True
    return body


def encode_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Make SGLang's `sampling_params`.

    If we have no stop tokens, the server must ignore those of its model (eos), too.
    """
    greedy = sampling.temperature == 0
    return NEUTRAL | {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 and not greedy else -1,
        "stop_token_ids": sampling.stop_token_ids,
        "stop_regex": [stop_pattern(text) for text in sampling.stop],
        "ignore_eos": not sampling.stop_token_ids,
    }


def stop_pattern(text: str) -> str:
    """Write a stop string as a regular expression that SGLang finds in the last tokens.

    For a plain stop string SGLang decodes as many tokens as it has in the tokenizer's own spelling,
    and misses one that the model spells in smaller tokens. For a pattern it decodes as many tokens
    as the pattern can have characters. The part behind the | never matches, as nothing follows the
    end of the text, but it widens that window to one token a byte.
    """
    return f"{re.escape(text)}|\\Za{{{len(text.encode()) + STOP_MARGIN}}}"


def tokens(*parts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Prompt and prefix as one array that orjson can write."""
    return np.ascontiguousarray(np.concatenate(parts), dtype=np.int32)


def rid(request: GenerateRequest, attempt: str) -> str:
    """Make an id that no other id begins with.

    SGLang aborts all requests whose ids begin with the given one.
    """
    return f"{request.rid}.{attempt}."


def seed(request: GenerateRequest, sample: int) -> int:
    """63 bits that depend only on the run's seed and the sample's address."""
    address = f"{request.seed}-{request.draw}-{sample}-{request.turn}".encode()
    return int.from_bytes(hashlib.blake2b(address, digest_size=8).digest(), "little") >> 1


def aborted(request: GenerateRequest) -> Completion:
    """The completion of a request that was ended before its first token."""
    sampling = request.sampling
    return Completion(
        tokens=np.zeros(0, dtype=np.int32),
        logprobs=np.zeros(0, dtype=np.float32),
        finish_reason="abort",
        versions=(),
        sampling_mask=SamplingMasks.whole(0) if sampling.sampling_mask else None,
        routed_experts=np.zeros((0, 0, 0), dtype=np.int16) if sampling.routed_experts else None,
    )
