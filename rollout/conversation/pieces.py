"""Encodes texts in pieces that begin with an added token, as most of these recur.

A tokenizer cuts a text at its added tokens (those of turns, say) before it does anything else, and
encodes what lies between them apart: a piece has the same ids in every text.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlcore.data.tokenizer import encode, is_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = NDArray[np.int32]
MOST_KEPT = 1000  # pieces


class PieceEncoder:
    """Encodes texts without adding special tokens, int32 [n]; `where` names them in messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
        self._tokenizer = tokenizer
        self._where = where
        self._cuts = _cuts(tokenizer)
        self._kept: dict[str, Tokens] = {}

    def __call__(self, text: str) -> Tokens:
        pieces = self._pieces(text)
        if len(self._kept) > MOST_KEPT:
            self._kept.clear()
        if unknown := list({piece: None for piece in pieces if piece not in self._kept}):
            found = encode(self._tokenizer, unknown, [self._where] * len(unknown))
            self._kept.update(zip(unknown, found, strict=True))
        return np.concatenate([self._kept[piece] for piece in pieces])

    def _pieces(self, text: str) -> list[str]:
        """Return what `text` is made of, at least one piece."""
        if self._cuts is None:
            return [text]
        starts = [match.start() for match in self._cuts.finditer(text)]
        starts = [0, *(start for start in starts if start), len(text)]
        return [text[start:end] for start, end in pairwise(starts)]


def _cuts(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return what matches the added tokens; None if a piece may depend on what is around it."""
    if not is_plain(tokenizer):
        return None
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    # tokens that are sought in the normalized text are sought between the others
    raw = [token for token in added if not token.normalized]
    if not raw or any(token.lstrip or token.rstrip or token.single_word for token in raw):
        return None
    longest_first = sorted((token.content for token in raw), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))
