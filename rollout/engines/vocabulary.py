"""The check that model and tokenizer agree on what a token id means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def folder_vocab_size(folder: str) -> int:
    """`vocab_size` of a Hugging Face folder's config.json."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(
            f"model: {folder} holds no config.json; model.path must be a Hugging Face folder"
        ) from None
    except json.JSONDecodeError as error:
        raise ModelError(f"model: {path} is not JSON: {error}") from error
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ModelError(f"model: {path} has no vocab_size")
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
