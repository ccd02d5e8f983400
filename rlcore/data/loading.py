"""Loads the prompts of a run: those that fit, and the order in which they are drawn."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlcore.config import Config
from rlcore.config.derived import generates, micro_batch_tokens
from rlcore.config.engine_registry import KINDS
from rlcore.config.evaluation_sets import evaluation_sets
from rlcore.data.curriculum import build_curriculum
from rlcore.data.curriculum.stream import CurriculumStream
from rlcore.data.examples import open_examples
from rlcore.data.order import permutation
from rlcore.data.prompts import LengthLimit, PromptSet, PromptStream
from rlcore.errors import ConfigError
from rlcore.hf_config.read import text_model_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    paths: Sequence[str] | None = None,
    *,
    key: str = "evaluation.paths",
    max_prompts: int | None = None,
    max_new_tokens: int | None = None,
) -> PromptSet:
    """Read and tokenise the prompts to generate from.

    Prompts that leave no room for a response are left out, counted and logged.

    Args:
        paths: held-out prompts, instead of those of `data`.
        key: the key that sets `paths`, for messages.
        max_new_tokens: the limit of a response; default: as in training.

    Raises:
        DataError: a bad row.
        ConfigError: no prompt fits.
    """
    limits = length_limits(config, max_new_tokens or config.rollout.sampling.max_new_tokens)
    return PromptSet.of(
        open_examples(config.data, paths, key=key),
        tokenizer,
        limits=limits,
        max_prompts=max_prompts,
    )


def length_limits(config: Config, max_new_tokens: int) -> list[LengthLimit]:
    """Return the limits of a prompt's length: from the configuration and the model's context.

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


def check_context(config: Config) -> None:
    """Refuse responses that leave no room for a prompt; reads only the model's config.json.

    Raises:
        ConfigError: names the key of training or of an evaluation set.
    """
    if generates(config):
        longest = config.rollout.sampling.max_new_tokens
        for limit in (longest, *(one.max_new_tokens for one in evaluation_sets(config))):
            length_limits(config, limit or longest)


def prompt_warnings(config: Config, prompts: int) -> list[str]:
    """Return a warning if a step draws more prompts, or labelled rows, than exist."""
    key, drawn, what = (
        ("training.batch_size", config.training.batch_size, "rows")
        if config.learns_from_rows
        else ("rollout.prompts_per_step", config.rollout.prompts_per_step, "prompts")
    )
    if drawn <= prompts or config.training.replay is not None:
        return []
    return [
        f"{key}: {drawn} is more than the {prompts} {what} there are: a step has some of them"
        " several times"
    ]


def sft_limits(config: Config) -> list[LengthLimit]:
    """Return the limits of the length of a row of supervised fine-tuning, answer included."""
    budget = micro_batch_tokens(config)
    limits = [LengthLimit(budget, "policy.max_tokens_per_microbatch, for prompt and answer,")]
    if (context := _positions(config)) is not None:
        tokens, key = context
        limits.append(LengthLimit(tokens, f"the context ({key}), for prompt and answer,"))
    return limits


def context_of(config: Config) -> tuple[int, str] | None:
    """Return the engine's limit of prompt and response in tokens, and the key that sets it."""
    kind = KINDS.get(config.rollout.engine.kind)
    context = _positions(config, config.rollout.engine.server.get("context_length"))
    if kind is None or kind.context_reserve is None or context is None:
        return None
    tokens, key = context
    return tokens - kind.context_reserve, key


def _positions(config: Config, served: int | None = None) -> tuple[int, str] | None:
    """Return the model's context and what sets it, if anything does.

    Sparse attention is only trained where it is dense, up to `index_topk` tokens.

    Args:
        served: the context that the engine is given, in place of the model's.
    """
    folder = Path(config.model.path)
    sizes: list[tuple[int, str]] = []
    if served is not None:
        sizes.append((int(served), "rollout.engine.server.context_length"))
    if (folder / "config.json").is_file():
        keys = ["index_topk", *([] if sizes else ["max_position_embeddings"])]
        found = ((text_model_size(folder, key), f"{key} in config.json") for key in keys)
        sizes += [(size, key) for size, key in found if size is not None]
    return min(sizes, default=None)


def prompt_stream(config: Config, prompts: PromptSet) -> PromptStream:
    """Return the draws of a run: in turn, from weighted sources, or chosen by a curriculum.

    Raises:
        ConfigError: a source without rows, or an invalid curriculum.
    """
    data = config.data
    order: dict[str, Any] = {
        "seed": config.run.seed,
        "shuffle": data.shuffle,
        "fingerprint": prompts.record.fingerprint,
    }
    if any(source.weight for source in data.sources.values()):
        base: PromptStream = MixtureStream(shares(config, prompts), **order)
    else:
        base = PromptStream(len(prompts), **order)
    base.record = prompts.record
    given = data.curriculum
    if given is None or config.learns_from_rows:
        return base
    try:
        curriculum = build_curriculum(given.name, **given.options)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"data.curriculum: {error}") from error
    names = tuple(data.sources)
    sources = np.zeros(len(prompts), dtype=np.int64)
    for part, rows in prompts.by_part():
        if part.source is not None:
            sources[rows.start : rows.stop] = names.index(part.source)
    return CurriculumStream(
        base,
        curriculum,
        memory=given.memory,
        passes_at=given.passes_at,
        lengths=prompts.lengths,
        sources=sources,
        source_names=names,
    )


def shares(config: Config, prompts: PromptSet) -> list[Share]:
    """Return the row range of each source. Raises ConfigError for a source without rows."""
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


# --- weighted sources -----------------------------------------------------------------------------

_BLOCK = 4096  # draws whose sources are computed at once
_WORDS = 1 << 64


@dataclass(frozen=True)
class Share:
    """One source: its consecutive rows and its weight."""

    name: str
    first: int
    size: int
    weight: float


class MixtureStream(PromptStream):
    """Endless draws from several sources, each with a probability given by its weight.

    Each source is drawn like a `PromptStream` of its own. Everything is addressed: draw d is the
    k-th draw of its source, where k counts earlier draws from the same source. So the order is a
    function of seed, weights and sizes alone.
    """

    def __init__(
        self, shares: Sequence[Share], *, seed: int, shuffle: bool = True, fingerprint: str = ""
    ) -> None:
        digest = hashlib.blake2b(repr([*shares]).encode(), digest_size=8).hexdigest()
        super().__init__(
            sum(share.size for share in shares),
            seed=seed,
            shuffle=shuffle,
            fingerprint=f"{fingerprint}+{digest}",
        )
        self.shares = tuple(shares)
        weights = [Fraction(share.weight) for share in shares]
        total = sum(weights)
        bounds = [int(sum(weights[: i + 1]) / total * _WORDS) for i in range(len(weights))]
        # Random words up to bounds[0] choose source 0, and so on.
        self._bounds = np.array([bound - 1 for bound in bounds], dtype=np.uint64)
        self._seeds = [_number(f"{seed}:{share.name}") for share in shares]
        self._chooser = _number(f"{seed}:source of a draw")
        # A draw may be in a source's next pass while others are still in the previous one.
        self._permutation = lru_cache(maxsize=2 * len(shares))(permutation.__wrapped__)
        self._sources = lru_cache(maxsize=2)(self._sources_of_block)
        # counts[b, s]: draws of source s in the blocks before b; grows with the draws.
        self._counts: list[NDArray[np.int64]] = [np.zeros(len(shares), dtype=np.int64)]

    @property
    def order(self) -> dict[str, Any]:
        """The order's keys, as in `PromptStream.order`; the seed also chooses the sources."""
        return {"data.shuffle": self.shuffle, "run.seed": self.seed}

    def source(self, draw: int) -> int:
        """Return the index of a draw's source."""
        block, at = divmod(draw, _BLOCK)
        return int(self._sources(block)[at])

    def row(self, draw: int) -> int:
        """Return the row of a draw, counted over all sources."""
        block, at = divmod(draw, _BLOCK)
        while len(self._counts) <= block:
            done = len(self._counts) - 1
            made = np.bincount(self._sources(done), minlength=len(self.shares))
            self._counts.append(self._counts[-1] + made)
        sources = self._sources(block)
        source = int(sources[at])
        share = self.shares[source]
        nth = int(self._counts[block][source]) + int((sources[:at] == source).sum())
        epoch, index = divmod(nth, share.size)
        if self.shuffle:
            index = int(self._permutation(share.size, self._seeds[source], epoch)[index])
        return share.first + index

    def rows_of(self, draw: int) -> range:
        """Return the rows of a draw's source."""
        share = self.shares[self.source(draw)]
        return range(share.first, share.first + share.size)

    def _sources_of_block(self, block: int) -> NDArray[np.int64]:
        """Return the source of each draw of a block, int64 [_BLOCK]."""
        key = np.array([self._chooser, block], dtype=np.uint64)
        words = np.random.Philox(key=key).random_raw(_BLOCK)
        return np.searchsorted(self._bounds, words, side="left").astype(np.int64)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
