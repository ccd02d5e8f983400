"""The section `data`."""

from __future__ import annotations

from pydantic import field_validator

from rlcore.config.sections.base import PositiveInt, Section


class DataConfig(Section):
    """Prompts: JSONL or parquet files, one row a prompt."""

    paths: list[str]
    """Files with the prompts; a single path may stand without the list."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    label_key: str | None = "label"
    """Column of the label, which rewards compare with and supervised fine-tuning trains on."""
    shuffle: bool = True
    """Shuffle the rows anew in every epoch."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are left out; default: no limit."""
    add_eos: bool = True
    """Supervised fine-tuning: train on the end of the answer too."""

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value
