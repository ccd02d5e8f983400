"""Checks of requests, answers, models and tokenizers that engines of all kinds share."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlcore.data.generation import Completion, Drafts, GenerateRequest
from rlcore.data.sample import Experts, SamplingMasks, VersionSpan
from rlcore.data.sample_checks import check_logprobs
from rlcore.errors import EngineFailed, ModelError, UserError
from rlcore.hf_config.language import KNOWN_AS, PREFIXES
from rlcore.hf_config.read import read_config, text_model_size
from rollout.engines.routed_records import decode

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# The name of an experts module in transformers.
EXPERTS = re.compile(r".*\.layers\.(\d+)\.(?:\w+\.)*experts")


def model_config(folder: str) -> PretrainedConfig:
    """Read config.json as transformers does, without running code from the folder.

    Raises ModelError if transformers cannot read it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    given = read_config(folder)
    try:
        if same := KNOWN_AS.get(str(given.get("model_type"))):
            known: PretrainedConfig = CONFIG_MAPPING[same].from_dict({**given, "model_type": same})
            return known
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model: {Path(folder) / 'config.json'} is refused by transformers: {reason}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model: {Path(folder) / 'config.json'} is not of a model that transformers has itself"
            f" ({reason}); code that comes with a model is never run"
        ) from error


def language_config(folder: str) -> PretrainedConfig:
    """Read the configuration of the language model, which may be a part of a larger model.

    `published_prefix` is then the beginning of its tensors' names alone, and in the folder.

    Raises ModelError like `model_config`.
    """
    config = model_config(folder)
    text: PretrainedConfig | None = getattr(config, "text_config", None)
    given = read_config(folder)
    prefix = PREFIXES.get(str(given["model_type"]), ("", ""))
    if text is None:
        config.published_prefix = prefix
        return config
    text.published_prefix = prefix
    tied = "tie_word_embeddings"
    # The larger model's default is not that of its language model.
    if tied in given and tied not in given["text_config"]:
        text.tie_word_embeddings = given[tied]
    return text


def folder_vocab_size(folder: str) -> int:
    """`vocab_size` of a Hugging Face folder's config.json."""
    size = text_model_size(folder, "vocab_size")
    if size is None:
        raise ModelError(f"model: {Path(folder) / 'config.json'} has no vocab_size")
    return size


@dataclass(frozen=True)
class ExpertLayers:
    """The layout of a model that has experts in some of its layers."""

    num_layers: int  # all layers: SGLang reports a row for each
    places: tuple[int, ...]  # indices of the layers that have experts
    num_experts: int
    topk: int  # experts that a token passes through

    @classmethod
    def of(cls, folder: str) -> ExpertLayers | None:
        """Read the Hugging Face model in `folder`, without its weights; None for a dense model."""
        import torch
        from transformers import AutoModelForCausalLM

        config = language_config(folder)
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

    def decode(self, text: str | memoryview, tokens: int) -> Experts:
        """Decode SGLang's record of the first `tokens` tokens of a sequence.

        Args:
            text: base64 of little-endian int32 [tokens, layers, topk].

        Returns:
            int16 [tokens, layers with experts, topk].

        Raises:
            ValueError: `text` is not such a record.
        """
        chosen = np.empty((tokens, len(self.places), self.topk), dtype=np.int16)
        done = 0
        for piece in decode(text, (tokens, self.num_layers, self.topk)):
            own = piece[:, list(self.places)]
            if own.size and not 0 <= own.min() <= own.max() < self.num_experts:
                raise ValueError(
                    f"routed experts from {own.min()} to {own.max()} of a model of"
                    f" {self.num_experts}"
                )
            chosen[done : done + len(own)] = own
            done += len(own)
        return chosen


def check_vocabulary(folder: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The policy's vocabulary size.

    Raises:
        ModelError: the tokenizer can make ids that the policy does not have.
    """
    size = folder_vocab_size(folder)
    largest = max(tokenizer.get_vocab().values(), default=-1) + 1
    if largest > size:
        raise ModelError(
            f"the policy {folder} has a vocabulary of {size}, its tokenizer one of {largest}; "
            "use the tokenizer that belongs to the model (model.tokenizer)"
        )
    return size


def check_request(
    request: GenerateRequest,
    *,
    vocab_size: int,
    total_tokens: int,
    limit: str,
    policies: Collection[str] = (),
) -> None:
    """Raise UserError for a request that would otherwise fail deep inside the model.

    Args:
        total_tokens: the most tokens of prompt and response together.
        limit: the source of `total_tokens`, for the message.
        policies: the names in `rollout.policies`, which the engine serves.
    """
    what = f"draw {request.draw}"
    if request.policy is not None and request.policy not in policies:
        known = ", ".join(sorted(policies)) or "none"
        raise UserError(
            f"{what}: asks for the policy {request.policy!r}, but rollout.policies has {known}"
        )
    sampling = request.sampling
    prompt = np.asarray(request.prompt)
    wanted = sampling.max_new_tokens
    if prompt.ndim != 1 or len(prompt) == 0:
        raise UserError(f"{what}: the prompt has shape {prompt.shape}, expected at least one token")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise UserError(
            f"{what}: a prompt token lies outside the model's vocabulary of {vocab_size}"
        )
    if any(len(prefix.tokens) >= wanted for prefix in request.prefixes):
        raise UserError(
            f"{what}: a prefix has all of max_new_tokens {wanted} already, nothing is left to make"
        )
    if wanted < 1:
        raise UserError(f"{what}: max_new_tokens is {wanted}, expected at least 1")
    if len(prompt) + wanted > total_tokens:
        raise UserError(
            f"{what}: a prompt of {len(prompt)} tokens and max_new_tokens {wanted} exceed {limit}"
            f" of {total_tokens}"
        )
    if not 0 < sampling.top_p <= 1 or not 0 <= sampling.temperature < float("inf"):
        raise UserError(
            f"{what}: top_p must lie in (0, 1] and temperature be at least 0, got {sampling}"
        )


# --- answers --------------------------------------------------------------------------------------


def check_completion(
    found: Completion, request: GenerateRequest, place: int, *, vocab_size: int
) -> None:
    """Raise ValueError if `found` cannot be response number `place` of a request.

    The check is cheap, since it runs on every answer of every engine.
    """
    tokens = found.tokens
    made = len(tokens)
    sampling = request.sampling
    given = len(request.prompt) + len(request.made(place))
    for name, array, dtype in (
        ("tokens", tokens, np.int32),
        ("logprobs", found.logprobs, np.float32),
    ):
        if array.dtype != dtype or array.shape != (made,):
            raise ValueError(f"{name} of {array.dtype} {array.shape}, expected {dtype} ({made},)")
    if found.finish_reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {found.finish_reason!r}, expected stop, length or abort")
    room = sampling.max_new_tokens - len(request.made(place))
    if made > room or (made == 0 and found.finish_reason != "abort"):
        raise ValueError(f"{made} tokens, expected 1 to {room}")
    if made and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(
            f"tokens from {tokens.min()} to {tokens.max()} of a vocabulary of {vocab_size}"
        )
    check_logprobs(found.logprobs)
    _check_spans(found.versions, made)
    if found.sampling_mask is not None:
        _check_masks(found.sampling_mask, tokens, vocab_size)
    cached = found.cached_tokens
    if cached is not None and not (type(cached) is int and 0 <= cached <= given):
        raise ValueError(f"{str(cached)[:80]} cached tokens of {given}")
    if found.drafts is not None:
        _check_drafts(found.drafts)


def _check_drafts(drafts: Drafts) -> None:
    counts = (drafts.accepted, drafts.proposed, drafts.verifications)
    if not all(type(count) is int for count in counts) or not (
        0 <= drafts.accepted <= drafts.proposed and 0 < drafts.verifications <= drafts.proposed
    ):
        raise ValueError(
            f"{str(drafts)[:200]}, expected at most as many accepted as proposed tokens, and at"
            " least one proposed token a verification"
        )


def _check_spans(spans: Sequence[VersionSpan], made: int) -> None:
    at = 0
    for span in spans:
        whole = type(span.version) is type(span.start) is type(span.end) is int
        if not whole or span.start != at or span.end < at:
            break
        at = span.end
    else:
        if at == made:
            return
    raise ValueError(f"version spans {str(spans)[:200]} do not cover {made} tokens in order")


def _check_masks(masks: SamplingMasks, tokens: NDArray[np.int32], vocab_size: int) -> None:
    if len(masks.counts) != len(tokens) or len(masks.missing(tokens)):
        raise ValueError(
            f"{len(masks.counts)} keep-sets for {len(tokens)} tokens, or one that does not hold"
            " its own token"
        )
    kept = masks.tokens
    if len(kept) and not 0 <= kept.min() <= kept.max() < vocab_size:
        raise ValueError(f"keep-sets with tokens from {kept.min()} to {kept.max()}")


def check_records(
    found: Completion, request: GenerateRequest, place: int, experts: ExpertLayers | None
) -> None:
    """Raise ValueError if requested records are missing or invalid.

    Args:
        experts: the model's experts, if it has any and records of them are requested.
    """
    if found.sampling_mask is None and request.sampling.sampling_mask:
        raise ValueError("no keep-sets, which were asked for")
    routed = found.routed_experts
    if routed is None and request.sampling.routed_experts:
        raise ValueError("no routed experts, which were asked for")
    if routed is None or not len(found.tokens):
        return
    tokens = len(request.prompt) + len(request.made(place)) + len(found.tokens) - 1
    if routed.dtype != np.int16 or routed.ndim != 3 or len(routed) != tokens:
        raise ValueError(
            f"routed experts of {routed.dtype} {routed.shape}, expected int16 ({tokens}, layers,"
            " experts a token)"
        )
    if experts is None:
        return
    if routed.shape[1:] != (len(experts.places), experts.topk):
        raise ValueError(
            f"routed experts of shape {routed.shape}, expected ({tokens}, {len(experts.places)},"
            f" {experts.topk})"
        )
    if routed.size and not 0 <= routed.min() <= routed.max() < experts.num_experts:
        raise ValueError(
            f"routed experts from {routed.min()} to {routed.max()} of a model of"
            f" {experts.num_experts}"
        )


def check_versions(
    name: str, answers: Sequence[Sequence[Completion]], oldest: int | None, newest: int | None
) -> None:
    """Refuse tokens of versions that engine `name` was not given.

    Args:
        oldest, newest: the versions in force when the requests came and when they were answered.

    Raises:
        EngineFailed: for example if another trainer publishes to the engine.
    """
    if oldest is None or newest is None:
        return
    for completion in (one for completions in answers for one in completions):
        for span in completion.versions:
            if not oldest <= span.version <= newest:
                raise EngineFailed(
                    f"engine {name} says that version {span.version} made tokens, expected"
                    f" {oldest} to {newest}, the versions that it was given; does another trainer"
                    " publish to it?"
                )
