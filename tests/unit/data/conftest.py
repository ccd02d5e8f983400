"""A character tokenizer, and a way to write rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rlcore.launch.commands.init_model import ALPHABETS, char_tokenizer

ROLES = (
    "{% for m in messages %}<{{ m['content'] }}{{ '<eos>' if m['role'] == 'assistant' else ''"
    " }}\n{% endfor %}{% if add_generation_prompt %}<{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return char_tokenizer(ALPHABETS["addition"])


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Each message is "<" and its content; the assistant's ends with EOS and a line break."""
    tokenizer.chat_template = ROLES
    return tokenizer


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Objects (or raw lines) to a JSONL file; its path."""

    def write(rows: Sequence[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text(
            "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        )
        return str(path)

    return write
