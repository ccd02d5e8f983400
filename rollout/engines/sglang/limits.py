"""The limits of one server, and what it reports beside tokens: sampling masks and experts."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.config.engine_registry import SGLANG_ANSWER_RESERVE
from rlcore.data.generation import GenerateRequest, SamplingParams
from rlcore.data.sample import Experts
from rlcore.errors import EngineFailed, ModelError
from rollout.engines.checks import folder_vocab_size, model_config

# Generous bounds of the JSON of a completion: of its frame, of a token with its text and log-prob,
# of a token in a sampling mask, and of an expert.
FRAME_BYTES = 1 << 16
TOKEN_BYTES = 1 << 10
MASK_BYTES = 12
EXPERT_BYTES = 6
# the name of a module in transformers
EXPERTS = re.compile(r".*\.layers\.(\d+)\.(?:\w+\.)*experts")


@dataclass(frozen=True)
class ExpertLayers:
    """The layout of a model that has experts in some of its layers."""

    num_layers: int  # all of them: SGLang reports a row for each
    places: tuple[int, ...]  # indices of the layers that have experts
    num_experts: int
    topk: int  # experts that a token passes through

    @classmethod
    def of(cls, folder: str) -> ExpertLayers | None:
        """Read the Hugging Face model in `folder`, without its weights; None for a dense model."""
        import torch
        from transformers import AutoModelForCausalLM

        config = model_config(folder)
        topk = getattr(config, "num_experts_per_tok", None)
        if not topk:
            return None
        with torch.device("meta"):
            modules = AutoModelForCausalLM.from_config(
                config, trust_remote_code=False
            ).named_modules()
        found = {
            int(match[1]): module for name, module in modules if (match := EXPERTS.fullmatch(name))
        }
        if not found:
            raise ModelError(
                f"{folder}: num_experts_per_tok is {topk}, but transformers builds no layer with"
                " experts from it"
            )
        count = next(iter(found.values())).num_experts
        return cls(int(config.num_hidden_layers), tuple(sorted(found)), int(count), int(topk))

    def decode(self, text: str, tokens: int) -> Experts:
        """Decode SGLang's record of the first `tokens` tokens of a sequence.

        Args:
            text: base64 of little-endian int32 [tokens, layers, topk].

        Returns:
            int16 [tokens, layers with experts, topk].

        Raises:
            ValueError: `text` is no such record.
        """
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
        if flat.size != tokens * self.num_layers * self.topk:
            raise ValueError(
                f"{flat.size} routed experts, expected {tokens} tokens x {self.num_layers} layers x"
                f" {self.topk}"
            )
        chosen = flat.reshape(tokens, self.num_layers, self.topk)[:, list(self.places)]
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.num_experts:
            raise ValueError(
                f"routed experts from {chosen.min()} to {chosen.max()} of a model of"
                f" {self.num_experts}"
            )
        return chosen.astype(np.int16)


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
    """The error for a server whose /server_info lacks what `error` tells."""
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
