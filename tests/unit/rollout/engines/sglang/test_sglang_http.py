"""The client of one server: how its answers and errors are read."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from aiohttp import web
from engine_kit import request, with_client

from rlcore.data.generation import Prefix
from rlcore.errors import EngineFailed, EngineHangs, UserError
from rollout.engines.factories import Keys
from rollout.engines.sglang.answers import Limits
from rollout.engines.sglang.generation import Generation, Under

KEY = "rollout.engine.update_timeout_s"


def answering(status=200, body="", content_type="application/json"):
    async def handler(_):
        return web.Response(status=status, text=body, content_type=content_type)

    return handler


async def post(client, route="/generate", *, timeout_s=5.0, admin=False, times=1):
    client.config.update_timeout_s = timeout_s
    return await client.post(route, {"a": 1}, admin=admin, times=times)


def test_bodies_go_as_json_under_the_key_that_the_route_needs():
    seen = []

    async def handler(asked):
        seen.append(
            (asked.method, asked.headers["Authorization"], asked.content_type, await asked.text())
        )
        return web.json_response({"ok": [1]})

    async def use(client):
        assert await post(client) == {"ok": [1]}
        assert await post(client, admin=True) == {"ok": [1]}
        assert await client.get("/generate") == {"ok": [1]}

    with_client(handler, use)
    assert seen[:2] == [
        ("POST", f"Bearer {key}", "application/json", '{"a":1}')
        for key in ("the-api-key", "the-admin-key")
    ]
    assert seen[2][:2] == ("GET", "Bearer the-api-key")


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        ("", "text/html", None),
        ("Cache flushed.\n", "text/plain", "Cache flushed.\n"),
        ("null", "application/json", None),
    ],
)
def test_answers_that_are_no_json(body, content_type, expected):
    async def use(client):
        return await post(client)

    assert with_client(answering(body=body, content_type=content_type), use) == expected


@pytest.mark.parametrize(
    ("status", "body", "kind", "why"),
    [
        (
            400,
            '{"error": {"message": "top_p must be in (0, 1]"}}',
            UserError,
            r"HTTP 400\): top_p must be in \(0, 1\]$",
        ),
        (400, '{"error": "unknown field `foo`"}', UserError, "unknown field `foo`$"),
        (400, '{"success": false, "message": "no session"}', UserError, "no session$"),
        (422, '{"detail": [{"loc": ["body"]}]}', UserError, "loc"),
        (404, '{"detail": "Not Found"}', UserError, "HTTP 404"),
        (
            401,
            '{"error": "Unauthorized"}',
            UserError,
            "refused our key .* set RLCORE_ENGINE_API_KEY and RLCORE",
        ),
        (429, "", EngineFailed, "nothing said"),
        (500, "Internal Server Error", EngineFailed, r"HTTP 500\): Internal Server Error"),
        (503, '{"detail": "The request queue is full."}', EngineFailed, "queue is full"),
    ],
)
def test_who_is_to_blame(status, body, kind, why):
    with pytest.raises(kind, match=f"engine engine-3 at http://.*{why}"):
        with_client(answering(status, body), post)


@pytest.mark.parametrize("body", ["", "<html>", '{"a": 1', "\x00\x01"])
def test_json_that_is_none_is_the_engines_failure(body):
    with pytest.raises(EngineFailed, match="engine engine-3 answered /generate with no JSON"):
        with_client(answering(body=body), post)


def test_a_server_that_hangs_fails_at_the_deadline():
    async def handler(_):
        await asyncio.sleep(60)

    began = time.monotonic()
    with pytest.raises(
        EngineHangs, match=rf"engine engine-3 did not answer /generate within 0\.2 s \({KEY}\)"
    ):
        with_client(handler, lambda client: post(client, timeout_s=0.1, times=2))
    assert time.monotonic() - began < 30


def test_nobody_listens():
    async def use(client):
        client.url = "http://127.0.0.1:9"
        await post(client)

    with pytest.raises(
        EngineFailed, match=r"engine-3 at http://127\.0\.0\.1:9 broke off /generate: .*Connect"
    ):
        with_client(answering(), use)


def test_a_key_that_would_end_its_line():
    async def use(client):
        client._keys = Keys("a-key\n", "the-admin-key")
        await post(client)

    with pytest.raises(
        UserError, match="RLCORE_ENGINE_API_KEY has characters in it that HTTP cannot carry"
    ):
        with_client(answering(), use)


def test_after_close_every_call_fails():
    async def use(client):
        await post(client)
        await client.close()
        await client.close()
        await post(client)

    with pytest.raises(EngineFailed, match="its client is closed"):
        with_client(answering(body="1"), use)


# --- generation over it ---------------------------------------------------------------------------

LIMITS = Limits(vocab_size=31, prompt_tokens=500, total_tokens=600, sampling_mask_tokens=16)


def completion_of(tokens, reason="length"):
    spans = [{"version": "4", "start": 0, "end": len(tokens)}]
    rows = [[-1.0, token, None] for token in tokens]
    meta = {
        "finish_reason": {"type": reason},
        "weight_versions": spans,
        "output_token_logprobs": rows,
    }
    return {"output_ids": tokens, "meta_info": meta}


class Recorder:
    """Answers every sample with its index, and records the requests."""

    def __init__(self, prefill_reason: str = "length") -> None:
        self.bodies: list[dict] = []
        self.prefill_reason = prefill_reason

    async def __call__(self, asked: web.Request) -> web.Response:
        body = await asked.json()
        self.bodies.append(body)
        if isinstance(body["rid"], str):
            return web.json_response(completion_of([], self.prefill_reason))
        return web.json_response([completion_of([i]) for i, _ in enumerate(body["rid"])])


def test_a_long_prompt_is_computed_once_for_its_samples():
    server = Recorder()
    prompt = list(range(30)) * 3

    async def use(client):
        return await Generation(client, LIMITS).one(request(prompt, n=3), Under("5"))

    assert [c.tokens.tolist() for c in with_client(server, use)] == [[0], [1], [2]]
    prefill, samples = server.bodies
    assert prefill["input_ids"] == prompt
    assert prefill["sampling_params"] == {"max_new_tokens": 0}
    assert samples["input_ids"] == [prompt] * 3
    assert prefill["extra_key"] == samples["extra_key"] == "5"


@pytest.mark.parametrize(("tokens", "n"), [(90, 1), (10, 3)])
def test_what_shares_nothing_is_asked_at_once(tokens, n):
    server = Recorder()
    with_client(server, lambda client: Generation(client, LIMITS).one(request([1] * tokens, n=n)))
    assert len(server.bodies) == 1


def test_a_prompt_that_was_aborted_has_no_samples():
    server = Recorder(prefill_reason="abort")

    async def use(client):
        return await Generation(client, LIMITS).one(request([1] * 90, n=2))

    completions = with_client(server, use)
    assert [(c.finish_reason, len(c.tokens)) for c in completions] == [("abort", 0)] * 2
    assert len(server.bodies) == 1


@pytest.mark.parametrize(("made", "sent"), [(50, True), (51, False)])
def test_what_is_too_long_a_prompt_to_go_on_is_cut_again(made, sent):
    """SGLang takes prompts a little shorter than prompt and response together."""
    server = Recorder()
    asked = request([1] * (LIMITS.prompt_tokens - 50), n=2, max_new_tokens=60)
    rest = asked.continued([Prefix(1, np.ones(made, np.int32))])
    completions = with_client(server, lambda client: Generation(client, LIMITS).one(rest))
    assert [(c.finish_reason, len(c.tokens)) for c in completions] == [
        ("length", 1) if sent else ("abort", 0)
    ]
    assert len(server.bodies) == sent


@pytest.mark.parametrize("through_router", [False, True])
def test_one_that_is_too_long_to_go_on_does_not_hold_the_others_up(through_router):
    sent: list[int] = []  # tokens of what is to go on

    async def handler(http: web.Request) -> web.Response:
        body = await http.json()
        alone = isinstance(body["rid"], str)
        if alone and not through_router:
            return web.json_response(completion_of([]))  # the prompt, for all
        texts = [body["input_ids"]] if alone else body["input_ids"]
        sent.extend(len(text) for text in texts)
        answers = [completion_of([text[-1]]) for text in texts]
        return web.json_response(answers[0] if alone else answers)

    asked = request([1] * (LIMITS.prompt_tokens - 50), n=4, max_new_tokens=60)
    rest = asked.continued(
        [
            Prefix(sample, np.full(made, sample, np.int32))
            for sample, made in ((0, 3), (1, 51), (3, 50))
        ]
    )
    completions = with_client(
        handler, lambda client: Generation(client, LIMITS, through_router=through_router).one(rest)
    )
    assert [(c.finish_reason, c.tokens.tolist()) for c in completions] == [
        ("length", [0]),
        ("abort", []),
        ("length", [3]),
    ]
    assert sorted(sent) == [LIMITS.prompt_tokens - 47, LIMITS.prompt_tokens]


def test_a_router_is_asked_for_the_rest_of_each_response():
    bodies = []

    async def handler(asked):
        bodies.append(await asked.json())
        return web.json_response(completion_of([len(bodies)]))

    rest = request([7], n=3).continued(
        [Prefix(0, np.array([4], np.int32)), Prefix(2, np.array([5, 6], np.int32))]
    )
    completions = with_client(
        handler, lambda client: Generation(client, LIMITS, through_router=True).one(rest)
    )
    assert sorted(body["input_ids"] for body in bodies) == [[7, 4], [7, 5, 6]]
    assert sorted(body["sampling_params"]["max_new_tokens"] for body in bodies) == [6, 7]
    assert len(completions) == 2


def test_attempts_at_one_request_have_ids_of_their_own():
    server = Recorder()

    async def use(client):
        for generation in (Generation(client, LIMITS), Generation(client, LIMITS)):
            for _ in range(2):
                await generation.one(request([1], n=2))

    with_client(server, use)
    ids = [rid for body in server.bodies for rid in body["rid"]]
    assert len(set(ids)) == len(ids) == 8
    assert all(rid.startswith("0-0-0-0.") for rid in ids)


def test_nothing_is_sent_that_cannot_be_served():
    server = Recorder()
    with pytest.raises(UserError, match="outside the model's vocabulary"):
        with_client(server, lambda client: Generation(client, LIMITS).one(request([31])))
    assert server.bodies == []


def test_a_prefill_that_is_none():
    with pytest.raises(
        EngineFailed, match="engine engine-3 returned an invalid prefill for request 0-0-0-0"
    ):
        with_client(
            answering(body="[]"),
            lambda client: Generation(client, LIMITS).one(request([1] * 90, n=2)),
        )
