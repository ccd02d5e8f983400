"""Prompts, tokenised once, and the order in which they are drawn."""

from __future__ import annotations

import hashlib
import logging
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data.rows import Example, read_examples
from rlcore.data.tokenizer import encode, leading_bos, render_chat
from rlcore.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One row of the data, tokenised."""

    prompt_id: str
    tokens: NDArray[np.int32]
    text: str
    label: Any = None
    row: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptSet:
    """All prompts of a run, in file order.

    Tokens lie in one array, so that a million prompts are a few objects.
    """

    examples: Sequence[Example]
    texts: Sequence[str]
    tokens: NDArray[np.int32]  # [sum of lengths]
    offsets: NDArray[np.int64]  # [N+1]
    excluded: Sequence[str] = ()  # "file:line" of prompts that were too long

    @classmethod
    def load(
        cls,
        paths: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        label_key: str | None = "label",
        max_prompt_tokens: int | None = None,
        max_prompts: int | None = None,
    ) -> PromptSet:
        """Read and tokenise `paths`.

        Prompts of more than `max_prompt_tokens` are left out, counted and logged.

        Raises:
            DataError: a bad row (with file and line), or no prompt is left.
        """
        rows = read_examples(paths, prompt_key=prompt_key, label_key=label_key)
        return cls.from_examples(
            islice(rows, max_prompts), tokenizer, paths=paths, max_prompt_tokens=max_prompt_tokens
        )

    @classmethod
    def from_examples(
        cls,
        rows: Iterable[Example],
        tokenizer: PreTrainedTokenizerBase,
        *,
        paths: Sequence[str],
        max_prompt_tokens: int | None,
    ) -> PromptSet:
        """Tokenise rows that were read. As `load` otherwise."""
        examples = list(rows)
        if not examples:
            raise DataError(f"{', '.join(paths) or 'data.paths'}: no rows")
        texts, tokens = tokenize_prompts(examples, tokenizer)
        for example, ids in zip(examples, tokens):
            if not len(ids):
                raise DataError(
                    f"{example.where}: the prompt has no tokens; nothing would predict its first"
                    " answer token"
                )
        limit = max_prompt_tokens
        if limit is None:
            limit = max(len(ids) for ids in tokens)
        chosen = [i for i, ids in enumerate(tokens) if len(ids) <= limit]
        excluded = [example.where for example, ids in zip(examples, tokens) if len(ids) > limit]
        if not chosen:
            raise DataError(
                f"{', '.join(paths)}: all {len(examples)} prompts have more than"
                f" data.max_prompt_tokens = {limit} tokens (the shortest has"
                f" {min(len(ids) for ids in tokens)})"
            )
        if excluded:
            logger.warning(
                "%d of %d prompts have more than data.max_prompt_tokens = %d tokens and are left"
                " out (the first: %s)",
                len(excluded),
                len(examples),
                limit,
                excluded[0],
            )
        return cls(
            examples=[examples[i] for i in chosen],
            texts=[texts[i] for i in chosen],
            tokens=np.concatenate([tokens[i] for i in chosen]),
            offsets=np.cumsum([0] + [len(tokens[i]) for i in chosen], dtype=np.int64),
            excluded=excluded,
        )

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> Prompt:
        example = self.examples[row]
        ids = self.tokens[self.offsets[row] : self.offsets[row + 1]]
        return Prompt(example.where, ids, self.texts[row], example.label, example.extra)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each prompt, int64 [N]."""
        return np.diff(self.offsets)

    def fingerprint(self) -> str:
        """Return a digest of all tokens: a resumed run must find the same prompts, in order."""
        digest = hashlib.blake2b(self.tokens.tobytes(), digest_size=8)
        digest.update(self.offsets.tobytes())
        return digest.hexdigest()


def tokenize_prompts(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], list[NDArray[np.int32]]]:
    """Return text and tokens of each prompt; chats are rendered up to the assistant's turn."""
    texts = [
        example.prompt
        if isinstance(example.prompt, str)
        else render_chat(tokenizer, example.prompt, example.where, add_generation_prompt=True)
        for example in examples
    ]
    tokens = encode(tokenizer, texts, [example.where for example in examples])
    bos = leading_bos(tokenizer)
    if bos:  # not for chats: a template writes its own
        tokens = [
            np.array([*bos, *ids], dtype=np.int32) if isinstance(example.prompt, str) else ids
            for example, ids in zip(examples, tokens)
        ]
    return texts, tokens


@lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of pass `epoch`, int64 [size]: a pure function of the arguments.

    Philox words are sorted instead of calling numpy's `permutation`, whose algorithm may change
    between versions.
    """
    words = np.random.Philox(key=np.array([seed & (2**64 - 1), epoch], dtype=np.uint64)).random_raw(
        size
    )
    return np.argsort(words, kind="stable")


class PromptStream:
    """Endless draws from `size` rows: draw d is row `d mod size` of the order of pass `d // size`.

    The order is addressed, not consumed: the whole state is the next draw and the draws that were
    given back.
    """

    def __init__(
        self, size: int, *, seed: int, shuffle: bool = True, fingerprint: str = ""
    ) -> None:
        if size < 1:
            raise DataError("a prompt stream needs at least one prompt")
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.fingerprint = fingerprint
        self.cursor = 0  # the next draw that was never made
        self._requeued: list[int] = []  # sorted; drawn again before new ones

    def row(self, draw: int) -> int:
        """Return the row of a draw."""
        epoch, at = divmod(draw, self.size)
        return int(permutation(self.size, self.seed, epoch)[at]) if self.shuffle else at

    def take(self, count: int) -> list[int]:
        """Return the next `count` draws, in increasing order."""
        again = self._requeued[:count]
        self._requeued = self._requeued[count:]
        new = range(self.cursor, self.cursor + count - len(again))
        self.cursor = new.stop
        return again + list(new)

    def requeue(self, draw: int) -> None:
        """Give `draw` back. It is taken next, under its number and so with the same randomness."""
        if not 0 <= draw < self.cursor or draw in self._requeued:
            raise ValueError(
                f"draw {draw} was not taken: the stream has made {self.cursor} draws,"
                f" {self._requeued} came back"
            )
        insort(self._requeued, draw)

    @property
    def epoch(self) -> float:
        """The number of passes over the rows so far."""
        return (self.cursor - len(self._requeued)) / self.size

    def snapshot(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {
            "cursor": self.cursor,
            "requeued": list(self._requeued),
            "size": self.size,
            "fingerprint": self.fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `snapshot` was taken.

        Raises:
            DataError: the prompts are not those of the snapshot.
        """
        if (state["size"], state["fingerprint"]) != (self.size, self.fingerprint):
            raise DataError(
                f"the run was saved with {state['size']} prompts (fingerprint"
                f" {state['fingerprint']}), data.paths now gives {self.size} ({self.fingerprint});"
                " resume with the same data, or start a new run from its weights"
            )
        self.cursor = int(state["cursor"])
        self._requeued = sorted(state["requeued"])
