"""The requests that are sent to an SGLang server, and those that are refused before."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import orjson
import pytest
from engine_kit import VOCAB, request, tiny_qwen3

from rlcore.data.generation import STOP_MARGIN, GenerateRequest, Prefix, SamplingParams
from rlcore.errors import EngineFailed, UserError
from rollout.engines.checks import ExpertLayers
from rollout.engines.sglang.answers import Limits
from rollout.engines.sglang.generation import (
    Generation,
    Under,
    check_request,
    encode,
    encode_sampling,
    rid,
    seed,
    stop_pattern,
)

LIMITS = Limits(vocab_size=VOCAB, prompt_tokens=20, total_tokens=30, sampling_mask_tokens=16)


def body_of(asked: GenerateRequest, attempt: str = "0", cache_key: str | None = None) -> dict:
    """The body as the server reads it."""
    return orjson.loads(
        orjson.dumps(encode(asked, attempt, Under(cache_key)), option=orjson.OPT_SERIALIZE_NUMPY)
    )


def test_samples_of_a_prompt_have_ids_and_seeds_of_their_own():
    body = body_of(request([3, 4], draw=7, n=3, first_sample=2), "ab")
    assert body["input_ids"] == [[3, 4]] * 3
    assert body["rid"] == ["0-7-2-0.ab.2.", "0-7-2-0.ab.3.", "0-7-2-0.ab.4."]
    seeds = [params["sampling_seed"] for params in body["sampling_params"]]
    assert len(set(seeds)) == 3
    assert all(0 <= number < 2**63 for number in seeds)
    assert body["return_logprob"] is True
    assert not {"return_routed_experts", "return_sampling_mask"} & body.keys()
    assert body["extra_key"] is None


def test_a_seed_is_a_function_of_the_address_alone():
    asked = request([1], draw=7)
    assert seed(asked, 2) == seed(request([5, 6], draw=7, max_new_tokens=3), 2)
    others = [
        seed(asked, 3),
        seed(request([1], draw=8), 2),
        *(
            seed(GenerateRequest(asked.prompt, asked.sampling, 7, **other), 2)
            for other in ({"turn": 1}, {"seed": 1})
        ),
    ]
    assert len({seed(asked, 2), *others}) == 5


def test_what_goes_on_is_asked_for_behind_its_prefix():
    """As the sample that it is: its own seed, and no more tokens than it has left."""
    asked = request([3, 4], draw=7, n=4, max_new_tokens=9)
    rest = asked.continued(
        [Prefix(1, np.array([5, 6, 7], np.int32)), Prefix(3, np.zeros(0, np.int32))]
    )
    whole = body_of(asked)
    body = body_of(rest, "ab")
    assert body["input_ids"] == [[3, 4, 5, 6, 7], [3, 4]]
    assert body["rid"] == ["0-7-1-0.ab.1.", "0-7-1-0.ab.3."]
    assert [params["max_new_tokens"] for params in body["sampling_params"]] == [6, 9]
    seeds = [params["sampling_seed"] for params in whole["sampling_params"]]
    assert [params["sampling_seed"] for params in body["sampling_params"]] == [seeds[1], seeds[3]]
    assert body_of(rest.alone(0))["input_ids"] == [[3, 4, 5, 6, 7]]


def test_no_id_is_the_beginning_of_another():
    ids = [
        rid(request([1], draw=draw, first_sample=first), f"{attempt}.{sample}")
        for draw in (1, 11)
        for first in (0, 1)
        for attempt in ("a", "ab")
        for sample in (1, 10, 100)
    ]
    assert len(set(ids)) == len(ids)
    assert not [(a, b) for a in ids for b in ids if a != b and b.startswith(a)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {},
            {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "ignore_eos": True,
                "stop_token_ids": (),
            },
        ),
        (
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
        ),
        (
            {"temperature": 0.0, "top_p": 0.9, "top_k": 5},
            {"temperature": 0.0, "top_p": 1.0, "top_k": -1},
        ),
        ({"top_k": 0}, {"top_k": -1}),
        ({"stop_token_ids": (4, 5)}, {"stop_token_ids": (4, 5), "ignore_eos": False}),
        ({"stop": ("a.b",)}, {"stop_regex": [stop_pattern("a.b")], "ignore_eos": True}),
        (
            {"max_new_tokens": 9},
            {
                "max_new_tokens": 9,
                "min_new_tokens": 0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
            },
        ),
    ],
)
def test_sampling_parameters(given, expected):
    params = encode_sampling(SamplingParams(**{"max_new_tokens": 8, **given}))
    assert {name: params[name] for name in expected} == expected
    assert params.keys() == encode_sampling(SamplingParams(max_new_tokens=1)).keys()


def test_records_are_asked_for_where_there_are_any():
    assert body_of(request([1], routed_experts=True))["return_routed_experts"] is True
    assert body_of(request([1], sampling_mask=True, top_k=5))["return_sampling_mask"] is True
    assert "return_sampling_mask" not in body_of(request([1], sampling_mask=True))
    assert "return_sampling_mask" not in body_of(
        request([1], sampling_mask=True, top_k=5, temperature=0.0)
    )
    assert body_of(request([1]), cache_key="7")["extra_key"] == "7"


@pytest.mark.parametrize(
    "prompt", [np.array([1, 2], dtype=np.int64), np.array([1, 9, 2, 9], dtype=np.int32)[::2]]
)
def test_prompts_of_any_array(prompt):
    assert body_of(GenerateRequest(prompt, SamplingParams(max_new_tokens=1), draw=0))[
        "input_ids"
    ] == [[1, 2]]


@pytest.mark.parametrize("text", ["a", "Question:", "a.b*(c)|d\\", " \n\n", "。", "ü€"])
def test_a_stop_pattern_matches_the_string_alone_and_looks_far_enough_back(text):
    pattern = stop_pattern(text)
    assert re.search(pattern, f"x{text}y")[0] == text
    assert re.search(pattern, f"x{text[:-1]}") is None
    assert re.search(pattern, "a" * 99 if text != "a" else "b" * 99) is None
    window = int(re.search(r"\{(\d+)\}$", pattern)[1])
    # tokens: one stands for at least one byte
    assert window == len(text.encode()) + STOP_MARGIN


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (request([]), "at least one token"),
        (request([1, VOCAB]), "a prompt token lies outside the model's vocabulary of 31"),
        (request([-1]), "outside"),
        (request([1], max_new_tokens=0), "max_new_tokens is 0"),
        (
            request([1], max_new_tokens=2).continued([Prefix(0, np.array([1, 2], np.int32))]),
            "a prefix has all of max_new_tokens 2",
        ),
        (
            request([1] * 20, max_new_tokens=11),
            "20 tokens and max_new_tokens 11 exceed what the server takes .* of 30",
        ),
        (request([1] * 21, max_new_tokens=1), "the prompt has 21 tokens, the server takes 20"),
        (request([1], top_p=0.0), "top_p"),
        (request([1], top_p=1.5), "top_p"),
        (request([1], temperature=-1.0), "temperature"),
        (request([1], temperature=float("nan")), "temperature"),
        (request([1], temperature=float("inf")), "temperature"),
        (request([1], temperature=1e-7), "say temperature 0"),
        (
            request([1], temperature=0.7, top_k=1),
            "top_k 1 at temperature 0.7 is greedy: say temperature 0",
        ),
        (request([1], stop_token_ids=(3, 31)), "stop token 31 lies outside"),
        (request([1], stop=("a",) * 33), "32 stop strings, got 33"),
        (request([1], stop=("",)), "stop string '' is empty"),
        (request([1], stop=("x" * 250,)), "longer than SGLang takes"),
        (request([1], routed_experts=True), "rollout.engine.server.enable_return_routed_experts"),
        (
            request([1], sampling_mask=True, top_p=0.9),
            r"top_k of 2 to 16, got -1: set rollout\.sampling\.top_k",
        ),
        (request([1], sampling_mask=True, top_k=17), "of 2 to 16, got 17"),
    ],
)
def test_what_cannot_be_served_is_refused(asked, why):
    with pytest.raises(UserError, match=why):
        check_request(asked, LIMITS)


@pytest.mark.parametrize(
    "asked",
    [
        request([0, 30], max_new_tokens=28),
        request([1] * 20, max_new_tokens=10),
        request([1], temperature=0.0, top_k=1),
        request([1], top_k=1),
        request([1], sampling_mask=True),
        request([1], sampling_mask=True, temperature=0.0, top_p=0.5),
        request([1], sampling_mask=True, top_k=16, top_p=0.5),
        request([1], stop=("a",) * 32, stop_token_ids=(0, 30)),
    ],
)
def test_what_can_be_served_is_not(asked):
    check_request(asked, LIMITS)


def test_an_answer_may_be_as_long_as_what_was_asked_for():
    """Beyond that it has no end, and is not gathered."""
    longest = []

    class Client:
        name = "engine-3"

        async def post(self, route, body, *, limit, answer_bytes):
            longest.append(answer_bytes)
            raise EngineFailed(route)

    for asked in (request([1], n=2), request([1], n=4), request([1], n=2, max_new_tokens=1)):
        with pytest.raises(EngineFailed, match="/generate"):
            asyncio.run(Generation(Client(), LIMITS).one(asked))
    assert longest[1] == 2 * longest[0]
    assert longest[2] < longest[0] < 1 << 20


INFO = {
    "max_req_input_len": 1018,
    "sampling_mask_max_tokens": 4096,
    "enable_return_routed_experts": False,
}


def test_limits_are_the_servers(folder):
    assert Limits.of(INFO, str(folder), "e") == Limits(VOCAB, 1017, 1022, 4096)
    dense = Limits.of(INFO | {"enable_return_routed_experts": True}, str(folder), "e")
    assert dense.experts is None


@pytest.mark.parametrize(
    "info",
    [None, "nginx", {}, INFO | {"max_req_input_len": None}, INFO | {"max_req_input_len": "much"}],
)
def test_what_is_no_sglang_is_told(folder, info):
    with pytest.raises(
        EngineFailed, match=r"engine e: its /server_info is not that of sglang 0\.5\.23"
    ):
        Limits.of(info, str(folder), "e")


@pytest.mark.parametrize(("settings", "places"), [
    ({"mlp_only_layers": [1]}, (0, 2)), ({"decoder_sparse_step": 2}, (1,)), ({}, (0, 1, 2)),
])  # fmt: skip
def test_layers_with_experts(tmp_path, settings, places):
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCAB,
        **settings,
    ).save_pretrained(tmp_path)
    assert ExpertLayers.of(str(tmp_path)) == ExpertLayers(3, places, 4, 2)


def test_a_dense_model_has_none(tmp_path):
    tiny_qwen3().config.save_pretrained(tmp_path)
    assert ExpertLayers.of(str(tmp_path)) is None
