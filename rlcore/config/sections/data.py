from __future__ import annotations

from pydantic import field_validator

from rlcore.config.sections.base import PositiveInt, Section


class DataConfig(Section):
    """Prompts: JSONL or parquet files, one row a prompt."""

    paths: list[str]
    prompt_key: str = "prompt"  # text, or a list of chat messages
    label_key: str | None = "label"
    shuffle: bool = True
    max_prompt_tokens: PositiveInt | None = None
    add_eos: bool = True  # sft: train on the end of the answer too

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value
