"""The sampling masks that the embedded engine records, of what each token was drawn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import VOCAB, request, with_engine

from rlcore.data.sample import SamplingMasks
from rollout.engines.embedded.client import (
    decode_completion,
    decode_request,
    encode_completion,
    encode_request,
)
from rollout.engines.embedded.sampling import SamplingMaskRecorder, keep_mask

KEPT: dict[str, Any] = {"temperature": 0.7, "top_p": 0.7, "top_k": 9, "sampling_mask": True}


def generate(folder, model, requests, **config):
    return with_engine(folder, model, lambda engine: engine.generate(requests), **config)


def expected(model, prompt, tokens, settings) -> tuple[list[list[int]], list[float]]:
    """By one forward pass over the whole response."""
    text = torch.tensor([[*prompt, *tokens]])
    logits = model(text).logits[0, len(prompt) - 1 : -1].detach() / settings["temperature"]
    mask = keep_mask(
        logits.softmax(-1),
        torch.full((len(tokens),), settings["top_p"]).double(),
        torch.full((len(tokens),), settings["top_k"]),
    )
    log_p = logits.masked_fill(~mask, -torch.inf).log_softmax(-1)
    sets = [row.nonzero()[:, 0].tolist() for row in mask]
    return sets, [float(log_p[i, token]) for i, token in enumerate(tokens)]


def listed(sets: SamplingMasks) -> list[list[int]]:
    return [part.tolist() for part in np.split(sets.tokens, sets.counts.cumsum()[:-1])]


def test_every_token_comes_with_what_it_was_drawn_from(folder, model):
    """Rows end at different times and leave the batch; prompts are of different lengths."""
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    asked = [
        request(p, draw=i, n=4, max_new_tokens=12, stop_token_ids=(0, 1, 2, 3), **KEPT)
        for i, p in enumerate(prompts)
    ]
    results = generate(folder, model, asked)
    lengths = set()
    for prompt, completions in zip(prompts, results):
        for completion in completions:
            sets, logprobs = expected(model, prompt, completion.tokens.tolist(), KEPT)
            assert listed(completion.sampling_mask) == sets
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-5)
            lengths.add(len(completion.tokens))
    assert len(lengths) > 2


def test_only_requests_that_ask_get_masks_and_the_whole_vocabulary_takes_no_room(folder, model):
    truncated = {**KEPT, "sampling_mask": False}
    whole = {"temperature": 0.7, "sampling_mask": True}
    asked = [
        request([1, 2], draw=0, **KEPT),
        request([1, 2], draw=1, **truncated),
        request([1, 2], draw=2, **whole),
        request([1, 2], draw=3, temperature=0.0, top_p=0.5, sampling_mask=True),
    ]
    (kept,), (plain,), (full,), (greedy,) = generate(folder, model, asked)
    assert 0 < kept.sampling_mask.counts.min() <= kept.sampling_mask.counts.max() <= 9
    assert plain.sampling_mask is None
    for one in (full, greedy):
        assert one.sampling_mask.counts.tolist() == [0] * len(one.tokens)
        assert len(one.sampling_mask.tokens) == 0
    (alone,) = generate(folder, model, [request([1, 2], draw=2, **whole)])[0]
    assert alone.sampling_mask.counts.tolist() == full.sampling_mask.counts.tolist()


def test_they_cross_the_border_of_a_process(folder, model):
    asked = request([1, 2], **KEPT)
    assert decode_request(encode_request(asked)).sampling == asked.sampling
    ((made,),) = generate(folder, model, [asked])
    back = decode_completion(encode_completion(made))
    assert back.sampling_mask.tokens.dtype == back.sampling_mask.counts.dtype == np.int32
    assert listed(back.sampling_mask) == listed(made.sampling_mask)
    assert (
        decode_completion(
            encode_completion(generate(folder, model, [request([1])])[0][0])
        ).sampling_mask
        is None
    )


def test_a_log_of_rows_that_come_and_go():
    log = SamplingMaskRecorder()
    everything = torch.ones(1, 4, dtype=torch.bool)
    alive = torch.tensor([True, True, False])
    mask = torch.tensor([[True, False, True, False]]).repeat(3, 1)
    # the third has ended, the second kept all
    log.add(torch.cat([mask[:1], everything, mask[:1]]), alive, None)
    log.add(None, alive[:2], torch.tensor([0, 1]))
    log.add(mask[:1], alive[:1], torch.tensor([1]))
    first, second, third = log.masks([2, 3, 0])
    assert (first.counts.tolist(), first.tokens.tolist()) == ([2, 0], [0, 2])
    assert (second.counts.tolist(), second.tokens.tolist()) == ([0, 0, 2], [0, 2])
    assert (third.counts.tolist(), third.tokens.tolist()) == ([], [])


@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 5])
def test_a_top_k_of_everything_truncates_nothing(folder, model, top_k):
    ((made,),) = generate(folder, model, [request([1], top_k=top_k, sampling_mask=True)])
    assert not made.sampling_mask.counts.any()
