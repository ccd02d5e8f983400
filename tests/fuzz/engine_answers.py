"""Answers of engines: what an SGLang server and an embedded engine's process say to /generate.

An answer becomes completions that the oracle takes, or EngineFailed, which replaces the engine.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rlcore.config.sections.rollout import EngineConfig
from rlcore.data.generation import Completion, Drafts, GenerateRequest, Prefix, SamplingParams
from rlcore.data.sample import SamplingMasks, VersionSpan
from rlcore.errors import EngineFailed
from rollout.engines.checks import ExpertLayers
from rollout.engines.embedded.client import RemoteEngine, encode_completion
from rollout.engines.factories import Keys
from rollout.engines.server_client import ServerClient
from rollout.engines.sglang.answers import Limits
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.generation import Generation
from rollout.fleet.dispatcher import Dispatcher
from rollout.fleet.fleet import Fleet
from rollout.fleet.router import Lease
from tests.fuzz.harness import ACCEPTED, Case, Target
from tests.fuzz.mutation import Mutator
from tests.fuzz.oracle import check_completion, need

VOCAB = 31
VERSION = 5  # in force when a request is sent; a publication may end before its answer
EXPERTS = ExpertLayers(num_layers=3, places=(0, 2), num_experts=8, topk=2)
LIMITS = Limits(VOCAB, prompt_tokens=20, total_tokens=30, sampling_mask_tokens=16, experts=EXPERTS)
CONFIG = EngineConfig(kind="sglang", retries=0)
ENGINE = "engine-3"


def make_request(random: random.Random) -> GenerateRequest:
    """Return a request of one of the kinds that runs make."""
    kind = random.choice(("plain", "several", "greedy", "mask", "experts", "all", "continued"))
    everything = kind in ("all", "continued")
    sampling = SamplingParams(
        max_new_tokens=8,
        temperature=0.0 if kind == "greedy" else 1.0,
        top_k=5 if kind == "mask" or everything else -1,
        stop_token_ids=(2,),
        sampling_mask=kind == "mask" or everything,
        routed_experts=kind == "experts" or everything,
    )
    prompt = np.array([random.randrange(3, VOCAB) for _ in range(4)], dtype=np.int32)
    request = GenerateRequest(prompt, sampling, draw=7, n=3 if kind == "several" else 1)
    if kind == "continued":
        return request.continued([Prefix(0, np.array([9, 9], dtype=np.int32))])
    return request


def make_completion(random: random.Random, request: GenerateRequest, place: int) -> Completion:
    """Return what an engine may have made."""
    given = len(request.prompt) + len(request.made(place))
    most = request.sampling.max_new_tokens - len(request.made(place))
    reason: Any = random.choice(("stop", "length", "abort"))
    size = most if reason == "length" else random.randrange(1, most + 1)
    tokens = np.array([random.randrange(3, VOCAB) for _ in range(size)], dtype=np.int32)
    if reason == "stop":
        tokens[-1] = 2
    logprobs = np.array([-5.0 * random.random() for _ in tokens], dtype=np.float32)
    cut = random.randrange(size + 1)
    spans = [VersionSpan(VERSION, 0, cut), VersionSpan(VERSION + 1, cut, size)]
    mask = None
    if request.sampling.sampling_mask:
        kept = [sorted({int(token), 4, 5}) for token in tokens]
        flat = np.array([token for row in kept for token in row], dtype=np.int32)
        mask = SamplingMasks(flat, np.array([len(row) for row in kept], dtype=np.int32))
    routed = None
    if request.sampling.routed_experts:
        shape = (given + size - 1, len(EXPERTS.places), EXPERTS.topk)
        routed = np.zeros(shape, dtype=np.int16) + random.randrange(EXPERTS.num_experts)
    versions = tuple(span for span in spans if span.end > span.start)
    verifications = random.randrange(3)
    drafts = (
        Drafts(3 * verifications, random.randrange(3 * verifications), verifications)
        if (verifications)
        else None
    )
    cached = random.randrange(given)
    return Completion(tokens, logprobs, reason, versions, mask, routed, cached, drafts)


def as_sglang(completion: Completion) -> dict[str, Any]:
    """Write a completion as SGLang 0.5.23 does; layers without experts have the same record."""
    tokens = completion.tokens.tolist()
    logprobs = completion.logprobs.tolist()
    reason: dict[str, Any] = {"type": completion.finish_reason}
    if completion.finish_reason == "stop":
        reason["matched"] = tokens[-1]
    meta: dict[str, Any] = {
        "id": "x",
        "finish_reason": reason,
        "prompt_tokens": 4,
        "completion_tokens": len(tokens),
        "cached_tokens": completion.cached_tokens,
        "weight_version": str(VERSION),
        "weight_versions": [
            {"version": str(span.version), "start": span.start, "end": span.end}
            for span in completion.versions
        ],
        "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens)],
    }
    if (drafts := completion.drafts) is not None:
        meta["spec_num_proposed_drafts"] = drafts.proposed
        meta["spec_num_correct_drafts"] = drafts.accepted
        meta["spec_verify_ct"] = drafts.verifications
    if completion.sampling_mask is not None:
        ends = completion.sampling_mask.counts.cumsum()[:-1]
        rows = np.split(completion.sampling_mask.tokens, ends)
        meta["output_token_sampling_mask"] = [row.tolist() for row in rows]
        meta["output_token_sampling_logprobs"] = logprobs
    if completion.routed_experts is not None:
        whole = np.repeat(completion.routed_experts[:, :1], EXPERTS.num_layers, axis=1)
        meta["routed_experts"] = base64.b64encode(whole.astype("<i4").tobytes()).decode()
    return {"text": "abc", "output_ids": tokens, "meta_info": meta}


class Answering(ServerClient):
    """A client that got `content` from its server, while a publication ended."""

    content = b""

    def __init__(self, publish: Callable[[], None]) -> None:
        self.publish = publish
        super().__init__(ENGINE, "http://127.0.0.1:1", Keys("a", "b"), config=CONFIG)

    async def post(self, route: str, body: dict[str, Any], **limits: Any) -> Any:
        """Read the answer as `ServerClient` does; `http_answers` tests that one itself."""
        self.publish()
        try:
            return orjson.loads(self.content)
        except orjson.JSONDecodeError as error:
            raise EngineFailed(f"engine {ENGINE} answered with no JSON: {error}") from error


class Process(RemoteEngine):
    """An embedded engine's client that got `content` from its process, as `Answering`."""

    content = b""

    async def _call(self, verb: str, body: dict[str, Any] | None = None) -> Any:
        if verb != "generate":
            return None
        await self.set_version(VERSION + 1)
        try:
            return orjson.loads(self.content)
        except orjson.JSONDecodeError as error:
            raise EngineFailed(f"engine {ENGINE} answered with no JSON: {error}") from error


class Known:
    """A server that is not asked anything."""

    name = ENGINE
    managed = True
    ended = None


def ask(engine: Any, request: GenerateRequest, loop: asyncio.AbstractEventLoop) -> str:
    """Send a request as a run does, and check what comes back."""

    async def call() -> Sequence[Sequence[Completion]]:
        fleet = Fleet([engine], CONFIG)
        member = fleet.members[0]
        member.version = VERSION
        dispatcher = Dispatcher(fleet, CONFIG, vocab_size=VOCAB)
        return await dispatcher._call(Lease(member, 0, [request]))

    try:
        [found] = loop.run_until_complete(asyncio.wait_for(call(), 10))
    except EngineFailed as error:
        need(ENGINE in str(error), f"{error} names no engine")
        return "EngineFailed"
    assert len(found) == request.n
    for place, completion in enumerate(found):
        check_completion(
            completion,
            request,
            place,
            vocab_size=VOCAB,
            versions={VERSION, VERSION + 1},
            experts=(len(EXPERTS.places), EXPERTS.topk, EXPERTS.num_experts),
        )
    return ACCEPTED


@contextmanager
def open_sglang() -> Iterator[Case]:
    """An `SGLangEngine` whose server's answers are broken."""
    client = Answering(lambda: publish(VERSION + 1))
    engine = SGLangEngine(
        Known(), config=CONFIG, keys=Keys("a", "b"), model_path=str(Path("nowhere"))
    )
    engine._generation = Generation(client, LIMITS)
    loop = asyncio.new_event_loop()

    def publish(version: int) -> None:
        engine.weights.begin(())
        engine.weights.end()
        engine.weights.set_version(version)

    def case(mutator: Mutator) -> str:
        engine.weights.version = None
        publish(VERSION)
        request = make_request(mutator.random)
        made = [make_completion(mutator.random, request, place) for place in range(request.n)]
        client.content = mutator.document([as_sglang(one) for one in made])
        return ask(engine, request, loop)

    yield case
    loop.close()


@contextmanager
def open_embedded() -> Iterator[Case]:
    """A `RemoteEngine` whose process's answers are broken."""
    engine = Process(Known(), config=CONFIG, key="the-key", experts=EXPERTS)
    loop = asyncio.new_event_loop()

    def case(mutator: Mutator) -> str:
        loop.run_until_complete(engine.set_version(VERSION))
        request = make_request(mutator.random)
        made = [make_completion(mutator.random, request, place) for place in range(request.n)]
        engine.content = mutator.document([[encode_completion(one) for one in made]])
        return ask(engine, request, loop)

    yield case
    loop.close()


TARGETS = (Target("sglang-answers", open_sglang), Target("embedded-answers", open_embedded))
