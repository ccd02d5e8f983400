"""The section `data`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from rlcore.config.sections.base import (
    Entry,
    Found,
    Plugin,
    Probability,
    RowsPath,
    Section,
    as_list,
)

AUTO = "auto"  # value of a column's key: the format determines the column

DataFormat = Literal[
    "auto", "verl", "openai", "trl", "open-instruct", "slime", "preference", "plain"
]  # fmt: skip


def _checked_template(value: str | None) -> str | None:
    if value is not None and "{prompt}" not in value:
        raise ValueError("expected a text with {prompt} in it, where the row's prompt goes")
    return value


class RowsConfig(Section):
    """Which columns of rows hold what, and how their prompts are shown to the model."""

    format: DataFormat = "auto"
    """Which columns hold what; `auto` looks at the first rows. A key that is not `auto` wins."""
    prompt_key: str = AUTO
    """Column of the prompt: text, or a list of chat messages. Dots go into a column:
    `extra_info.question`."""
    label_key: str | None = AUTO
    """Column of the label, which rewards compare with and supervised fine-tuning trains on, dotted
    too: `reward_model.ground_truth`. null: there is none."""
    tools_key: str | None = AUTO
    """Column of the tools that the chat template describes. null: none is read."""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """Tools of every row that has none of its own, as JSON schemas."""
    as_chat: bool = False
    """Make a text prompt the user's message of the chat template."""
    system_prompt: str | None = None
    """System message of every chat that has none; a text prompt becomes a chat."""
    prompt_template: str | None = None
    """Text around the last user message or the text prompt, which stands where it says {prompt}."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the chat template, as `enable_thinking: false`."""
    subset: str | None = None
    """Configuration of a Hugging Face dataset, as `main` of openai/gsm8k."""
    split: str = "train"
    """Split of a Hugging Face dataset, or of a folder with files of several, whose path names none,
    as `openai/gsm8k:test` does."""

    _template = field_validator("prompt_template")(_checked_template)


class DataSourceConfig(Entry, RowsConfig):
    """One of several sources of prompts. Keys that it leaves out are those of `data`."""

    paths: list[RowsPath]
    """As `data.paths`."""
    weight: PositiveFloat | None = None
    """Share of the draws relative to other sources' weights; default: each row once per epoch."""

    _one_path = field_validator("paths", mode="before")(as_list)


class CurriculumConfig(Plugin):
    """Prompts chosen by how the policy did on them: `name`, and the curriculum's own keywords."""

    name: str = "pass_rate"
    """`pass_rate`, or `package.module:Name`."""
    memory: Probability = 0.5
    """Weight of a prompt's earlier results relative to those of its newest group."""
    passes_at: float | None = None
    """Reward at which a sample passes; default: parts of the reward say right or wrong."""


class DataConfig(RowsConfig):
    """Prompts: JSONL or parquet files, or Hugging Face datasets; one row a prompt."""

    paths: list[RowsPath]
    """Files, patterns (`rows/*.parquet`), folders of files or of `Dataset.save_to_disk`, or names
    of Hugging Face datasets; a single one may stand without the list. `@[first:last]` behind one
    takes a slice of its rows. Not with `sources`."""
    sources: dict[str, DataSourceConfig] = Field(default_factory=dict)
    """Several named sources instead of `paths`."""
    shuffle: bool = True
    """Shuffle the rows again in every epoch."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are left out; default: those that leave no room for the response."""
    curriculum: CurriculumConfig | None = None
    """Choose prompts by their recent pass rate, say; default: all rows in turn."""
    add_eos: bool = True
    """Train on the end of an answer too, where answers come from rows."""
    train_turns: Literal["all", "each", "last"] = "all"
    """Supervised fine-tuning on chats that hold their answers: the assistant's turns that are
    trained on. `all` joins turns into one sequence where the chat template keeps earlier ones,
    `each` gives every turn a sequence of its own."""

    _one_path = field_validator("paths", mode="before")(as_list)

    @model_validator(mode="before")
    @classmethod
    def _sources_have_paths(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("sources"):
            return {"paths": [], **value}
        return value

    @model_validator(mode="after")
    def _sources_inherit(self) -> DataConfig:
        for entry in self.sources.values():
            entry.inherit(self, RowsConfig)
        return self

    def errors(self) -> Found:
        """Prompts have one origin; the chat template gets no key that rlcore sets."""
        if self.paths and self.sources:
            yield "sources", "got data.paths too: keep one of them"
        if not self.sources and not self.paths:
            yield "paths", "got an empty list, expected one file or more"
        for name, source in self.sources.items():
            if not source.paths:
                yield f"sources.{name}.paths", "got an empty list, expected one file or more"
        bare = [name for name, source in self.sources.items() if source.weight is None]
        if bare and len(bare) < len(self.sources):
            yield f"sources.{bare[0]}.weight", "missing: give every source a weight, or none"
        reserved = {"tokenize", "add_generation_prompt", "tools", "conversation", "chat_template"}
        for name in sorted(reserved & set(self.chat_template_kwargs)):
            hint = (
                "use data.tools or data.tools_key" if name == "tools" else "rlcore sets it itself"
            )
            yield f"chat_template_kwargs.{name}", f"is no key of a template: {hint}"

    def of_source(self, name: str) -> DataConfig:
        """Return this section with the values of source `name`."""
        source = self.sources[name]
        own = {key: getattr(source, key) for key in ("paths", *RowsConfig.model_fields)}
        return self.model_copy(update={**own, "sources": {}}, deep=True)
