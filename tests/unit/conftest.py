"""Fixtures of all unit tests: samples, a character tokenizer, and files of rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rlcore import terminal
from rlcore.data.sample import Sample, VersionSpan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['content'] }}{{ '<eos>' if m['role'] == 'assistant' else ''"
    " }}\n{% endfor %}{% if add_generation_prompt %}<{% endif %}"
)


@pytest.fixture(autouse=True)
def no_secret_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are hidden for as long as a process lives."""
    monkeypatch.setattr(terminal, "_secrets", set())
    monkeypatch.setattr(terminal, "_secret", re.compile("(?!)"))


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    """Samples of a 2-token prompt and a 3-token response, made by versions 4 and 5."""

    def make(draw: int = 0, **fields: object) -> Sample:
        values: dict[str, object] = {
            "draw": draw,
            "index": 0,
            "prompt_id": "train.jsonl:1",
            "group_id": draw,
            "rollout_id": draw,
            "tokens": np.array([7, 8, 9, 10, 2], dtype=np.int32),
            "loss_mask": np.array([0, 0, 1, 1, 1], dtype=np.uint8),
            "rollout_logprobs": np.array([-0.1, -1e-7, -3.3], dtype=np.float32),
            "versions": (VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)),
            "finish_reason": "stop",
            "reward": 1.0,
            "reward_parts": {"exact_match": 1.0},
            "prompt_text": "12+34=",
            "response_text": "46",
            "label": "46",
        }
        return Sample(**{**values, **fields})  # type: ignore[arg-type]

    return make


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer."""
    from rlcore.launch.commands.init_model import ALPHABETS, char_tokenizer

    return char_tokenizer(ALPHABETS["addition"])


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Each message is "<" and its content; the assistant's ends with EOS and a line break."""
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Write objects (or raw lines) to a JSONL file; returns its path."""

    def write(rows: Sequence[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text(
            "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        )
        return str(path)

    return write
