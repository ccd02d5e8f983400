"""Responses that are aborted, at every place and several times, end as if they never had been."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rlcore.data.generation import Completion, Drafts, GenerateRequest, Prefix, SamplingParams
from rlcore.data.sample import SamplingMasks, VersionSpan
from rollout.collection.attempts import MAX_WITHOUT_TOKENS, PartialRollouts, join, shorten

PROMPT = [1, 2, 3]
LONGEST = 12
WORDS = "the cat sat"  # each character is a token


class Letters:
    """Token i is the character i."""

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, tokens))


def spelled(text: str) -> list[int]:
    return [ord(character) for character in text]


class AbortingEngine:
    """Makes what `reply` says, and aborts a response that reaches the limit of its call.

    The limit of call i is `limits[i]` tokens, and its tokens are made by version i. As SGLang does,
    it looks for an abort before it looks for the end of a response.
    """

    def __init__(
        self, reply: Callable[[int], list[int]], limits: Sequence[int | dict[int, int]]
    ) -> None:
        self.reply = reply
        self.limits = limits
        self.asked: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest) -> list[Completion]:
        call = len(self.asked)
        self.asked.append(request)
        assert np.array_equal(request.prompt, PROMPT)
        assert not request.prefixes or len(request.prefixes) == request.n
        limits: Any = self.limits[call] if call < len(self.limits) else LONGEST
        return [
            self._complete(
                request,
                place,
                sample,
                call,
                limits.get(sample, LONGEST) if isinstance(limits, dict) else limits,
            )
            for place, sample in enumerate(request.samples)
        ]

    def _complete(
        self, request: GenerateRequest, place: int, sample: int, version: int, limit: int
    ) -> Completion:
        before = request.made(place).tolist()
        whole = self.reply(sample)
        assert whole[: len(before)] == before, "it was given what there was"
        tokens, reason = self._ended(
            request.sampling, whole[len(before) :], request.sampling.max_new_tokens - len(before)
        )
        if len(tokens) >= limit:
            tokens = tokens[:limit]
            reason = "abort"
        made = len(tokens)
        first = len(before)
        places = np.arange(first, first + made)
        fed = np.full((len(PROMPT) + first + made - 1, 1, 1), version, dtype=np.int16)
        return Completion(
            np.array(tokens, np.int32),
            -(sample + 1) - places.astype(np.float32),
            reason,
            (VersionSpan(version, 0, made),) if made else (),
            SamplingMasks(
                np.array([t for t in tokens for t in (t, 1000)], np.int32),
                np.full(made, 2, np.int32),
            ),
            fed if made else np.zeros((0, 0, 0), np.int16),
        )

    @staticmethod
    def _ended(sampling: SamplingParams, tokens: list[int], room: int) -> tuple[list[int], Any]:
        """As an engine ends it, which sees stop strings in its own tokens alone."""
        for made in range(1, min(len(tokens), room) + 1):
            text = "".join(map(chr, tokens[:made]))
            if tokens[made - 1] in sampling.stop_token_ids or any(
                string in text for string in sampling.stop
            ):
                return tokens[:made], "stop"
        return tokens[:room], "length"


def ask(n: int = 1, *, first_sample: int = 0, **sampling: Any) -> GenerateRequest:
    settings = SamplingParams(**{"max_new_tokens": LONGEST, **sampling})
    return GenerateRequest(np.array(PROMPT, np.int32), settings, 5, n, first_sample=first_sample)


def whole(
    engine: Any, n: int = 1, *, first_sample: int = 0, **sampling: Any
) -> tuple[list[Completion], PartialRollouts]:
    partial: PartialRollouts = PartialRollouts(Letters())  # type: ignore[arg-type]
    request = ask(n, first_sample=first_sample, **sampling)
    return asyncio.run(partial.whole(engine, request)), partial


def assert_equal(one: Completion, other: Completion) -> None:
    """But for versions and experts, which say who made what."""
    assert (one.tokens.tolist(), one.finish_reason) == (other.tokens.tolist(), other.finish_reason)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert one.sampling_mask is not None
    assert other.sampling_mask is not None
    assert one.sampling_mask.to_record() == other.sampling_mask.to_record()
    assert one.routed_experts is not None
    assert one.routed_experts.shape == (len(PROMPT) + len(one.tokens) - 1, 1, 1)


ENDS = [
    {},
    {"max_new_tokens": 5},
    {"stop_token_ids": tuple(spelled("s"))},
    {"stop": ("at s", "never")},
    {"stop": ("cat",)},
    {"stop": ("sat",), "max_new_tokens": len(WORDS)},
    {"stop_token_ids": tuple(spelled("t")), "max_new_tokens": 7},
]


@pytest.mark.parametrize("sampling", ENDS)
def test_aborted_at_any_two_places_a_response_is_the_same(sampling):
    [uncut], untouched = whole(
        AbortingEngine(lambda _: spelled(WORDS), []), **{"max_new_tokens": len(WORDS), **sampling}
    )
    assert untouched.resumed_responses == untouched.resumed_tokens == 0
    made = len(uncut.tokens)
    for first in range(made + 1):
        for second in range(made + 1 - first):
            engine = AbortingEngine(lambda _: spelled(WORDS), [first, second])
            [found], partial = whole(engine, **{"max_new_tokens": len(WORDS), **sampling})
            assert_equal(found, uncut)
            spans = [
                (version, start)
                for version, start, end in ((0, 0, first), (1, first, first + second))
                if end > start
            ]
            if first + second < made:
                spans.append((2, first + second))
                assert partial.resumed_responses == 1 + (second > 0), (
                    "without a token it has not gone on"
                )
                assert partial.resumed_tokens == first * (second > 0) + first + second
            ends = [start for _, start in spans[1:]] + [made]
            assert found.versions == tuple(
                VersionSpan(v, start, end) for (v, start), end in zip(spans, ends)
            )


def test_a_token_keeps_the_experts_of_its_first_pass():
    [found], _ = whole(AbortingEngine(lambda _: spelled(WORDS), [0, 4, 2]), max_new_tokens=8)
    # The last token of a pass is fed in the next one only.
    expected = [1] * (len(PROMPT) + 3) + [2] * 2 + [3] * 2
    assert found.routed_experts is not None
    assert found.routed_experts[:, 0, 0].tolist() == expected


def test_a_stop_string_over_three_passes_ends_the_response_where_it_ends():
    # x a b | c | d ...
    engine = AbortingEngine(lambda _: spelled("xabcdef") + spelled("y" * 20), [3, 1])
    [found], _ = whole(engine, stop=("abcde",))
    assert (found.tokens.tolist(), found.finish_reason) == (spelled("xabcde"), "stop")
    assert found.versions == (VersionSpan(0, 0, 3), VersionSpan(1, 3, 4), VersionSpan(2, 4, 6))
    assert found.sampling_mask is not None
    assert found.sampling_mask.counts.tolist() == [2] * 6
    assert found.sampling_mask.tokens[::2].tolist() == spelled("xabcde")


def test_the_token_before_the_abort_may_have_been_the_last():
    """An engine that looks for an abort first has not looked for the end."""
    for sampling, reason in (
        ({"stop_token_ids": tuple(spelled("c"))}, "stop"),
        ({"stop": ("he c",)}, "stop"),
        ({"max_new_tokens": 5}, "length"),
    ):
        engine = AbortingEngine(lambda _: spelled(WORDS), [5])
        [found], partial = whole(engine, **sampling)
        assert (found.tokens.tolist(), found.finish_reason) == (spelled("the c"), reason)
        assert len(engine.asked) == 1
        assert partial.resumed_responses == 0


def replies(sample: int) -> list[int]:
    return spelled("abcdefghijklmnopqrstuvwxyz"[sample:][:LONGEST])


def test_only_aborted_samples_are_requested_again():
    engine = AbortingEngine(replies, [{0: 12, 1: 3, 3: 0, 4: 7}, {3: 2}])
    found, partial = whole(engine, n=5, stop_token_ids=tuple(spelled("l")))
    uncut, _ = whole(AbortingEngine(replies, []), n=5, stop_token_ids=tuple(spelled("l")))
    for one, other in zip(found, uncut, strict=True):
        assert_equal(one, other)
    asked = [(request.n, request.first_sample, list(request.samples)) for request in engine.asked]
    assert asked == [(5, 0, [0, 1, 2, 3, 4]), (3, 1, [1, 3, 4]), (1, 3, [3])]
    assert [prefix.tokens.tolist() for prefix in engine.asked[1].prefixes] == [
        replies(1)[:3],
        [],
        replies(4)[:7],
    ]
    assert len({request.rid for request in engine.asked}) == 3
    assert (partial.resumed_responses, partial.resumed_tokens) == (4, 3 + 0 + 7 + 2)
    assert [span.version for span in found[3].versions] == [1, 2]
    assert found[2].versions == (VersionSpan(0, 0, 10),)


def test_samples_keep_their_numbers_where_the_first_is_not_0():
    engine = AbortingEngine(replies, [{4: 3}])
    found, _ = whole(engine, 2, first_sample=3)
    assert [one.tokens.tolist() for one in found] == [replies(3), replies(4)]
    assert list(engine.asked[1].samples) == [4]


def test_an_engine_s_own_end_is_the_end():
    """It may stop at a token that the request does not name, be it the last there was room for."""
    answers = [("ab", "abort"), ("c", "stop")]

    async def generate(request: GenerateRequest) -> list[Completion]:
        text, reason = answers[1 if request.prefixes else 0]
        tokens = np.array(spelled(text), np.int32)
        return [
            Completion(
                tokens, np.zeros(len(text), np.float32), reason, (VersionSpan(1, 0, len(text)),)
            )
        ]

    for room in (3, 9):
        [found], _ = whole(generate, max_new_tokens=room)
        assert (found.tokens.tolist(), found.finish_reason) == (spelled("abc"), "stop")
    answers[0] = ("abc", "stop")
    [found], _ = whole(generate, max_new_tokens=3)
    assert found.finish_reason == "stop"


def test_tokens_cut_off_at_the_border_of_two_versions_leave_one():
    whole = Completion(
        np.arange(4, dtype=np.int32),
        np.zeros(4, np.float32),
        "length",
        (VersionSpan(1, 0, 2), VersionSpan(2, 2, 4)),
    )
    assert shorten(whole, 2, prompt=3).versions == (VersionSpan(1, 0, 2),)
    assert shorten(whole, 3, prompt=3).versions == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 3))


def test_neighbours_of_one_version_are_one_span():
    class OneVersion(AbortingEngine):
        def _complete(self, request, place, sample, version, limit):
            return super()._complete(request, place, sample, 7, limit)

    [found], _ = whole(OneVersion(lambda _: spelled(WORDS), [2, 3]), max_new_tokens=9)
    assert found.versions == (VersionSpan(7, 0, 9),)


def test_a_response_aborted_again_and_again_without_a_token_stays_aborted():
    engine = AbortingEngine(lambda _: spelled(WORDS), [2] + [0] * 100)
    [found], partial = whole(engine)
    assert (found.tokens.tolist(), found.finish_reason) == (spelled("th"), "abort")
    assert len(engine.asked) == 1 + MAX_WITHOUT_TOKENS
    assert (partial.resumed_responses, partial.resumed_tokens) == (0, 0)


def test_one_sample_that_gets_on_is_enough_for_the_others_to_wait():
    engine = AbortingEngine(replies, [{0: 0, 1: 1}] * (MAX_WITHOUT_TOKENS + 2))
    found, _ = whole(engine, n=2)
    assert [(one.tokens.tolist(), one.finish_reason) for one in found] == [
        (replies(0), "length"),
        (replies(1), "length"),
    ]


def test_a_token_now_and_then_is_enough_to_go_on():
    limits = ([0] * (MAX_WITHOUT_TOKENS - 1) + [1]) * 5
    engine = AbortingEngine(lambda _: spelled(WORDS), limits)
    [found], _ = whole(engine, max_new_tokens=7)
    assert (found.tokens.tolist(), found.finish_reason) == (spelled(WORDS[:7]), "length")
    assert len(engine.asked) == len(limits) + 1


def test_without_records_there_are_none_afterwards():
    class Plain(AbortingEngine):
        def _complete(self, *arguments):
            made = super()._complete(*arguments)
            return Completion(made.tokens, made.logprobs, made.finish_reason, made.versions)

    [found], _ = whole(Plain(lambda _: spelled("xabcdefgh"), [3]), stop=("abcd",))
    assert (found.sampling_mask, found.routed_experts) == (None, None)
    assert found.tokens.tolist() == spelled("xabcd")


async def test_a_cancelled_call_makes_no_more_requests():
    engine = AbortingEngine(lambda _: spelled(WORDS), [3])
    waits = asyncio.Event()

    async def generate(request: GenerateRequest) -> list[Completion]:
        if request.prefixes:
            waits.set()
            await asyncio.sleep(600)
        return await engine(request)

    call = asyncio.ensure_future(PartialRollouts(Letters()).whole(generate, ask()))
    await asyncio.wait_for(waits.wait(), 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(engine.asked) == 1


def test_errors_of_the_second_pass_are_the_callers():
    async def generate(request: GenerateRequest) -> list[Completion]:
        if request.prefixes:
            raise RuntimeError("the engine is closed")
        return await AbortingEngine(lambda _: spelled(WORDS), [3])(request)

    with pytest.raises(RuntimeError, match="the engine is closed"):
        whole(generate)


def test_a_workflow_gives_no_prefixes_of_its_own():
    begun = ask().continued([Prefix(0, np.array([4], np.int32))])
    with pytest.raises(ValueError, match=r"leave GenerateRequest\.prefixes empty"):
        asyncio.run(PartialRollouts(Letters()).whole(AbortingEngine(replies, []), begun))


def test_counts_of_drafts_add_up_over_the_parts() -> None:
    def part(drafts: Drafts | None) -> Completion:
        one = np.ones(1, dtype=np.int32)
        return Completion(
            one, -one.astype(np.float32), "length", (VersionSpan(1, 0, 1),), drafts=drafts
        )

    first = Drafts(proposed=6, accepted=4, verifications=2)
    # An abort may come before the first verification.
    for head, tail, whole in (
        (first, Drafts(3, 1, 1), Drafts(9, 5, 3)),
        (first, None, first),
        (None, first, first),
        (None, None, None),
    ):
        assert join(part(head), part(tail)).drafts == whole
