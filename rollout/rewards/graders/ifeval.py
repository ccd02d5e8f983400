"""The reward `ifeval`: checks a response against the constraints of its row."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rlcore.data.sample import Sample
from rollout.rewards.graders.constraints import IFEVAL, OPEN_INSTRUCT
from rollout.rewards.graders.places import after_thinking, literal_of

CONSTRAINTS = {**IFEVAL, **OPEN_INSTRUCT}
_DETECT_LANGUAGE = ("language:response_language", "validate_response_language")


def ifeval(sample: Sample, score: str = "all") -> dict[str, Any]:
    """1 if all constraints are followed, or the share that is followed; strict in IFEval's sense.

    An empty response follows none.

    Raises:
        ValueError: label and row have no constraints that can be checked.
    """
    response = after_thinking(sample.response_text)
    bare = response.strip()
    followed = {
        # open-instruct strips a response before its checks
        f"{index}:{name}": bool(bare)
        and CONSTRAINTS[name].holds(bare if name in OPEN_INSTRUCT else response, **keywords)
        for index, (name, keywords) in enumerate(constraints_of(sample.label, sample.metadata))
    }
    right = all(followed.values())
    share = sum(followed.values()) / len(followed)
    return {
        "score": share if score == "share" else float(right),
        "correct": right,
        "info": followed,
    }


def constraints_of(label: Any, row: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The constraints of a row, by name, with their parameters.

    They are in the label (`{"instruction_id": [...], "kwargs": [...]}`, or open-instruct's
    `{"func_name": ..., "N": ...}`, as an object, a list with one object, or either as JSON or
    Python text), or otherwise in the row's columns `instruction_id_list` and `kwargs`, as in
    google/IFEval.

    Raises:
        ValueError: constraints are missing or unknown, or have invalid parameters.
    """
    given = literal_of(label)
    if isinstance(given, list) and len(given) == 1:
        given = literal_of(given[0])
    if isinstance(given, Mapping) and "func_name" in given:
        rest = {key: value for key, value in given.items() if key != "func_name"}
        return [_constraint(given["func_name"], rest)]
    given = given if isinstance(given, Mapping) else row
    names, keywords = (
        literal_of(next((given[key] for key in keys if given.get(key) is not None), None))
        for keys in (("instruction_id_list", "instruction_id"), ("kwargs",))
    )
    if not isinstance(names, list) or not names or not isinstance(keywords, list):
        raise ValueError(
            "expected constraints as {instruction_id: [...], kwargs: [...]} or {func_name: ...} in"
            " the label, or as the columns instruction_id_list and kwargs, got the label"
            f" {str(label)[:80]!r}"
        )
    if len(names) != len(keywords):
        raise ValueError(f"{len(names)} constraints, but {len(keywords)} kwargs")
    return [_constraint(name, given) for name, given in zip(names, keywords)]


def _constraint(name: Any, given: Any) -> tuple[str, dict[str, Any]]:
    known = CONSTRAINTS.get(name) if isinstance(name, str) else None
    if known is None:
        raise ValueError(f"the constraint {name!r} is unknown; known are {', '.join(CONSTRAINTS)}")
    if name in _DETECT_LANGUAGE and importlib.util.find_spec("langdetect") is None:
        raise ValueError(f"the constraint {name} needs a package: pip install langdetect")
    given = literal_of(given)
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ValueError(f"the constraint {name}: its kwargs are no map but {str(given)[:80]!r}")
    # drop nulls, with which parquet fills absent parameters
    given = {
        key: value
        for key, value in given.items()
        if value is not None and not (isinstance(value, float) and math.isnan(value))
    }
    try:
        return name, dict(known.parameters.model_validate(given))
    except ValidationError as error:
        said = _describe(known.parameters, error.errors()[0])
        raise ValueError(f"the constraint {name}: {said}") from error


def _describe(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    """Describe an invalid parameter."""
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"missing a required argument: {key!r}"
    if problem["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields) or "no arguments"
        return f"it has no argument {key!r}; it takes {known}"
    if problem["type"] == "literal_error":
        return f"{key} {problem['input']!r} is not in {problem['ctx']['expected']}"
    kind = type(problem["input"]).__name__
    return f"{key} is {str(problem['input'])[:80]!r} ({kind}): {problem['msg']}"
