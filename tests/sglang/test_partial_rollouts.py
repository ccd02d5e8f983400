"""Responses of a real server that are aborted and go on, compared with transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from publication_kit import (
    TOLERANCE,
    Client,
    Oracle,
    folder_weights,
    publish,
    publishing,
    random_weights,
    request,
)
from server_kit import Served
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.data.generation import Completion, Generate, GenerateRequest
from rollout.collection.attempts import PartialRollouts
from rollout.engines.sglang.engine import SGLangEngine

LONG = list(range(1, 30)) * 3  # a prompt that is computed once for all its samples
TOKENS = 300


@pytest.fixture
def aborting(client: Callable[..., Client]) -> Client:
    """Publishes by aborting."""
    return client(on_update="abort")


def partial_of(served: Served) -> PartialRollouts:
    return PartialRollouts(AutoTokenizer.from_pretrained(served.model))


def generate_of(engine: SGLangEngine) -> Generate:
    async def generate(asked: GenerateRequest) -> list[Completion]:
        [answer] = await engine.generate([asked])
        return answer

    return generate


def cut_after(generate: Generate, made: int) -> Generate:
    """The first answer ends after `made` tokens, as by an abort."""

    async def cut(asked: GenerateRequest) -> list[Completion]:
        if asked.prefixes:
            return await generate(asked)
        short = replace(asked, sampling=replace(asked.sampling, max_new_tokens=made))
        return [
            replace(one, finish_reason="abort") if one.finish_reason == "length" else one
            for one in await generate(short)
        ]

    return cut


def test_responses_go_on_through_two_publications(served: Served, aborting: Client) -> None:
    """Every token has the log-prob that transformers gives it with the weights of its version."""
    oracles = {}
    partial = partial_of(served)
    asked = replace(request(LONG, tokens=TOKENS), n=3)
    running = None

    def start() -> asyncio.Task[list[Completion]]:
        return asyncio.ensure_future(partial.whole(generate_of(aborting.engine), asked))

    # tokens of a response, at the next publication
    for version, made in ((10, 50), (11, 100), (12, 0)):
        weights = random_weights(served.model, version)
        oracles[version] = Oracle(served.model, weights)
        publish(aborting.sink, weights, version)
        if running is None:
            running = served.call(served.started(start, len(LONG) + 3 * made))
        elif made:
            assert served.call(served.until_used(len(LONG) + 3 * made, running))
    completions = served.call(served.ended(running))
    for one in completions:
        assert (len(one.tokens), one.finish_reason) == (TOKENS, "length")
        errors = {version: oracle.errors(LONG, one) for version, oracle in oracles.items()}
        for span in one.versions:
            assert errors[span.version][span.start : span.end].max() < TOLERANCE
            others = [
                errors[version][span.start : span.end]
                for version in oracles
                if version != span.version
            ]
            assert span.end - span.start < 3 or min(other.max() for other in others) > 0.1
    assert {span.version for one in completions for span in one.versions} == {10, 11, 12}
    assert 3 < partial.resumed_responses <= 6
    assert partial.resumed_tokens > 0


def test_stops_across_the_cut(served: Served, aborting: Client) -> None:
    """Greedy responses end at the same token with the same reason, wherever they were cut."""
    # whose greedy response repeats nothing for a while
    publish(aborting.sink, random_weights(served.model, 32), 5)
    generate = generate_of(aborting.engine)
    partial = partial_of(served)
    greedy = request(LONG, tokens=24)
    greedy = replace(greedy, sampling=replace(greedy.sampling, temperature=0.0))
    [free] = served.call(generate(greedy))
    text = AutoTokenizer.from_pretrained(served.model).decode(free.tokens[9:12])
    ways: list[dict[str, Any]] = [
        {"stop": (text, "never said")},
        {"stop_token_ids": (int(free.tokens[12]),)},
        {},
    ]
    for way in ways:
        asked = replace(greedy, sampling=replace(greedy.sampling, **way))
        [whole] = served.call(generate(asked))
        assert (whole.finish_reason, len(whole.tokens)) == (
            ("stop", 12 + ("stop_token_ids" in way)) if way else ("length", 24)
        )
        for made in {1, len(whole.tokens) - 2, len(whole.tokens) - 1, len(whole.tokens)} - {0, -1}:
            [found] = served.call(partial.whole(cut_after(generate, made), asked))
            assert (found.tokens.tolist(), found.finish_reason) == (
                whole.tokens.tolist(),
                whole.finish_reason,
            )
            np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=TOLERANCE)
    assert partial.resumed_responses > 6


def test_keep_sets_of_both_parts(served: Served, aborting: Client) -> None:
    weights = random_weights(served.model, 6)
    publish(aborting.sink, weights, 6)
    asked = replace(request(LONG, tokens=16), n=2)
    asked = replace(asked, sampling=replace(asked.sampling, top_k=6, top_p=0.7, sampling_mask=True))
    oracle = Oracle(served.model, weights)
    for one in served.call(
        partial_of(served).whole(cut_after(generate_of(aborting.engine), 5), asked)
    ):
        assert one.sampling_mask is not None
        assert len(one.sampling_mask.counts) == len(one.tokens) == 16
        assert not len(one.sampling_mask.missing(one.tokens))
        full = oracle.distributions(LONG, one)
        sets = np.split(one.sampling_mask.tokens, one.sampling_mask.counts.cumsum()[:-1])
        for place, (kept, token) in enumerate(zip(sets, one.tokens)):
            expected = full[place, token] - full[place, torch.from_numpy(kept).long()].logsumexp(0)
            assert one.logprobs[place] == pytest.approx(expected.item(), abs=TOLERANCE)


@pytest.mark.full
def test_routed_experts_of_both_parts(served_moe: Served, moe_model: Path, tmp_path: Path) -> None:
    asked = replace(request(LONG, tokens=16), n=2)
    asked = replace(asked, sampling=replace(asked.sampling, routed_experts=True))
    model = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32).eval()
    with publishing(served_moe, tmp_path) as client:
        publish(client.sink, folder_weights(moe_model), 3)
        cut = cut_after(generate_of(client.engine), 5)
        made = served_moe.call(partial_of(served_moe).whole(cut, asked))
    for one in made:
        fed = torch.tensor([[*LONG, *one.tokens.tolist()]])[:, :-1]
        with torch.no_grad():
            routers = model(fed, output_router_logits=True).router_logits
        chosen = torch.stack([scores.topk(2).indices for scores in routers], dim=1)
        assert one.routed_experts is not None
        assert np.array_equal(np.sort(one.routed_experts), np.sort(chosen.numpy()))
