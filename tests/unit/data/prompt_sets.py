"""Prompt sets of files, and the places of the rows that were too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcore.config.sections.data import AUTO, DataConfig
from rlcore.data.examples import open_examples
from rlcore.data.prompts import LengthLimit, PromptSet


def load_set(
    paths: Sequence[str],
    tokenizer: Any,
    *,
    prompt_key: str = AUTO,
    label_key: str | None = AUTO,
    max_prompt_tokens: int | None = None,
    max_prompts: int | None = None,
) -> PromptSet:
    data = DataConfig(paths=list(paths), prompt_key=prompt_key, label_key=label_key)
    limits = []
    if max_prompt_tokens is not None:
        limits.append(LengthLimit(max_prompt_tokens, "data.max_prompt_tokens"))
    return PromptSet.of(open_examples(data), tokenizer, limits=limits, max_prompts=max_prompts)


def excluded(prompts: PromptSet) -> list[str]:
    """The places ("file:line") of prompts that were too long."""
    return [rows.where(i) for rows in prompts.left_out.values() for i in range(len(rows))]
