"""Responses that the embedded engine goes on with from a prefix, against those that it makes in one
go.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engine_kit import Steps, logprobs_under, publish, request, tiny_qwen3, with_engine

from rlcore.data.generation import GenerateRequest, Prefix
from rlcore.data.sample import VersionSpan
from rlcore.errors import UserError
from rollout.collection.attempts import PartialRollouts
from rollout.engines.embedded.client import decode_request, encode_request

SETTINGS = {
    "max_new_tokens": 24,
    "temperature": 0.8,
    "top_k": 9,
    "stop_token_ids": (5, 6),
    "sampling_mask": True,
}
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10]]


def asked(**changes):
    return [
        request(prompt, draw=i, n=4, **{**SETTINGS, **changes}) for i, prompt in enumerate(PROMPTS)
    ]


def rest_of(whole: GenerateRequest, completions, cut) -> GenerateRequest | None:
    """The request that goes on with every response that is longer than `cut(place)` tokens, from
    there.
    """
    longer = [place for place, one in enumerate(completions) if len(one.tokens) > cut(place)]
    prefixes = [
        Prefix(whole.samples[place], completions[place].tokens[: cut(place)]) for place in longer
    ]
    return whole.continued(prefixes) if prefixes else None


@pytest.mark.parametrize(
    ("cut", "retracts"),
    [
        (lambda _: 0, False),
        (lambda _: 1, False),
        (lambda place: 3 * place, False),
        (lambda place: 3 * place, True),
        (lambda _: 23, False),
    ],
)
def test_what_comes_behind_a_prefix_is_what_came_there_before(model, folder, cut, retracts):
    """The same random numbers at the same positions, prefixes of many lengths in one batch,
    log-probs to round-off.
    """

    async def use(engine):
        requests = asked()
        whole = await engine.generate(requests)
        if retracts:  # before each token: all keys and values are computed again
            pass_through = engine._gate.pass_through
            engine._gate.pass_through = lambda ticket, drop: (drop(), pass_through(ticket, drop))
        rest = [rest_of(one, completions, cut) for one, completions in zip(requests, whole)]
        return whole, rest, await engine.generate([one for one in rest if one is not None])

    whole, rest, answers = with_engine(folder, model, use)
    found = iter(answers)
    compared = 0
    for one, completions in zip(rest, whole):
        if one is None:
            continue
        for prefix, tail in zip(one.prefixes, next(found), strict=True):
            before = completions[prefix.sample]
            seam = len(prefix.tokens)
            assert tail.tokens.tolist() == before.tokens[seam:].tolist()
            assert tail.finish_reason == before.finish_reason
            np.testing.assert_allclose(tail.logprobs, before.logprobs[seam:], atol=1e-5)
            assert tail.versions == (VersionSpan(1, 0, len(tail.tokens)),)
            counts = before.sampling_mask.counts
            assert tail.sampling_mask.counts.tolist() == counts[seam:].tolist()
            assert (
                tail.sampling_mask.tokens.tolist()
                == before.sampling_mask.tokens[counts[:seam].sum() :].tolist()
            )
            compared += 1
    assert (
        compared
        == sum(
            len(c.tokens) > cut(place)
            for completions in whole
            for place, c in enumerate(completions)
        )
        > 0
    )


def test_a_prefix_that_leaves_no_room_is_refused(model, folder):
    full = request([1], max_new_tokens=3).continued([Prefix(0, np.array([1, 2, 3], np.int32))])
    with pytest.raises(UserError, match="draw 0: a prefix has all of max_new_tokens 3 already"):
        with_engine(folder, model, lambda engine: engine.generate([full]))


def test_prefixes_cross_borders():
    sent = request([1, 2], draw=3, n=5).continued(
        [Prefix(1, np.array([4, 5], np.int32)), Prefix(4, np.zeros(0, np.int32))]
    )
    back = decode_request(encode_request(sent))
    assert (back.n, back.first_sample, back.samples, back.rid) == (2, 1, [1, 4], sent.rid)
    assert [(prefix.sample, prefix.tokens.tolist()) for prefix in back.prefixes] == [
        (1, [4, 5]),
        (4, []),
    ]
    assert back.prefixes[0].tokens.dtype == np.int32
    assert (back.alone(1).samples, back.alone(1).made(0).tolist()) == ([4], [])


def test_going_on_is_to_the_bit_what_a_retraction_does(model, folder):
    """Both compute keys and values of prompt and prefix in one pass, and then token by token."""
    cut = 7
    settings = {"stop_token_ids": ()}

    async def use(engine):
        requests = asked(**settings)
        pass_through = engine._gate.pass_through
        steps = iter(range(10**6))

        def retracted(ticket, drop):
            if next(steps) == cut:
                drop()
            return pass_through(ticket, drop)

        engine._gate.pass_through = retracted
        whole = await engine.generate(requests)
        rest = [
            rest_of(one, completions, lambda _: cut) for one, completions in zip(requests, whole)
        ]
        return whole, await engine.generate(rest)

    whole, rest = with_engine(folder, model, use)
    for before, after in zip(
        (c for row in whole for c in row), (c for row in rest for c in row), strict=True
    ):
        assert after.tokens.tolist() == before.tokens[cut:].tolist()
        assert after.logprobs.tolist() == before.logprobs[cut:].tolist()


@pytest.fixture
def steps(monkeypatch):
    """Of whatever engine runs: it makes as many as it is let."""
    return Steps(monkeypatch, 0, once=False)


def test_responses_go_on_through_two_publications_that_abort(model, folder, steps):
    """Each token has the log-prob that transformers gives it with the weights of its version."""
    versions = {1: model, 2: tiny_qwen3(seed=1), 3: tiny_qwen3(seed=2)}
    long = 300
    partial = PartialRollouts(None)

    async def use(engine):
        async def generate(one):
            return (await engine.generate([one]))[0]

        running = [
            asyncio.ensure_future(
                partial.whole(generate, request(prompt, draw=i, n=3, max_new_tokens=long))
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        for version in (2, 3):
            steps.let(20)
            await steps.are_made()
            await publish(engine, versions[version], version, "abort")
        steps.let()
        return await asyncio.gather(*running)

    answers = with_engine(folder, model, use)
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        for one in completions:
            assert (len(one.tokens), one.finish_reason) == (long, "length")
            expected = {
                version: logprobs_under(weights, prompt, one)
                for version, weights in versions.items()
            }
            for span in one.versions:
                part = slice(span.start, span.end)
                np.testing.assert_allclose(
                    one.logprobs[part], expected[span.version][part], atol=1e-4
                )
    assert [span.version for span in answers[0][0].versions] == [1, 2, 3]
    # A part that was cut before its first token has no span, and counts as none: which do is
    # chance.
    spans = [one.versions for completions in answers for one in completions]
    assert (
        partial.resumed_responses
        == sum(len(versions) - (versions[0].version == 1) for versions in spans)
        >= 9
    )
    assert partial.resumed_tokens > 0


def test_an_abort_under_the_same_weights_changes_no_token(model, folder, steps):
    settings = {
        "max_new_tokens": 200,
        "temperature": 0.9,
        "stop_token_ids": (5,),
        "sampling_mask": True,
        "top_k": 12,
    }
    prompts = PROMPTS
    partial = PartialRollouts(None)

    async def use(engine, cuts):
        async def generate(one):
            return (await engine.generate([one]))[0]

        running = [
            asyncio.ensure_future(partial.whole(generate, request(prompt, draw=i, n=4, **settings)))
            for i, prompt in enumerate(prompts)
        ]
        for _ in range(cuts):
            steps.let(9)
            await steps.are_made()
            await engine.abort()
        steps.let()
        return await asyncio.gather(*running)

    calm = with_engine(folder, model, lambda engine: use(engine, 0))
    assert partial.resumed_responses == 0
    steps.let(0)
    cut = with_engine(folder, model, lambda engine: use(engine, 3))
    assert partial.resumed_responses > 0
    for one, other in zip(
        (c for row in calm for c in row), (c for row in cut for c in row), strict=True
    ):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.finish_reason, one.versions) == (other.finish_reason, other.versions)
        assert one.sampling_mask.to_record() == other.sampling_mask.to_record()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
