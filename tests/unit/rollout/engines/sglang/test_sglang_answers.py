"""Answers of an SGLang server: the valid ones are decoded, all others are refused."""

from __future__ import annotations

import base64
import copy

import numpy as np
import orjson
import pytest
from engine_kit import VOCAB, request

from rlcore.data.generation import Drafts, Prefix
from rlcore.data.sample import VersionSpan
from rlcore.errors import EngineFailed
from rollout.engines.checks import ExpertLayers, check_completion
from rollout.engines.sglang.answers import Limits, decode, read_digests

EXPERTS = ExpertLayers(num_layers=3, places=(0, 2), num_experts=8, topk=2)
LIMITS = Limits(VOCAB, prompt_tokens=20, total_tokens=30, sampling_mask_tokens=16, experts=EXPERTS)


def one(tokens=(5, 6, 7), reason=None, versions=((4, 0, 3),), **meta):
    """One completion as the server writes it."""
    return {
        "text": "abc",
        "output_ids": list(tokens),
        "meta_info": {
            "id": "x",
            "finish_reason": reason or {"type": "length", "length": 3},
            "prompt_tokens": 2,
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": "4",
            "weight_versions": [
                {"version": str(v), "start": start, "end": end} for v, start, end in versions
            ],
            "output_token_logprobs": [
                [-0.5 * (i + 1), token, None] for i, token in enumerate(tokens)
            ],
            **meta,
        },
    }


def read(answer, asked=None):
    """Decode an answer, and check it as the dispatcher does."""
    asked = asked or request([1, 2])
    made = decode(orjson.loads(orjson.dumps(answer)), asked, LIMITS, engine="engine-3")
    for place, completion in enumerate(made):
        check_completion(completion, asked, place, vocab_size=VOCAB)
    return made


def test_a_completion():
    [completion] = read([one()])
    assert completion.tokens.tolist() == [5, 6, 7]
    assert completion.tokens.dtype == np.int32
    assert completion.logprobs.tolist() == [-0.5, -1.0, -1.5]
    assert completion.logprobs.dtype == np.float32
    assert completion.finish_reason == "length"
    assert completion.versions == (VersionSpan(4, 0, 3),)
    assert completion.sampling_mask is completion.routed_experts is None


def drafted(correct: object, proposed: object, verifications: object):
    return {
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": verifications,
    }


def test_a_server_that_drafts_reports_how_well():
    assert read([one()])[0].drafts is None
    assert read([one(**drafted(3, 6, 2))])[0].drafts == Drafts(6, 3, 2)


@pytest.mark.parametrize("counts", [
    (7, 6, 2), (-1, 6, 2), (0, 1, 2), (0, 6, 0), (0.5, 6, 2), (0, "6", 2), (0, 6, None),
    (True, 6, 2),
])  # fmt: skip
def test_counts_of_drafts_that_cannot_be_are_refused(counts):
    with pytest.raises(ValueError, match="at most as many accepted as proposed"):
        read([one(**drafted(*counts))])
    missing = drafted(3, 6, 2)
    del missing["spec_num_proposed_drafts"]
    with pytest.raises(EngineFailed, match="no 'spec_num_proposed_drafts'"):
        read([one(**missing)])


def test_samples_come_in_order():
    completions = read(
        [one([7], versions=((4, 0, 1),)), one([8, 9], versions=((4, 0, 1), (5, 1, 2)))],
        request([1], n=2),
    )
    assert [c.tokens.tolist() for c in completions] == [[7], [8, 9]]
    assert completions[1].versions == (VersionSpan(4, 0, 1), VersionSpan(5, 1, 2))


@pytest.mark.parametrize(("reason", "expected"), [
    ({"type": "stop", "matched": 7}, "stop"), ({"type": "stop", "matched": "c"}, "stop"),
    ({"type": "abort", "message": "Aborted", "status_code": None}, "abort"),
])  # fmt: skip
def test_finish_reasons(reason, expected):
    assert read([one(reason=reason)])[0].finish_reason == expected


def test_aborted_before_the_first_token():
    asked = request([1, 2], sampling_mask=True, routed_experts=True, top_k=5)
    [completion] = read([one((), {"type": "abort"}, versions=((4, 0, 0),))], asked)
    assert (completion.finish_reason, completion.versions, len(completion.tokens)) == (
        "abort",
        (),
        0,
    )
    assert completion.sampling_mask is not None
    assert completion.routed_experts is not None
    assert len(completion.sampling_mask.counts) == len(completion.routed_experts) == 0


def test_a_logprob_may_be_rounded_up_a_little():
    rows = [[1e-5, 5, None], [-0.0, 6, None], [-1.0, 7, None]]
    assert read([one(output_token_logprobs=rows)])[0].logprobs[0] == np.float32(1e-5)


def encoded(array):
    return base64.b64encode(np.asarray(array, dtype="<i4").tobytes()).decode()


def test_routed_experts_of_the_layers_that_have_any():
    # 2 tokens of the prompt, 2 of 3 of the response
    chosen = np.arange(4 * 3 * 2).reshape(4, 3, 2) % 8
    [completion] = read([one(routed_experts=encoded(chosen))], request([1, 2], routed_experts=True))
    assert completion.routed_experts.dtype == np.int16
    assert np.array_equal(completion.routed_experts, chosen[:, [0, 2]])


def test_what_goes_on_has_the_experts_of_its_prefix_too_and_room_for_the_rest_alone():
    rest = request([1, 2], routed_experts=True, max_new_tokens=5).continued(
        [Prefix(0, np.array([9, 9], np.int32))]
    )
    # prompt, prefix, and 2 of 3 that are new
    chosen = np.arange(6 * 3 * 2).reshape(6, 3, 2) % 8
    [completion] = read([one(routed_experts=encoded(chosen))], rest)
    assert completion.tokens.tolist() == [5, 6, 7]
    assert np.array_equal(completion.routed_experts, chosen[:, [0, 2]])
    with pytest.raises(ValueError, match="3 tokens, expected 1 to 2"):
        read(
            [one()],
            request([1], max_new_tokens=4).continued([Prefix(0, np.array([9, 9], np.int32))]),
        )


SETS = {
    "output_token_sampling_mask": [[9, 5], [6], list(range(VOCAB))],
    "output_token_sampling_logprobs": [-0.2, 0.0, -3.0],
}


def test_keep_sets_with_the_logprobs_of_what_was_drawn_from():
    [completion] = read([one(**SETS)], request([1, 2], sampling_mask=True, top_k=16, top_p=0.5))
    assert completion.sampling_mask.counts.tolist() == [2, 1, 0]  # 0: the whole vocabulary
    assert completion.sampling_mask.tokens.tolist() == [5, 9, 6]
    assert completion.logprobs.tolist() == pytest.approx([-0.2, 0.0, -3.0])


def test_without_truncation_the_sets_are_the_vocabulary():
    [completion] = read([one()], request([1, 2], sampling_mask=True))
    assert completion.sampling_mask.counts.tolist() == [0, 0, 0]
    assert completion.logprobs.tolist() == [-0.5, -1.0, -1.5]


def without(*path):
    answer = copy.deepcopy(one())
    inner = answer
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return answer


def rows(*logprobs):
    return [[value, token, None] for value, token in zip(logprobs, (5, 6, 7))]


CORRUPT = {
    "nothing": (None, "NoneType, expected a list of 1"),
    "text": ("<html>502 Bad Gateway</html>", "str, expected a list"),
    "one object": (one(), "dict, expected a list"),
    "too many": ([one(), one()], "2 completions, expected a list of 1"),
    "none": ([], "0 completions"),
    "a number": ([17], "not subscriptable"),
    "no tokens": ([without("output_ids")], "no 'output_ids'"),
    "no meta_info": ([without("meta_info")], "no 'meta_info'"),
    "no versions": ([without("meta_info", "weight_versions")], "no 'weight_versions'"),
    "no log-probs": ([without("meta_info", "output_token_logprobs")], "log-probs of 0 tokens"),
    "no finish reason": ([without("meta_info", "finish_reason")], "no 'finish_reason'"),
    "not finished": ([one(reason={"type": None})], "finish reason None"),
    "finished by magic": ([one(reason={"type": "magic"})], "finish reason 'magic'"),
    "empty response": ([one((), versions=())], "0 tokens, expected 1 to 8"),
    "too long": ([one(range(9), versions=((4, 0, 9),))], "9 tokens, expected 1 to 8"),
    "outside": ([one((5, 6, VOCAB))], "tokens from 5 to 31 of a vocabulary of 31"),
    "negative": ([one((5, 6, -1))], "tokens from -1"),
    "fractions": ([one((5, 6, 7.5))], "float.* cannot be interpreted as an integer"),
    "tokens as text": ([one(("5", "6", "7"))], "str.* cannot be interpreted as an integer"),
    "a token of 64 bits": ([one((5, 6, 2**63))], "too large"),
    "another stop": (
        [one(reason={"type": "stop", "matched": 6})],
        "stop at token 6, but the last token is 7",
    ),
    "NaN": ([one(output_token_logprobs=rows(-1.0, float("nan"), -1.0))], "NoneType"),
    "positive": (
        [one(output_token_logprobs=rows(-1.0, 0.5, -1.0))],
        r"log-prob of trainable token 1 is 0\.5, expected a finite",
    ),
    "too few log-probs": ([one(output_token_logprobs=rows(-1.0, -1.0))], "log-probs of 2 tokens"),
    "log-probs of others": (
        [one(output_token_logprobs=[[-1.0, 9, None]] * 3)],
        "not the 3 of the response",
    ),
    "log-probs as text": ([one(output_token_logprobs=rows("a", "b", "c"))], "must be real number"),
    "never published": ([one(versions=(("default", 0, 3),))], "invalid literal for int.*default"),
    "a gap": ([one(versions=((4, 0, 1), (5, 2, 3)))], "do not cover 3 tokens"),
    "too short": ([one(versions=((4, 0, 2),))], "do not cover 3 tokens"),
    "beyond the end": ([one(versions=((4, 0, 4),))], "do not cover 3 tokens"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_what_is_no_completion_is_the_engines_failure(case):
    answer, why = CORRUPT[case]
    with pytest.raises((EngineFailed, ValueError), match=why):
        read(answer)


def test_the_error_names_engine_and_request():
    with pytest.raises(EngineFailed, match=r"engine engine-3 returned an invalid completion for"):
        read([17])


@pytest.mark.parametrize(("record", "why"), [
    (encoded(np.zeros((3, 3, 2))), "18 routed experts, expected 4 tokens x 3 layers x 2"),
    (encoded(np.full((4, 3, 2), 8)), "routed experts from 8 to 8 of a model of 8"),
    (encoded(np.full((4, 3, 2), -1)), "from -1"),
    ("*!", "0 routed experts"), (None, "no len"),
])  # fmt: skip
def test_corrupt_routed_experts(record, why):
    with pytest.raises(EngineFailed, match=why):
        read([one(routed_experts=record)], request([1, 2], routed_experts=True))


def test_missing_routed_experts():
    with pytest.raises(EngineFailed, match="no 'routed_experts'"):
        read([one()], request([1, 2], routed_experts=True))


@pytest.mark.parametrize(("name", "value", "why"), [
    ("output_token_sampling_mask", [[5], [6]], "2 keep-sets for 3 tokens"),
    ("output_token_sampling_mask", [[5], [6], [8]], "does not hold its own token"),
    ("output_token_sampling_mask", [[5], [6], [7, 31]], "keep-sets with tokens from 5 to 31"),
    ("output_token_sampling_logprobs", [-0.1, -0.1], r"logprobs of float32 \(2,\), expected"),
    ("output_token_sampling_logprobs", [-0.1, -0.1, 1.0], r"log-prob of trainable token 2 is 1\.0"),
])  # fmt: skip
def test_corrupt_keep_sets(name, value, why):
    with pytest.raises((EngineFailed, ValueError), match=why):
        read([one(**SETS | {name: value})], request([1, 2], sampling_mask=True, top_k=5))


# --- digests --------------------------------------------------------------------------------------


TOLD = '["1", "2"]'


@pytest.mark.parametrize("message", [TOLD, f"{TOLD} | {TOLD}"])
def test_digests_of_an_update_by_rank(message):
    """Each part of a server with data-parallel attention says the digests of all ranks."""
    assert read_digests("engine-0", {"message": message}) == ["1", "2"]


@pytest.mark.parametrize(
    "answer",
    [
        {"message": f"{TOLD} | {TOLD.replace('1', '9')}"},
        {"message": f"{TOLD} | "},
        {"message": f"{TOLD} | refused"},
        {"message": '{"xxh3:a": "1"}'},
        {"message": "1"},
        {"message": None},
        {},
        "no",
    ],
)
def test_digests_that_are_none_or_differ_are_the_engines_fault(answer):
    with pytest.raises(
        EngineFailed, match="answer with the digests of the received weights is invalid"
    ):
        read_digests("engine-0", answer)
