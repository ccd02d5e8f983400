"""The limits of one server. A request beyond them is refused here, before it is sent.

A token outside the vocabulary would end the server. A request that exceeds its memory would be cut
short without a word. A setting that it does not know would be ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from re import escape
from typing import Any

from rlcore.data.generation import GenerateRequest, SamplingParams
from rlcore.errors import EngineFailed, UserError
from rollout.engines.checks import check_request as check_common
from rollout.engines.checks import folder_vocab_size
from rollout.engines.embedded.decoding import EXTRA_TOKENS
from rollout.engines.sglang.experts import ExpertLayers

LEAST_TEMPERATURE = 1e-6  # below it SGLang decodes greedily
MOST_STOP_STRINGS = 32
STOP_PATTERN_BYTES = 256
# prompt and response together may be so much longer than the longest prompt of /server_info
ANSWER_RESERVE = 4


@dataclass(frozen=True)
class Limits:
    """What one server takes and reports."""

    vocab_size: int
    prompt_tokens: int  # of the longest prompt
    total_tokens: int  # of prompt and response together
    sampling_mask_tokens: int  # of the largest sampling mask that it reports
    experts: ExpertLayers | None = None  # None if it reports no experts

    @classmethod
    def of(cls, server_info: Any, model_path: str, engine: str) -> Limits:
        """Read the limits from the answer of /server_info and the model's folder.

        That may take seconds for a model with experts. Raises EngineFailed when the server is no
        sglang 0.5.23.
        """
        try:
            longest = int(server_info["max_req_input_len"])
            keep = int(server_info["sampling_mask_max_tokens"])
            reports_experts = bool(server_info["enable_return_routed_experts"])
        except (KeyError, TypeError, ValueError) as error:
            raise no_sglang(engine, error) from error
        experts = ExpertLayers.of(model_path) if reports_experts else None
        return cls(
            folder_vocab_size(model_path), longest - 1, longest + ANSWER_RESERVE, keep, experts
        )


def no_sglang(engine: str, error: Exception) -> EngineFailed:
    """The error for a server whose /server_info lacks what `error` tells."""
    return EngineFailed(
        f"engine {engine}: its /server_info is not that of sglang 0.5.23: {type(error).__name__}:"
        f" {error}"
    )


def check_request(request: GenerateRequest, limits: Limits) -> None:
    """Raise UserError for a request that the server would refuse, die of, or misread."""
    check_common(
        request,
        vocab_size=limits.vocab_size,
        total_tokens=limits.total_tokens,
        limit="what the server takes (its context_length and KV pool, less a reserve of its own)",
    )
    what = f"draw {request.draw}"
    sampling = request.sampling
    if len(request.prompt) > limits.prompt_tokens:
        raise UserError(
            f"{what}: the prompt has {len(request.prompt)} tokens, the server takes"
            f" {limits.prompt_tokens} at most"
        )
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise UserError(
            f"{what}: SGLang draws greedily at a temperature of {sampling.temperature:g}: say"
            " temperature 0"
        )
    if sampling.top_k == 1 and sampling.temperature not in (0, 1):
        # Whether its log-probs are those at temperature 1 depends on the rest of the batch.
        raise UserError(
            f"{what}: top_k 1 at temperature {sampling.temperature:g} is greedy: say temperature 0"
        )
    _check_stops(what, sampling, limits)
    if sampling.routed_experts and limits.experts is None:
        raise UserError(
            f"{what}: asks for routed experts, but the model has none, or the server does not"
            " report them: set rollout.engine.server.enable_return_routed_experts to true, or"
            " policy.routing_replay to none"
        )
    if asks_sampling_mask(sampling) and not 1 < sampling.top_k <= limits.sampling_mask_tokens:
        raise UserError(
            f"{what}: SGLang reports keep-sets only for a top_k of 2 to"
            f" {limits.sampling_mask_tokens}, got {sampling.top_k}: set rollout.sampling.top_k, or"
            " policy.logprobs.keep_sets to false"
        )


def that_fit(request: GenerateRequest, limits: Limits) -> list[int]:
    """The indices of the responses that can go on.

    A response that was aborted close to its end may be too long a prompt to go on.
    """
    return [
        i
        for i in range(request.n)
        if len(request.prompt) + len(request.made(i)) <= limits.prompt_tokens
    ]


def _check_stops(what: str, sampling: SamplingParams, limits: Limits) -> None:
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < limits.vocab_size]
    if outside:
        raise UserError(
            f"{what}: stop token {outside[0]} lies outside the model's vocabulary of"
            f" {limits.vocab_size}"
        )
    if len(sampling.stop) > MOST_STOP_STRINGS:
        raise UserError(
            f"{what}: SGLang takes {MOST_STOP_STRINGS} stop strings, got {len(sampling.stop)}"
        )
    for text in sampling.stop:
        if not text or len(stop_pattern(text).encode()) > STOP_PATTERN_BYTES:
            raise UserError(
                f"{what}: stop string {text!r} is empty or longer than SGLang takes"
                f" ({STOP_PATTERN_BYTES} bytes as a pattern)"
            )


def asks_sampling_mask(sampling: SamplingParams) -> bool:
    """Whether SGLang is asked for sampling masks: some may be smaller than the vocabulary."""
    return (
        sampling.sampling_mask
        and sampling.temperature > 0
        and (sampling.top_p < 1 or sampling.top_k > 0)
    )


def stop_pattern(text: str) -> str:
    """Write a stop string as a regular expression that SGLang finds in the last tokens.

    For a plain stop string SGLang decodes as many tokens as it has in the tokenizer's own spelling,
    and misses one that the model spells in smaller tokens. For a pattern it decodes as many tokens
    as the pattern can have characters. The part behind the | never matches, as nothing follows the
    end of the text, but it widens that window to one token a byte.
    """
    return f"{escape(text)}|\\Za{{{len(text.encode()) + EXTRA_TOKENS}}}"
