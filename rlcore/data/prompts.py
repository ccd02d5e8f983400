"""Prompts, tokenised once, and the order in which they are drawn."""

from __future__ import annotations

import logging
from array import array
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data.examples import Example, Examples, Part
from rlcore.data.messages import Message
from rlcore.data.order import RowRecord, check_order, digest_row, permutation
from rlcore.data.ragged_file import RaggedArray, RaggedWriter
from rlcore.data.tokenizer import ENCODE_CHUNK, encode, leading_bos, render_chat
from rlcore.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlcore.data.curriculum.history import Outcome
    from rlcore.data.sample import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One row of the data, tokenised."""

    prompt_id: str
    tokens: NDArray[np.int32]
    text: str
    label: Any = None
    row: dict[str, Any] = field(default_factory=dict)
    messages: Sequence[Message] | None = None  # of a chat; `text` is their rendering
    tools: Sequence[dict[str, Any]] = ()  # tools described in the prompt, as JSON schemas


@dataclass(frozen=True)
class LengthLimit:
    """The maximum number of prompt tokens, and the origin of this limit for messages."""

    tokens: int
    why: str

    def __str__(self) -> str:
        return f"{self.why} = {self.tokens}"


@dataclass(frozen=True)
class PromptSet:
    """All prompts of a run, in file order.

    Texts and tokens are in memory-mapped temporary files; labels and other columns are read from
    the data when a prompt is accessed.
    """

    examples: Examples
    texts: RaggedArray[np.uint8]  # UTF-8
    ragged: RaggedArray[np.int32]
    digests: NDArray[np.uint64]  # digest of each row's contribution
    # Rows that were too long, by the limit that they exceed.
    left_out: Mapping[LengthLimit, Examples]
    all_examples: Examples

    @classmethod
    def of(
        cls,
        examples: Examples,
        tokenizer: PreTrainedTokenizerBase,
        *,
        limits: Sequence[LengthLimit] = (),
        max_prompts: int | None = None,
    ) -> PromptSet:
        """Tokenise the first `max_prompts` examples.

        Prompts that exceed one of `limits` are left out, counted and logged.

        Raises:
            DataError: a bad row (with file and line), or no rows.
            ConfigError: no prompt is short enough.
        """
        texts = RaggedWriter(np.uint8)
        tokens = RaggedWriter(np.int32)
        digests = array("Q")
        kept: list[int] = []
        too_long: dict[LengthLimit, list[int]] = {}
        shortest = None
        row = 0
        for chunk in chunks(islice(iter(examples), max_prompts)):
            for example, text, ids in zip(chunk, *tokenize_prompts(chunk, tokenizer)):
                shortest = len(ids) if shortest is None else min(shortest, len(ids))
                passed = [limit for limit in limits if len(ids) > limit.tokens]
                if passed:
                    tightest = min(passed, key=lambda limit: limit.tokens)
                    too_long.setdefault(tightest, []).append(row)
                else:
                    kept.append(row)
                    tokens.add(ids)
                    texts.add(np.frombuffer(text.encode(), dtype=np.uint8))
                    digests.append(digest_row(example.where, ids, example.contribution))
                row += 1
        paths = ", ".join(part.path for part in examples.parts) or "data.paths"
        if not row:
            raise DataError(f"{paths}: no rows")
        if not kept:
            limit = min(too_long, key=lambda limit: limit.tokens)
            raise ConfigError(
                f"{paths}: all {row} prompts have more than {limit} tokens (the shortest has"
                f" {shortest})"
            )
        left_out = {
            limit: examples.take(np.array(rows, dtype=np.int64)) for limit, rows in too_long.items()
        }
        for limit, rows in left_out.items():
            _warn_of("prompts", rows, row, limit)
        return cls(
            examples.take(np.array(kept, dtype=np.int64)),
            texts.done(),
            tokens.done(),
            np.array(digests, dtype=np.uint64),
            left_out,
            examples,
        )

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> Prompt:
        if row >= len(self):
            raise IndexError(row)
        example = self.examples[row]
        messages = None if isinstance(example.prompt, str) else example.prompt
        given = (example.label, example.extra, messages, example.tools)
        return Prompt(example.where, self.ragged[row], self.text(row), *given)

    def without(self, too_long: NDArray[np.bool_], limit: LengthLimit) -> PromptSet:
        """Return the set without some prompts, as if `limit` had excluded them.

        Raises:
            ConfigError: no prompt is left.
        """
        kept = np.flatnonzero(~too_long)
        left_out = self.all_examples.take(self.examples.rows[too_long])
        if not len(kept):
            raise ConfigError(
                f"all {len(self)} rows have more than {limit} tokens (the first:"
                f" {left_out.where(0)})"
            )
        _warn_of("rows", left_out, len(self), limit)
        return replace(
            self,
            examples=self.all_examples.take(self.examples.rows[kept]),
            texts=self.texts.take(kept),
            ragged=self.ragged.take(kept),
            digests=self.digests[kept],
            left_out={**self.left_out, limit: left_out},
        )

    def text(self, row: int) -> str:
        """Return the text of a prompt, as it was tokenised."""
        return self.texts[row].tobytes().decode()

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens of all prompts, concatenated."""
        return self.ragged.values

    @property
    def num_excluded(self) -> int:
        """The number of prompts that were too long."""
        return sum(len(rows) for rows in self.left_out.values())

    def by_part(self) -> Iterator[tuple[Part, range]]:
        """Yield each file with the range of its prompts."""
        first = 0
        last_row = 0
        for part in self.all_examples.parts:
            last_row += len(part.rows)
            after = int(np.searchsorted(self.examples.rows, last_row))
            yield part, range(first, after)
            first = after

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each prompt, int64 [N]."""
        return np.diff(self.ragged.offsets)

    @cached_property
    def record(self) -> RowRecord:
        """The record of the rows, which a resumed run must find unchanged, in order."""
        files = {part.path: len(part.rows) for part in self.all_examples.parts}
        return RowRecord(self.digests, files, self.examples.where)

    def fingerprint(self) -> str:
        """Return a digest of everything that the rows contribute, and of their order."""
        return self.record.fingerprint


def chunks(examples: Iterator[Example]) -> Iterator[list[Example]]:
    """Yield examples in lists of the size that the tokenizer takes at once."""
    while chunk := list(islice(examples, ENCODE_CHUNK)):
        yield chunk


def _warn_of(what: str, rows: Examples, total: int, limit: LengthLimit) -> None:
    text = "%d of %d %s have more than %s tokens and are left out (the first: %s)"
    logger.warning(text, len(rows), total, what, limit, rows.where(0))


def render_messages(
    example: Example,
    messages: str | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    generate: bool = True,
) -> str:
    """Return messages as rendered by the chat template of a row; a text is returned as it is.

    Args:
        generate: add the beginning of the assistant's turn.
    """
    if isinstance(messages, str):
        return messages
    return render_chat(
        tokenizer,
        messages,
        example.where,
        add_generation_prompt=generate,
        tools=example.tools,
        chat_kwargs=example.chat_kwargs,
    )


def tokenize_prompts(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], list[NDArray[np.int32]]]:
    """Return the text and tokens of each prompt. Raises DataError for an empty prompt."""
    texts = [render_messages(example, example.prompt, tokenizer) for example in examples]
    tokens = encode(tokenizer, texts, [example.where for example in examples])
    bos = leading_bos(tokenizer)
    # Not for chats, whose template writes the BOS.
    if bos:
        tokens = [
            np.array([*bos, *ids], dtype=np.int32) if isinstance(example.prompt, str) else ids
            for example, ids in zip(examples, tokens)
        ]
    for example, ids in zip(examples, tokens):
        if not len(ids):
            raise DataError(
                f"{example.where}: the prompt has no tokens; nothing would predict its first"
                " answer token"
            )
    return texts, tokens


class PromptStream:
    """Endless draws from `size` rows: draw d is row `d mod size` of the order of pass `d // size`.

    The order is addressed, not consumed: the whole state is the next draw and the requeued draws. A
    subclass whose order depends on results is notified of them, and provides the state to write
    down: see `rlcore.data.curriculum.stream`.
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
        # Names the changed rows in the error of `restore`.
        self.record = RowRecord()
        # The next new draw.
        self.cursor = 0
        # Sorted; drawn again before new ones.
        self._requeued: list[int] = []

    def row(self, draw: int) -> int:
        """Return the row of a draw."""
        epoch, at = divmod(draw, self.size)
        return int(permutation(self.size, self.seed, epoch)[at]) if self.shuffle else at

    def rows_of(self, draw: int) -> range:
        """Return the rows that a draw chooses from: all, or those of its source."""
        return range(self.size)

    def take(self, count: int) -> list[int]:
        """Return the next `count` draws, in increasing order."""
        again = self._requeued[:count]
        self._requeued = self._requeued[count:]
        new = range(self.cursor, self.cursor + count - len(again))
        self.cursor = new.stop
        return again + list(new)

    def requeue(self, draw: int) -> None:
        """Requeue `draw`. It is taken next, with its old number and so the same random numbers."""
        if not 0 <= draw < self.cursor or draw in self._requeued:
            raise ValueError(
                f"draw {draw} was not taken: the stream has made {self.cursor} draws,"
                f" {self._requeued} came back"
            )
        insort(self._requeued, draw)

    # --- hooks of a curriculum --------------------------------------------------------------------

    def chosen(self, draw: int) -> int | None:
        """Return the row of a draw if it must be written down, because it cannot be derived."""
        return None

    def outcome(self, samples: Sequence[Sample]) -> Outcome | None:
        """Return the result of a draw's finished group, if it must be written down."""
        return None

    def finished(self, draw: int, outcome: Outcome | None) -> None:
        """Receive the result of a draw's group."""

    def finish(self, draw: int) -> None:
        """Learn that a draw was consumed or dropped; it will not come again."""

    def failed(self, draw: int) -> None:
        """Learn that the group of a draw was given up for good; the draw will not come again."""

    def handed_over(self) -> None:
        """Learn that a step has its batch."""

    def check_results(self) -> None:
        """Raise RunFailed if the order depends on results and none has a known result."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics to log at a hand-over."""
        return {}

    # --- state ------------------------------------------------------------------------------------

    @property
    def order(self) -> dict[str, Any]:
        """The settings that determine the order, by key; a resumed run must have the same."""
        return {"data.shuffle": self.shuffle} | ({"run.seed": self.seed} if self.shuffle else {})

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
            **self.record.saved(),
            "order": self.order,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `snapshot` was taken.

        Raises:
            DataError: the prompts or their order differ from the snapshot's.
        """
        self._check_kind(state)
        if not {"order", "files", "blocks"} <= state.keys():
            raise DataError(
                "the checkpoint is of an earlier version of rlcore and cannot be resumed: start a"
                " new run from its weights (policy.checkpoint)"
            )
        if (state["size"], state["fingerprint"]) != (self.size, self.fingerprint):
            raise DataError(
                f"the run was saved with {state['size']} prompts (fingerprint"
                f" {state['fingerprint']}), data.paths now gives {self.size} ({self.fingerprint})"
                f"{self.record.changes(state)}; resume with the same data (labels and all other"
                " columns too), or start a new run from its weights (policy.checkpoint)"
            )
        if state["cursor"]:
            check_order(state["order"], self.order)
        self.cursor = int(state["cursor"])
        self._requeued = sorted(state["requeued"])

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        if "curriculum" in state:
            raise DataError(
                "the run was saved with data.curriculum, whose choices this one would not continue:"
                " resume it with a curriculum (its keywords may change), or start a new run from"
                " its weights"
            )

    def beginning(self) -> dict[str, Any]:
        """Return the snapshot before the first draw."""
        return {**PromptStream.snapshot(self), "cursor": 0, "requeued": []}

    def adopted(self, draw: int) -> int | None:
        """Return `chosen` for a kept draw that is later than the restored snapshot."""
        return None

    def move(self, cursor: int, requeued: Sequence[int]) -> None:
        """Move to another position.

        Args:
            cursor: the number of draws made there.
            requeued: the requeued draws.
        """
        self.cursor = cursor
        self._requeued = sorted(requeued)
