"""Pieces that begin with added tokens, put together, are the ids of the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlcore.data import tokenizer as tokenizers_in_bulk
from rollout.conversation import pieces
from rollout.conversation.pieces import PieceEncoder

from .kit import STOP, ids, make_tokenizer

CORPUS = ["The result is 12.\n user assistant tool " * 3, "the <tool_response> of a Tool\n\n is é"]
START = "<|im_start|>"
ADDED = [AddedToken(mark, normalized=False) for mark in (START, STOP, "<|im", "<tool>")]


def trained(
    pre: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
    added: Sequence[AddedToken] = ADDED,
) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


LOWER = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "characters": make_tokenizer,
    "bytes": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes, a space in front": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "words, the first one marked": lambda: trained(
        pre_tokenizers.Metaspace(prepend_scheme="first")
    ),
    "texts marked": lambda: trained(
        pre_tokenizers.Metaspace(prepend_scheme="never"), normalizers.Prepend("▁")
    ),
    "lower case, a token of it": lambda: trained(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        LOWER,
        [*ADDED, AddedToken("result is", normalized=True)],
    ),
    "a token that takes spaces": lambda: trained(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        added=[*ADDED, AddedToken("<mask>", normalized=False, lstrip=True, rstrip=True)],
    ),
}
BUILT = {name: build() for name, build in TOKENIZERS.items()}
ENCODERS = {name: PieceEncoder(tokenizer, "here") for name, tokenizer in BUILT.items()}
WORDS = [
    START,
    STOP,
    "<|im",
    "_end|>",
    "<tool>",
    "<mask>",
    "<",
    " ",
    "\n",
    "tool",
    "Result is",
    "é",
]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=12))
def test_pieces_have_the_ids_of_the_whole(name: str, words: list[str]) -> None:
    text = "".join(words)
    assert np.array_equal(ENCODERS[name](text), ids(BUILT[name], text))


def test_a_piece_that_was_seen_is_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def encode(
        tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], where: Sequence[str]
    ) -> list[np.ndarray]:
        asked.extend(texts)
        return tokenizers_in_bulk.encode(tokenizer, texts, where)

    monkeypatch.setattr(pieces, "encode", encode)
    encoder = PieceEncoder(make_tokenizer(), "here")
    for result in ("5", "6", "5"):
        encoder(f"{STOP}\n{START}tool\n{result}{STOP}\n{START}assistant\n")
    first = [f"{STOP}\n", f"{START}tool\n5", f"{START}assistant\n"]
    assert asked == [*first, f"{START}tool\n6"]


def test_where_pieces_may_depend_on_each_other_texts_stay_whole() -> None:
    tokenizer = BUILT["a token that takes spaces"]
    assert PieceEncoder(tokenizer, "here")._pieces(f"a{STOP}b") == [f"a{STOP}b"]
    split = make_tokenizer()
    split.split_special_tokens = True
    assert PieceEncoder(split, "here")._pieces(f"a{STOP}b") == [f"a{STOP}b"]
