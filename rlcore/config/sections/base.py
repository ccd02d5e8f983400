"""The base of all sections: it refuses unknown keys, and checks values on assignment too."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)

Probability = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class LeadsTo:
    """The kind of file or folder to which a key's path must lead; `path_keys` checks it."""

    kind: Literal["rows", "file", "folder", "list", "checkpoint", "program", "output"]
    expected: str


RowsPath = Annotated[str, LeadsTo("rows", "files of rows, JSONL or parquet")]
CERTIFICATE = LeadsTo("file", "a file in PEM")
CertificatePath = Annotated[str, CERTIFICATE]
RecordingPath = Annotated[str, LeadsTo("file", "a recorded step (rollouts/step_*.parquet)")]
FolderPath = Annotated[str, LeadsTo("folder", "a folder")]
ListPath = Annotated[str, LeadsTo("list", "a JSON list of URLs, or a folder of such files")]
ModelPath = Annotated[
    str, LeadsTo("folder", "a local Hugging Face folder (config.json, *.safetensors)")
]
AdapterPath = Annotated[
    str, LeadsTo("folder", "a PEFT folder (adapter_config.json, adapter_model.safetensors)")
]
TokenizerPath = Annotated[str, LeadsTo("folder", "a Hugging Face folder with a tokenizer")]
CHECKPOINT = LeadsTo("checkpoint", "a run, a checkpoint or its folder of shards")
CheckpointPath = Annotated[str, CHECKPOINT]
ProgramPath = Annotated[str, LeadsTo("program", "a Python interpreter")]
OutputPath = Annotated[str, LeadsTo("output", "a folder, or a path where one can be made")]


Found = Iterator[tuple[str, str]]
"""Keys of a section, each with an error or a warning."""


class Section(BaseModel):
    """A section of the configuration. Keys that it does not declare are errors (`messages`)."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False
    )

    def errors(self) -> Found:
        """Yield the keys that do not fit the others of this section."""
        return iter(())

    def warnings(self) -> Found:
        """Yield the keys that have no effect because of others of this section."""
        return iter(())

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_an_empty_map(cls, value: Any, info: ValidationInfo) -> Any:
        """Read null as an empty map: maps of files merge, so only null can empty one."""
        is_map = typing.get_origin(cls.model_fields[str(info.field_name)].annotation) is dict
        return {} if value is None and is_map else value

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` where a number belongs; Python would read it as 1."""
        if isinstance(value, bool):
            annotation = cls.model_fields[str(info.field_name)].annotation
            if {annotation, *typing.get_args(annotation)} & {int, float}:
                raise ValueError("expected a number")
        return value


class Entry(Section):
    """An entry of a map whose section has the values of the keys that the entry leaves out.

    Inherited values are read as the entry's own and never written out, so a configuration that was
    written out and is read again inherits again.
    """

    _inherited: frozenset[str] = PrivateAttr(frozenset())

    def inherit(self, section: Section, shared: type[Section]) -> None:
        """Take the section's values of the keys left out; `shared` has the fields of both."""
        self._inherited = frozenset(shared.model_fields.keys() - self.model_fields_set)
        for name in self._inherited:
            self.__dict__[name] = getattr(section, name)

    @model_serializer(mode="wrap")
    def _own_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if name not in self._inherited}


def as_list(value: object) -> object:
    """Accept a single text for a key that holds a list of texts."""
    return [value] if isinstance(value, str) else value


def a_text_is_a_name(value: object) -> object:
    """Accept the name of a plugin instead of its section."""
    return {"name": value} if isinstance(value, str) else value


class Plugin(Section):
    """A section that names a plugin; its other keys are keywords, checked when it is built."""

    model_config = ConfigDict(extra="allow", validate_assignment=True)

    name: str
    # Declared keys that belong to the named plugin, not to the section.
    keywords: ClassVar[frozenset[str]] = frozenset()

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's keywords: every key that this section does not declare."""
        return dict(self.model_extra or {})
