"""Loads the prompts of a run: which of them fit, and in which order they are drawn."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.config import Config
from rlcore.data.examples import open_examples
from rlcore.data.mixture import MixtureStream, Share
from rlcore.data.prompts import LengthLimit, PromptSet, PromptStream
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# SGLang keeps two tokens of its context_length for itself, rollout.engines.sglang.limits says.
_SERVER_RESERVE = 2


def load_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    paths: Sequence[str] | None = None,
    *,
    max_prompts: int | None = None,
    max_new_tokens: int | None = None,
) -> PromptSet:
    """Read and tokenise the prompts to generate from.

    Those that leave no room for a response are left out, counted and logged.

    Args:
        paths: held-out prompts, instead of those of `data`.
        max_new_tokens: of a response; default: as in training.

    Raises:
        DataError: a bad row.
        ConfigError: no prompt fits.
    """
    limits = length_limits(config, max_new_tokens or config.rollout.sampling.max_new_tokens)
    return PromptSet.of(
        open_examples(config.data, paths),
        tokenizer,
        limits=limits,
        max_prompts=max_prompts,
    )


def length_limits(config: Config, max_new_tokens: int) -> list[LengthLimit]:
    """Return what bounds the length of a prompt: the configuration, and the model's context.

    Raises:
        ConfigError: the response alone is as long as the context.
    """
    limits = []
    if config.data.max_prompt_tokens is not None:
        limits.append(LengthLimit(config.data.max_prompt_tokens, "data.max_prompt_tokens"))
    if (context := context_of(config)) is not None:
        tokens, key = context
        if tokens <= max_new_tokens:
            raise ConfigError(
                f"rollout.sampling.max_new_tokens: {max_new_tokens} leaves no room for a prompt in"
                f" the context of {tokens} ({key}); set it lower (evaluation.max_new_tokens too),"
                " or take a model with a longer context"
            )
        why = f"the context of {tokens} ({key}) less max_new_tokens ({max_new_tokens})"
        limits.append(LengthLimit(tokens - max_new_tokens, why))
    return limits


def context_of(config: Config) -> tuple[int, str] | None:
    """Return the most tokens of prompt and response that the engine takes, and what says so."""
    path = Path(config.model.path) / "config.json"
    model = json.loads(path.read_bytes()) if path.is_file() else {}
    tokens = model.get(
        "max_position_embeddings", model.get("text_config", {}).get("max_position_embeddings")
    )
    key = "max_position_embeddings in config.json"
    engine = config.rollout.engine
    if engine.kind not in ("embedded", "sglang"):
        return None  # a plugin: it knows its own limits
    if engine.kind == "embedded":
        return None if tokens is None else (int(tokens), key)
    if (served := engine.server.get("context_length")) is not None:
        tokens = served
        key = "rollout.engine.server.context_length"
    return None if tokens is None else (int(tokens) - _SERVER_RESERVE, key)


def prompt_stream(config: Config, prompts: PromptSet) -> PromptStream:
    """Return the draws of a run: all rows in turn, or from sources by weight."""
    data = config.data
    if not any(source.weight for source in data.sources.values()):
        return PromptStream(
            len(prompts),
            seed=config.run.seed,
            shuffle=data.shuffle,
            fingerprint=prompts.fingerprint(),
        )
    return MixtureStream(
        shares(config, prompts),
        seed=config.run.seed,
        shuffle=data.shuffle,
        fingerprint=prompts.fingerprint(),
    )


def shares(config: Config, prompts: PromptSet) -> list[Share]:
    """Return where the rows of each source are. Raises ConfigError for a source without rows."""
    sizes: Counter[str | None] = Counter()
    for part, rows in prompts.by_part():
        sizes[part.source] += len(rows)
    found: list[Share] = []
    for name, source in config.data.sources.items():
        if not sizes[name]:
            raise ConfigError(
                f"data.sources.{name}: none of its rows is left; see data.max_prompt_tokens"
            )
        first = found[-1].first + found[-1].size if found else 0
        found.append(Share(name, first, sizes[name], source.weight or float(sizes[name])))
    return found
