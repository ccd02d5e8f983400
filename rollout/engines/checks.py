"""Checks that engines of all kinds share: of a request, and of model and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore.data.generation import Completion, GenerateRequest
from rlcore.data.sample import LARGEST_LOGPROB
from rlcore.errors import EngineFailed, ModelError, UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def folder_config(folder: str) -> dict[str, Any]:
    """Read config.json of a Hugging Face folder. Raises ModelError if there is none."""
    path = Path(folder) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(
            f"model: {folder} holds no config.json; model.path must be a Hugging Face folder"
        ) from None
    except json.JSONDecodeError as error:
        raise ModelError(f"model: {path} is not JSON: {error}") from error
    return config


def model_config(folder: str) -> PretrainedConfig:
    """Read config.json as transformers does, without code that the folder may bring.

    Raises ModelError where transformers cannot.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model: {Path(folder) / 'config.json'} is of no model that transformers has itself"
            f" ({reason}); code that comes with a model is never run"
        ) from error


def folder_vocab_size(folder: str) -> int:
    """`vocab_size` of a Hugging Face folder's config.json."""
    config = folder_config(folder)
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ModelError(f"model: {Path(folder) / 'config.json'} has no vocab_size")
    return size


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
    request: GenerateRequest, *, vocab_size: int, total_tokens: int, limit: str
) -> None:
    """Raise UserError for a request that would otherwise fail deep inside the model.

    Args:
        total_tokens: the most tokens of prompt and response together.
        limit: what sets `total_tokens`, for the message.
    """
    what = f"draw {request.draw}"
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


def check_versions(
    completions: Iterable[Completion], *, oldest: int, newest: int, engine: str
) -> None:
    """Refuse tokens of a version that was not in force while they were made (EngineFailed).

    Args:
        oldest: the version in force when the request began.
        newest: the one when it was answered.
    """
    for completion in completions:
        for span in completion.versions:
            if not oldest <= span.version <= newest:
                raise EngineFailed(
                    f"engine {engine} names version {span.version} for its tokens, expected"
                    f" {oldest} to {newest}, which were in force: does another trainer publish to"
                    " it?"
                )


def check_values(completion: Completion, *, vocab_size: int, most: int, engine: str) -> None:
    """Refuse a completion that no policy can have made (EngineFailed).

    It is done for every completion, so in few calls of numpy.

    Args:
        most: tokens that it may have.
    """
    tokens = completion.tokens
    logprobs = completion.logprobs
    end = 0
    for span in completion.versions:
        if span.start != end:
            end = -1
            break
        end = span.end
    why = None
    if len(tokens) > most:
        why = f"{len(tokens)} tokens, asked were at most {most}"
    elif len(tokens) != len(logprobs):
        why = f"{len(logprobs)} log-probs of {len(tokens)} tokens"
    elif end != len(tokens):
        why = f"versions {completion.versions}, which do not cover {len(tokens)} tokens in order"
    elif len(tokens):
        # a negative id is a large one here
        if np.maximum.reduce(tokens.astype(np.int32, copy=False).view(np.uint32)) >= vocab_size:
            why = f"tokens from {tokens.min()} to {tokens.max()} of a vocabulary of {vocab_size}"
        # NaN is no number that compares
        low = np.minimum.reduce(logprobs)
        high = np.maximum.reduce(logprobs)
        if why is None and not (low > -np.inf and high <= LARGEST_LOGPROB):
            why = f"log-probs from {low} to {high}, expected finite ones up to 0"
    if why is not None:
        raise EngineFailed(f"engine {engine} answered with {why}")
