"""Answers of engines that cannot be right are refused, whoever wrote the engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rlcore.data.generation import Completion, GenerateRequest, Prefix, SamplingParams
from rlcore.data.sample import Experts, SamplingMasks, VersionSpan
from rollout.engines.checks import check_completion, check_records

VOCAB = 31
LAYERS = 2
TOP_K = 2


def asked(*, made: int = 0, masks: bool = False, routed: bool = False) -> GenerateRequest:
    """A prompt of three tokens, of whose response `made` tokens are there already."""
    sampling = SamplingParams(max_new_tokens=5, sampling_mask=masks, routed_experts=routed)
    prefixes = (Prefix(0, np.zeros(made, dtype=np.int32)),) if made else ()
    return GenerateRequest(np.arange(3, dtype=np.int32), sampling, draw=0, prefixes=prefixes)


def answered(*, masks: SamplingMasks | None = None, routed: Experts | None = None) -> Completion:
    """Two tokens, 4 and 5."""
    tokens = np.array([4, 5], dtype=np.int32)
    return Completion(
        tokens,
        np.zeros(2, dtype=np.float32),
        "length",
        (VersionSpan(1, 0, 2),),
        sampling_mask=masks,
        routed_experts=routed,
    )


def sets(*each: Sequence[int]) -> SamplingMasks:
    flat = [token for one in each for token in one]
    counts = [len(one) for one in each]
    return SamplingMasks(np.array(flat, dtype=np.int32), np.array(counts, dtype=np.int32))


def experts(tokens: int) -> Experts:
    return np.zeros((tokens, LAYERS, TOP_K), dtype=np.int16)


def test_keep_sets_hold_the_tokens_that_were_drawn_from_them() -> None:
    check_completion(answered(masks=sets([4, 7], [5])), asked(), 0, vocab_size=VOCAB)
    check_completion(answered(masks=sets([], [])), asked(), 0, vocab_size=VOCAB)
    for wrong in (sets([7], [5]), sets([4, 7])):
        with pytest.raises(ValueError, match="keep-sets"):
            check_completion(answered(masks=wrong), asked(), 0, vocab_size=VOCAB)
    with pytest.raises(ValueError, match=f"keep-sets with tokens from 4 to {VOCAB}"):
        check_completion(answered(masks=sets([4, VOCAB], [5])), asked(), 0, vocab_size=VOCAB)


def test_records_that_were_asked_for_are_there() -> None:
    check_records(answered(), asked(), 0, None)
    check_records(answered(masks=sets([4], [5])), asked(masks=True), 0, None)
    with pytest.raises(ValueError, match="no keep-sets, which were asked for"):
        check_records(answered(), asked(masks=True), 0, None)
    with pytest.raises(ValueError, match="no routed experts, which were asked for"):
        check_records(answered(), asked(routed=True), 0, None)


@pytest.mark.parametrize("made", [0, 2])
def test_experts_are_those_of_every_token_that_the_engine_was_fed(made: int) -> None:
    """The prompt, what the response had before, and the response except its last token."""
    fed = 3 + made + 2 - 1
    check_records(answered(routed=experts(fed)), asked(made=made, routed=True), 0, None)
    for wrong in (fed - 1, fed + 1):
        with pytest.raises(ValueError, match=rf"expected int16 \({fed}, layers"):
            check_records(answered(routed=experts(wrong)), asked(made=made, routed=True), 0, None)
