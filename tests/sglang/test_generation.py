"""Generation by a real server: log-probs against transformers, stops, limits, shared prompts,
aborts, records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server_kit import Served
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.data.generation import Completion, GenerateRequest, SamplingParams, StopStrings
from rlcore.data.sample import VersionSpan
from rlcore.errors import UserError
from rollout.asyncio_utils import gather_or_cancel
from rollout.engines.server_client import ServerClient
from rollout.engines.sglang.generation import Generation, Under, encode

VERSION = 7
# times the initial embedding: its logits would be nearly uniform, and temperatures hardly tell
SHARPER = 12.0


class Asked:
    """A server that holds known weights, and the model that it should behave like."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served = served
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.client = ServerClient("engine-0", served.url, served.keys, config=served.config)
        served.call(
            self.control(
                "update_weights_from_disk", model_path=str(folder), weight_version=str(VERSION)
            )
        )
        self.generation = served.call(Generation.connect(self.client, str(folder)))

    async def control(self, route: str, **body: Any) -> Any:
        return await self.client.post(f"/{route}", body, admin=True)

    def generate(self, *requests: GenerateRequest) -> list[list[Completion]]:
        """Generate all at once, in one batch of the server."""
        return self.served.call(
            gather_or_cancel(*(self.generation.one(request) for request in requests))
        )

    def distributions(self, request: GenerateRequest, completion: Completion) -> torch.Tensor:
        """Compute log-probs [m, V] at the request's temperature, by transformers."""
        tokens = torch.tensor(np.concatenate([request.prompt, completion.tokens]), dtype=torch.long)
        with torch.no_grad():
            logits = self.model(tokens[None]).logits[0, len(request.prompt) - 1 : -1].float()
        return (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)

    def check(self, request: GenerateRequest, completion: Completion) -> None:
        """Compare log-probs with transformers' to 1e-4; version spans must cover the response."""
        expected = self.distributions(request, completion)[
            range(len(completion.tokens)), completion.tokens.tolist()
        ]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-4)
        assert completion.versions == (
            (VersionSpan(VERSION, 0, len(completion.tokens)),) if len(completion.tokens) else ()
        )


def request(prompt: Any, *, n: int = 1, draw: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        np.asarray(prompt, dtype=np.int32),
        SamplingParams(**{"max_new_tokens": 12, **sampling}),
        draw,
        n,
    )


PROMPT = [3, 7, 11, 2, 19]
LONG = np.random.default_rng(0).integers(1, 31, 150)


@pytest.fixture(scope="module")
def asked(
    served: Served, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Asked]:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(SHARPER)
    folder = tmp_path_factory.mktemp("sharp")
    model.save_pretrained(folder)
    asked = Asked(served, folder)
    yield asked
    served.call(asked.client.close())


def test_logprobs_at_every_temperature_in_one_batch(asked: Asked) -> None:
    requests = [
        request(PROMPT, draw=0, n=4),
        request(PROMPT, draw=1, temperature=0.7, n=2),
        request(LONG, draw=2, temperature=1.3),
        request(PROMPT, draw=3, temperature=0.0),
        request(LONG, draw=4, temperature=0.0, top_k=3, top_p=0.5),
        request(PROMPT, draw=5, temperature=0.7, top_p=0.8),
        request(LONG, draw=6, top_k=4),
    ]
    answers = asked.generate(*requests)
    assert [len(answer) for answer in answers] == [asked_for.n for asked_for in requests]
    for asked_for, answer in zip(requests, answers):
        for completion in answer:
            assert (len(completion.tokens), completion.finish_reason) == (12, "length")
            asked.check(asked_for, completion)
    # Seeds of their own; by chance two samples of a small model may say the same, and which do
    # differs between machines.
    assert len({tuple(completion.tokens) for completion in answers[0]}) > 1
    for place in (3, 4):
        best = asked.distributions(requests[place], answers[place][0]).argmax(-1)
        assert answers[place][0].tokens.tolist() == best.tolist()


def test_greedy_alone_has_logprobs_at_temperature_1(asked: Asked) -> None:
    greedy = request(PROMPT, temperature=0.0)
    asked.check(greedy, asked.generate(greedy)[0][0])


def test_a_prompt_in_the_cache_changes_nothing(asked: Asked) -> None:
    shared = request(LONG, n=3)
    for completion in asked.generate(shared)[0]:
        asked.check(shared, completion)
    answer = asked.served.call(asked.client.post("/generate", encode(shared, "again")))
    assert [part["meta_info"]["cached_tokens"] for part in answer] == [len(LONG) - 1] * 3
    assert [part["meta_info"]["id"] for part in answer] == [f"0-0-0-0.again.{i}." for i in range(3)]


def test_samples_compute_a_long_prompt_once_and_keys_of_the_cache_part_them(asked: Asked) -> None:
    prompt = (LONG + 1) % 31  # nobody has asked for it
    shared = request(prompt, n=2)
    asked.served.call(asked.generation.one(shared, Under("7")))

    def cached(key: str) -> list[int]:
        answer = asked.served.call(asked.client.post("/generate", encode(shared, key, Under(key))))
        return [part["meta_info"]["cached_tokens"] for part in answer]

    assert cached("8") == [0, 0]
    assert cached("7") == [len(prompt) - 1] * 2


def test_stop_tokens_are_kept_and_nothing_else_stops(asked: Asked) -> None:
    free = request(PROMPT, temperature=0.0, max_new_tokens=40)
    whole = asked.generate(free)[0][0]
    assert whole.finish_reason == "length"
    eos = AutoTokenizer.from_pretrained(asked.served.model).eos_token_id
    stop = next(token for token in whole.tokens[3:] if token != eos)
    first = whole.tokens.tolist().index(stop)
    stopped = request(PROMPT, temperature=0.0, max_new_tokens=40, stop_token_ids=(int(stop),))
    [completion] = asked.generate(stopped)[0]
    assert (completion.finish_reason, completion.tokens.tolist()) == (
        "stop",
        whole.tokens[: first + 1].tolist(),
    )
    asked.check(stopped, completion)


def test_eos_stops_only_where_it_is_a_stop_token(asked: Asked) -> None:
    eos = AutoTokenizer.from_pretrained(asked.served.model).eos_token_id
    draws = [
        request(PROMPT, draw=draw, n=8, temperature=3.0, max_new_tokens=30) for draw in range(2)
    ]
    completions = [completion for answer in asked.generate(*draws) for completion in answer]
    assert all(len(completion.tokens) == 30 for completion in completions)
    assert any(eos in completion.tokens for completion in completions)


def test_stop_strings_end_where_the_embedded_engine_ends(asked: Asked) -> None:
    tokenizer = AutoTokenizer.from_pretrained(asked.served.model)
    whole = asked.generate(request(PROMPT, temperature=0.0, max_new_tokens=30))[0][
        0
    ].tokens.tolist()
    for text in (tokenizer.decode(whole[6:9]), tokenizer.decode(whole[4:5])):
        strings = StopStrings((text, "never said"), tokenizer)
        end = next(i for i in range(1, 31) if strings.hit(whole[max(0, i - strings.window) : i]))
        stopped = request(PROMPT, temperature=0.0, max_new_tokens=30, stop=(text, "never said"))
        [completion] = asked.generate(stopped)[0]
        assert (completion.finish_reason, completion.tokens.tolist()) == ("stop", whole[:end])
        asked.check(stopped, completion)


def test_the_longest_request_is_answered_whole(asked: Asked) -> None:
    limits = asked.generation.limits
    prompt = np.resize(LONG, limits.prompt_tokens)
    wanted = limits.total_tokens - len(prompt)
    [completion] = asked.generate(request(prompt, max_new_tokens=wanted))[0]
    assert (completion.finish_reason, len(completion.tokens)) == ("length", wanted)
    [short_prompt] = asked.generate(
        request(PROMPT, max_new_tokens=limits.total_tokens - len(PROMPT))
    )[0]
    assert len(short_prompt.tokens) == limits.total_tokens - len(PROMPT)
    with pytest.raises(UserError, match="exceed what the server takes"):
        asked.generate(request(PROMPT, max_new_tokens=limits.total_tokens - len(PROMPT) + 1))


def test_the_servers_own_words_about_a_bad_request(asked: Asked) -> None:
    body = encode(request(PROMPT), "x")
    body["sampling_params"][0]["top_p"] = 2
    with pytest.raises(
        UserError,
        match=r"engine-0 at .* refused /generate \(HTTP 400\): top_p must be in \(0, 1\], got 2",
    ):
        asked.served.call(asked.client.post("/generate", body))


def test_top_p_and_top_k_draw_from_what_the_keep_sets_say(asked: Asked) -> None:
    kept = request(PROMPT, n=4, temperature=0.8, top_k=6, top_p=0.7, sampling_mask=True)
    for completion in asked.generate(kept)[0]:
        full = asked.distributions(kept, completion)
        assert completion.sampling_mask is not None
        sets = np.split(
            completion.sampling_mask.tokens, completion.sampling_mask.counts.cumsum()[:-1]
        )
        for place, (kept_tokens, token) in enumerate(zip(sets, completion.tokens)):
            probs, order = full[place].exp().sort(descending=True)
            before = probs.cumsum(0) - probs
            assert sorted(kept_tokens.tolist()) == sorted(order[:6][before[:6] <= 0.7].tolist())
            expected = full[place, token] - full[
                place, torch.from_numpy(kept_tokens).long()
            ].logsumexp(0)
            assert completion.logprobs[place] == pytest.approx(expected.item(), abs=1e-4)


def test_an_abort_ends_requests_with_what_they_have(asked: Asked) -> None:
    long = request(PROMPT, n=3, max_new_tokens=asked.generation.limits.total_tokens - len(PROMPT))

    async def abort() -> list[Completion]:
        call = await asked.served.started(
            lambda: asyncio.ensure_future(asked.generation.one(long)), len(PROMPT) + 3 * 20
        )
        await asked.control("abort_request", abort_all=True)
        return await call

    completions = asked.served.call(abort())
    assert {completion.finish_reason for completion in completions} == {"abort"}
    for completion in completions:
        asked.check(long, completion)


@pytest.mark.full
def test_a_cancelled_call_ends_its_requests_at_the_server(asked: Asked) -> None:
    """SGLang looks every 4 s whether the connection is still there, so the call must be long."""
    limits = asked.generation.limits
    long = request(PROMPT, n=96, max_new_tokens=limits.total_tokens - len(PROMPT))

    async def seconds_until_idle() -> float:
        began = time.monotonic()
        while True:
            try:
                await asked.control("flush_cache")  # refused while requests run
                return time.monotonic() - began
            except UserError:
                await asyncio.sleep(0.1)

    async def cancel() -> tuple[float, float]:
        began = time.monotonic()
        await asked.generation.one(long)
        whole_s = time.monotonic() - began
        call = asyncio.ensure_future(asked.generation.one(long))
        await asyncio.sleep(0.3)
        call.cancel()
        await asyncio.wait({call})
        return whole_s, await seconds_until_idle()

    whole_s, idle_s = asked.served.call(cancel(), 240)
    assert idle_s < max(6.0, whole_s / 2)


@pytest.mark.full
def test_routed_experts_are_those_of_transformers(served_moe: Served, moe_model: Path) -> None:
    asked = Asked(served_moe, moe_model)
    wanted = request(PROMPT, n=3, routed_experts=True)
    for completion in asked.generate(wanted)[0]:
        asked.check(wanted, completion)
        fed = np.concatenate([wanted.prompt, completion.tokens])[:-1]
        with torch.no_grad():
            routers = asked.model(
                torch.from_numpy(fed).long()[None], output_router_logits=True
            ).router_logits
        chosen = torch.stack([scores.topk(2).indices for scores in routers], dim=1)
        assert completion.routed_experts is not None
        assert completion.routed_experts.shape == chosen.shape == (len(fed), 2, 2)
        assert np.array_equal(np.sort(completion.routed_experts), np.sort(chosen.numpy()))
    served_moe.call(asked.client.close())
