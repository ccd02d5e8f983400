"""How labels give the parameters of constraints: their types, and the strict reading of them.

A constraint is a function of a text and of parameters. What these may be follows from the
function's annotations alone, so every constraint has its check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from rollout.rewards.graders.label_text import literal_of


def _whole(value: Any) -> Any:
    """Return 3 for 3.0: a column with nulls makes numbers of it that way."""
    is_whole = isinstance(value, np.integer) or (
        isinstance(value, float | np.floating) and float(value).is_integer()
    )
    return int(value) if is_whole else value


def _one_letter(value: str) -> str:
    if len(value.strip()) != 1:
        raise ValueError("expected one character")
    return value


# What parameters are, for the annotations of constraints.
Count = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Ordinal = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Phrase = Annotated[str, Field(min_length=1)]
Letter = Annotated[str, AfterValidator(_one_letter)]
Phrases = Annotated[list[Phrase], BeforeValidator(literal_of), Field(min_length=1)]
# as langdetect names it, "zh-cn"
Language = Annotated[str, Field(pattern=r"^[a-z]{2}(-[a-z]{2})?$")]
Relation = Literal["less than", "at least"]
Quantifier = Literal["at least", "around", "at most"]


def parameters_of(constraint: Callable[..., bool]) -> type[BaseModel]:
    """Return what a constraint takes beside the text.

    Raises:
        KeyError: a parameter has no type.
    """
    code = constraint.__code__
    hints = get_type_hints(constraint, include_extras=True)
    names = code.co_varnames[1 : code.co_argcount]
    fields: dict[str, Any] = {name: (hints[name], ...) for name in names}
    config = ConfigDict(strict=True, extra="forbid")
    return create_model(constraint.__name__, __config__=config, **fields)


def read_parameters(name: str, model: type[BaseModel], given: Any) -> dict[str, Any]:
    """Return the parameters of constraint `name`. Nulls are none: parquet fills them in.

    Raises:
        ValueError: one is missing, unknown, or of another type.
    """
    given = literal_of(given)
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ValueError(f"the constraint {name}: its kwargs are no map but {str(given)[:80]!r}")
    given = {key: value for key, value in given.items() if not _is_null(value)}
    try:
        return dict(model.model_validate(given))
    except ValidationError as error:
        raise ValueError(f"the constraint {name}: {_said(model, error.errors()[0])}") from error


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _said(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    """Say what is wrong with a parameter."""
    places: Sequence[Any] = problem["loc"]
    key = ".".join(map(str, places))
    if problem["type"] == "missing":
        return f"missing a required argument: {key!r}"
    if problem["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields) or "no arguments"
        return f"it has no argument {key!r}; it takes {known}"
    if problem["type"] == "literal_error":
        return f"{key} {problem['input']!r} is not in {problem['ctx']['expected']}"
    kind = type(problem["input"]).__name__
    return f"{key} is {str(problem['input'])[:80]!r} ({kind}): {problem['msg']}"
