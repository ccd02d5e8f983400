"""Partial rollouts: an aborted response goes on from the tokens that it has.

A publication with `rollout.on_update: abort` aborts the responses in flight, and an engine may be
told to by others. They are requested again with their tokens as a prefix until they end by
themselves, so a workflow sees whole completions.

    aborted     a b c           made by version 4
    the rest          d e       made by version 5 from prompt a b c, with max_new_tokens - 3
    whole       a b c d e       versions 4 4 4 5 5; each token has the log-prob of its drawing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlcore.data.generation import Completion, Generate, GenerateRequest, Prefix, SamplingParams
from rlcore.data.sample import SamplingMasks, VersionSpan, join_experts
from rollout.engines.embedded.decoding import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# how often in a row a request may be aborted before any of its responses got a token
MOST_IN_VAIN = 8


class PartialRollouts:
    """Completes aborted responses, and counts them.

    Args:
        tokenizer: for stop strings that begin before an abort and end behind it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.resumed_responses = 0  # counted each time that a response went on
        self.resumed_tokens = 0  # tokens that those had, and did not have to make again

    async def whole(self, generate: Generate, request: GenerateRequest) -> list[Completion]:
        """The whole completions of `request`.

        Only a completion that engines abort again and again without a new token still says "abort".
        """
        if request.prefixes:
            raise ValueError(
                "a workflow asks for whole responses: leave GenerateRequest.prefixes alone"
            )
        found = [self._settled(request.sampling, part) for part in await generate(request)]
        in_vain = 0
        while in_vain < MOST_IN_VAIN and (
            aborted := [i for i, one in enumerate(found) if one.finish_reason == "abort"]
        ):
            rest = await generate(
                request.going_on([Prefix(request.samples[i], found[i].tokens) for i in aborted])
            )
            for i, part in zip(aborted, rest, strict=True):
                if len(part.tokens):
                    self.resumed_responses += 1
                    self.resumed_tokens += len(found[i].tokens)
                found[i] = self._settled(request.sampling, self._joined(request, found[i], part))
            in_vain = 0 if any(len(part.tokens) for part in rest) else in_vain + 1
        return found

    def _settled(self, sampling: SamplingParams, found: Completion) -> Completion:
        """With its real finish reason where the last token before the abort ended it.

        SGLang looks for that only after the abort.
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
        """Both parts as one, ended at a stop string that begins in the head.

        An engine looks for stop strings only in the tokens that it makes.
        """
        whole = join(head, tail)
        end = self._first_stop(request.sampling, whole.tokens, len(head.tokens))
        return whole if end is None else shorten(whole, end, prompt=len(request.prompt))

    def _first_stop(
        self, sampling: SamplingParams, tokens: NDArray[np.int32], seam: int
    ) -> int | None:
        """The least number of tokens above `seam` that end in a stop string begun before `seam`."""
        if not sampling.stop:
            return None
        strings = StopStrings(sampling.stop, self._tokenizer)
        for end in range(seam + 1, min(seam + strings.window, len(tokens)) + 1):
            if strings.hit(tokens[max(0, end - strings.window) : end].tolist()):
                return end
        return None


def join(head: Completion, tail: Completion) -> Completion:
    """Both parts as one completion.

    A token whose experts are known twice keeps those with which its successor was drawn first.
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
        cached_tokens=head.cached_tokens,
    )


def merged(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The spans with neighbours of the same version merged into one."""
    result: list[VersionSpan] = []
    for span in spans:
        if result and result[-1].version == span.version:
            span = VersionSpan(span.version, result.pop().start, span.end)
        result.append(span)
    return tuple(result)


def shorten(whole: Completion, length: int, *, prompt: int) -> Completion:
    """The first `length` tokens, which a stop string ended. `prompt`: tokens of the prompt."""
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
        cached_tokens=whole.cached_tokens,
    )
