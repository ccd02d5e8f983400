"""The limits of one server, and what it reports besides tokens: sampling masks and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlcore.config.engine_registry import SGLANG_ANSWER_RESERVE
from rlcore.data.generation import GenerateRequest, SamplingParams
from rlcore.errors import EngineFailed
from rollout.engines.checks import ExpertLayers, folder_vocab_size

# Generous limits of the bytes of JSON for a completion's frame, a token with its text and log-prob,
# a token in a sampling mask, and an expert.
FRAME_BYTES = 1 << 16
TOKEN_BYTES = 1 << 10
MASK_BYTES = 12
EXPERT_BYTES = 6


@dataclass(frozen=True)
class Limits:
    """What one server takes and reports."""

    vocab_size: int
    prompt_tokens: int  # the longest prompt
    total_tokens: int  # the longest prompt and response together
    sampling_mask_tokens: int  # the largest sampling mask that it reports
    experts: ExpertLayers | None = None  # None if it reports no experts

    @classmethod
    def of(cls, server_info: Any, model_path: str, engine: str) -> Limits:
        """Read the limits from the answer of /server_info and the model's folder.

        This may take seconds for a model with experts. Raises EngineFailed if the server is not
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
            folder_vocab_size(model_path),
            longest - 1,
            longest + SGLANG_ANSWER_RESERVE,
            keep,
            experts,
        )


def answer_bytes(request: GenerateRequest, limits: Limits) -> int:
    """The bytes of the longest answer to a request."""
    sampling = request.sampling
    token = TOKEN_BYTES
    if asks_sampling_mask(sampling):
        token += MASK_BYTES * limits.sampling_mask_tokens
    each = FRAME_BYTES + token * sampling.max_new_tokens
    if sampling.routed_experts and limits.experts is not None:
        experts = limits.experts.num_layers * limits.experts.topk
        each += EXPERT_BYTES * experts * (len(request.prompt) + sampling.max_new_tokens)
    return request.n * each


def no_sglang(engine: str, error: Exception) -> EngineFailed:
    """The error for a server whose /server_info lacks the entry that `error` names."""
    return EngineFailed(
        f"engine {engine}: its /server_info is not that of sglang 0.5.23: {type(error).__name__}:"
        f" {error}"
    )


def asks_sampling_mask(sampling: SamplingParams) -> bool:
    """Whether SGLang is asked for sampling masks: some may be smaller than the vocabulary."""
    return (
        sampling.sampling_mask
        and sampling.temperature > 0
        and (sampling.top_p < 1 or sampling.top_k > 0)
    )
