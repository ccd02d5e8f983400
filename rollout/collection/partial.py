"""Partial rollouts: a response that was cut goes on from what there is of it.

A publication with `rollout.on_update: abort` ends the responses in flight, as does anybody else who
    has an engine abort them.
They are asked for again, with what they have as a prefix, until they end of themselves: a workflow
    sees whole completions.

    cut         a b c           made by version 4
    the rest          d e       made by version 5, which was given prompt a b c, and room for max_new_tokens - 3
    whole       a b c d e       versions 4 4 4 5 5; every token has the log-prob that it was drawn with
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlcore.data.generation import Completion, Generate, GenerateRequest, Prefix, SamplingParams
from rlcore.data.routed_experts import join_experts
from rlcore.data.sample import VersionSpan
from rlcore.data.sampling_masks import SamplingMasks
from rollout.engines.embedded.stopping import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# times in a row that a request is cut before any of its responses got a token
MOST_IN_VAIN = 8


class PartialRollouts:
    """Has cut responses go on, and counts them.

    Args:
        tokenizer: for stop strings that begin before a cut and end behind it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.resumed_responses = 0  # each time that one went on
        self.resumed_tokens = 0  # which they had then, and did not have to make again

    async def whole(self, generate: Generate, request: GenerateRequest) -> list[Completion]:
        """The completions of `request`. Only what engines cut again and again without a new token
        still says "abort".
        """
        if request.prefixes:
            raise ValueError(
                "a workflow asks for whole responses: leave GenerateRequest.prefixes alone"
            )
        found = [self._settled(request.sampling, part) for part in await generate(request)]
        in_vain = 0
        while in_vain < MOST_IN_VAIN and (
            cut := [i for i, one in enumerate(found) if one.finish_reason == "abort"]
        ):
            rest = await generate(
                request.going_on([Prefix(request.samples[i], found[i].tokens) for i in cut])
            )
            for i, part in zip(cut, rest, strict=True):
                if len(part.tokens):
                    self.resumed_responses += 1
                    self.resumed_tokens += len(found[i].tokens)
                found[i] = self._settled(request.sampling, self._joined(request, found[i], part))
            in_vain = 0 if any(len(part.tokens) for part in rest) else in_vain + 1
        return found

    def _settled(self, sampling: SamplingParams, found: Completion) -> Completion:
        """With its real reason where the token before the cut was its last one: SGLang looks for
        that after an abort.
        """
        made = len(found.tokens)
        if found.finish_reason != "abort" or not made:
            return found
        if int(found.tokens[-1]) in sampling.stop_token_ids or self._first_stop(
            sampling, found.tokens, made - 1
        ):
            return replace(found, finish_reason="stop")
        return replace(found, finish_reason="length") if made == sampling.max_new_tokens else found

    def _joined(self, request: GenerateRequest, head: Completion, tail: Completion) -> Completion:
        """Engines look for stop strings in what they make: one that begins in the head ends the
        response here.
        """
        whole = join(head, tail)
        end = self._first_stop(request.sampling, whole.tokens, len(head.tokens))
        return whole if end is None else shorten(whole, end, prompt=len(request.prompt))

    def _first_stop(
        self, sampling: SamplingParams, tokens: NDArray[np.int32], seam: int
    ) -> int | None:
        """The least number of tokens, above `seam`, with which a stop string is there that reaches
        back to it.
        """
        if not sampling.stop:
            return None
        strings = StopStrings(sampling.stop, self._tokenizer)
        for end in range(seam + 1, min(seam + strings.window, len(tokens)) + 1):
            if strings.hit(tokens[max(0, end - strings.window) : end].tolist()):
                return end
        return None


def join(head: Completion, tail: Completion) -> Completion:
    """One completion; a token whose experts are known twice keeps those with which its successor
    was drawn first.
    """
    size = len(head.tokens)
    sets = [part.sampling_mask for part in (head, tail) if part.sampling_mask is not None]
    routed = [part.routed_experts for part in (head, tail) if part.routed_experts is not None]
    return Completion(
        tokens=np.concatenate([head.tokens, tail.tokens]),
        logprobs=np.concatenate([head.logprobs, tail.logprobs]),
        finish_reason=tail.finish_reason,
        versions=merged(
            [
                *head.versions,
                *(VersionSpan(s.version, s.start + size, s.end + size) for s in tail.versions),
            ]
        ),
        sampling_mask=SamplingMasks.joined(sets) if sets else None,
        routed_experts=join_experts(routed) if routed else None,
    )


def merged(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The same tokens, neighbours of one version in one span."""
    result: list[VersionSpan] = []
    for span in spans:
        if result and result[-1].version == span.version:
            span = VersionSpan(span.version, result.pop().start, span.end)
        result.append(span)
    return tuple(result)


def shorten(whole: Completion, length: int, *, prompt: int) -> Completion:
    """Its first `length` tokens, which a stop string ended. `prompt`: tokens of the prompt."""
    sets = whole.sampling_mask
    routed = whole.routed_experts
    counts = None if sets is None else sets.counts[:length]
    return Completion(
        tokens=whole.tokens[:length],
        logprobs=whole.logprobs[:length],
        finish_reason="stop",
        versions=tuple(
            VersionSpan(s.version, s.start, min(s.end, length))
            for s in whole.versions
            if s.start < length
        ),
        sampling_mask=(
            None
            if sets is None or counts is None
            else SamplingMasks(sets.tokens[: counts.sum()], counts)
        ),
        routed_experts=None if routed is None else routed[: prompt + length - 1],
    )
