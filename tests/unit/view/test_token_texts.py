"""The texts of single tokens, as the page shows them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlcore.view.run import TokenTexts


def byte_tokenizer() -> Tokenizer:
    """Each byte is a token of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: at for at, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_a_character_of_several_tokens_stands_at_its_first(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts(lambda: {"model": {"path": str(tmp_path)}}, tmp_path / "runs" / "a")
    tokens = tokenizer.encode("aé b😀cd").ids
    assert len(tokens) == 11
    assert texts.of(tokens) == ["a", "é", "", " ", "b", "😀", "", "", "", "c", "d"]
    # bytes that are no character stay as they are, and so does what follows
    broken = [*tokens[:2], *tokens[3:5]]
    assert texts.of(broken) == ["a", "\ufffd", " ", "b"]
    assert texts.trouble == ""


def test_without_a_tokenizer_tokens_are_shown_by_number(tmp_path: Path) -> None:
    texts = TokenTexts(lambda: json.loads("{}"), tmp_path)
    assert texts.of([5, 7]) == ["[5]", "[7]"]
    assert "shown by number" in texts.trouble
