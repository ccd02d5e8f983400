"""Requests to engines and their completions, and how an engine pauses and frees memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlcore.data.sample import Experts, FinishReason, SamplingMasks, VersionSpan

# A window cut inside a character or word decodes wrongly only within this many tokens of its start.
STOP_MARGIN = 4


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled.

    Log-probs are those of `logits / temperature` over the full vocabulary; `temperature` 0 is
    greedy, with log-probs at temperature 1.

    With `sampling_mask`, log-probs are those of the sampled distribution, over the tokens that
    top-k and top-p left, and the completion holds these tokens; greedy responses are unchanged.
    With `routed_experts`, the completion holds the experts that the routers chose for every token
    fed to the engine: the prompt, and the response except its last token.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    sampling_mask: bool = False
    routed_experts: bool = False


@dataclass(frozen=True)
class Prefix:
    """The tokens that an interrupted response has so far."""

    sample: int
    tokens: NDArray[np.int32]  # [p]; empty if interrupted before the first token


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt and `n` samples of it.

    The address (seed, draw, sample, turn, token position) determines every random number.

    With `policy`, the adapters of that name in `rollout.policies` answer, not the trained policy.

    With `prefixes`, the n samples continue these prefixes, and a completion holds only the new
    tokens. Positions and `max_new_tokens` count from the beginning of the response, as if it had
    never been interrupted.
    """

    prompt: NDArray[np.int32]  # [P]
    sampling: SamplingParams
    draw: int
    n: int = 1
    first_sample: int = 0  # index of the first of the n samples
    turn: int = 0
    seed: int = 0
    prefixes: tuple[Prefix, ...] = ()  # n prefixes or none; each shorter than max_new_tokens
    policy: str | None = None

    @property
    def rid(self) -> str:
        """The id of the request: the address of its first random number, and another policy."""
        address = f"{self.seed}-{self.draw}-{self.first_sample}-{self.turn}"
        return address if self.policy is None else f"{address}-{self.policy}"

    @property
    def samples(self) -> Sequence[int]:
        """The index of each of the n samples."""
        if self.prefixes:
            return [prefix.sample for prefix in self.prefixes]
        return range(self.first_sample, self.first_sample + self.n)

    def made(self, place: int) -> NDArray[np.int32]:
        """Return the tokens that response number `place` of the n has so far, [p]."""
        return self.prefixes[place].tokens if self.prefixes else np.zeros(0, dtype=np.int32)

    def continued(self, prefixes: Sequence[Prefix]) -> GenerateRequest:
        """Return the request that continues some of the responses."""
        return replace(
            self, n=len(prefixes), first_sample=prefixes[0].sample, prefixes=tuple(prefixes)
        )

    def alone(self, place: int) -> GenerateRequest:
        """Return the request for response number `place` alone."""
        return replace(
            self, n=1, first_sample=self.samples[place], prefixes=self.prefixes[place : place + 1]
        )


@dataclass(frozen=True)
class Drafts:
    """Counts of speculative decoding: a draft model proposes tokens, which the model verifies.

    A verification is one forward pass of the model, which commits the proposed tokens that it
    accepts and one token of its own.
    """

    proposed: int = 0
    accepted: int = 0
    verifications: int = 0

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(
            self.proposed + other.proposed,
            self.accepted + other.accepted,
            self.verifications + other.verifications,
        )


@dataclass(frozen=True)
class Completion:
    """The completion of one sample of a request."""

    tokens: NDArray[np.int32]  # [m], the stop token included
    logprobs: NDArray[np.float32]  # [m]
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]  # cover [0, m)
    # m sets, if `SamplingParams.sampling_mask` asks for them.
    sampling_mask: SamplingMasks | None = None
    # [at most P + m - 1, layers with experts, k], if `SamplingParams.routed_experts` asks for them.
    routed_experts: Experts | None = None
    # Prompt tokens that were in the engine's cache; None: the engine does not report them.
    cached_tokens: int | None = None
    # None: the engine decodes without a draft model.
    drafts: Drafts | None = None


PauseMode = Literal["drain", "retract", "in_place", "abort"]

# The parts of an engine's memory on its device.
MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]

Generate = Callable[[GenerateRequest], Awaitable[list[Completion]]]


class StopStrings:
    """Detects that the text of a response contains one of its stop strings.

    A token stands for at least one byte, so a string of b bytes that the newest token completes
    lies in the last b tokens: only this window is decoded, however long the response is.
    """

    def __init__(self, strings: tuple[str, ...], tokenizer: Any) -> None:
        self.strings = strings
        self.tokenizer = tokenizer
        self.window = max(len(text.encode()) for text in strings) + STOP_MARGIN

    def hit(self, tail: list[int]) -> bool:
        """Whether a response whose last `window` tokens are `tail` holds a stop string."""
        text = self.tokenizer.decode(
            tail, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(string in text for string in self.strings)
