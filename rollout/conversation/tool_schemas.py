"""Whether the arguments of a call fit the JSON schema of its tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson

from rlcore.data.messages import parse_json
from rlcore.errors import DataError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

Tools = Sequence[Mapping[str, Any]]
# Requests choose the schemas, and their validators outlive them: a longer one is made each time.
MAX_KEPT_BYTES = 16 << 10
# Types of Python, which tools of public data sets have. Others that JSON schema does not know ask
# for nothing.
TYPES = {
    "array": "array", "boolean": "boolean", "integer": "integer", "null": "null",
    "number": "number", "object": "object", "string": "string",
    "bool": "boolean", "dict": "object", "double": "number", "float": "number", "int": "integer",
    "list": "array", "str": "string", "tuple": "array",
}  # fmt: skip
# Keywords whose values are no schemas.
VALUES = frozenset({"const", "default", "enum", "example", "examples", "required"})
# Keywords that may allow further arguments than `properties`.
OPEN = frozenset(
    {
        "$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties",
        "unevaluatedProperties",
    }
)  # fmt: skip
# Keywords that ask for nothing.
WORDS = frozenset({"default", "deprecated", "description", "example", "examples", "title"})
PYTHON = {"True": True, "False": False, "None": None}  # as chat templates write them


def check_tools(tools: Tools) -> None:
    """Refuse a tool whose schema nothing can be checked against (DataError)."""
    for tool in tools:
        _validator(tool)


def problem_of(name: str, arguments: Mapping[str, Any], tools: Tools) -> str:
    """Say why a tool cannot be called so; "" if it can.

    An argument that the schema does not name is a problem, unless the schema speaks of others.

    Raises:
        DataError: the schema is none.
    """
    tool = _named(name, tools)
    if tool is None:
        known = ", ".join(str(_function(tool).get("name")) for tool in tools)
        return f"there is no tool {name!r}; there is {known}"
    validator = _validator(tool)
    if _fits(arguments, validator):
        return ""
    from jsonschema.exceptions import best_match

    error = best_match(validator.iter_errors(arguments))
    if not error.absolute_path:
        return f"{name}: {error.message}"
    where = ".".join(map(str, error.absolute_path))
    wanted = json.dumps(error.validator_value, ensure_ascii=False)[:200]
    got = json.dumps(error.instance, ensure_ascii=False)[:80]
    return f"{name}: {where}: got {got}, expected {error.validator}: {wanted}"


def typed(name: str, texts: Mapping[str, Any], tools: Tools) -> dict[str, Any]:
    """Return arguments that a format writes as texts with the types that the schema wants.

    What is no JSON of such a type stays a text.
    """
    tool = _named(name, tools)
    if tool is None:
        return dict(texts)
    validator = _validator(tool)
    properties = validator.schema.get("properties", {})
    return {
        key: _typed(text, validator.evolve(schema=properties[key])) if key in properties else text
        for key, text in texts.items()
    }


def _typed(text: Any, validator: Validator) -> Any:
    schema = validator.schema
    if (
        not isinstance(text, str)
        or schema is True
        or not schema.keys() - WORDS
        or schema.get("type") == "string"
    ):
        return text
    word = text.strip()
    try:
        value = PYTHON[word] if word in PYTHON else parse_json(text)
    except (ValueError, RecursionError):
        return text
    return value if not isinstance(value, str) and _fits(value, validator) else text


def _fits(value: Any, validator: Validator) -> bool:
    from referencing.exceptions import Unresolvable

    try:
        return validator.is_valid(value)
    except Unresolvable as error:
        raise DataError(
            f"tools: a schema points to {error.ref!r}, which it does not hold; nothing is fetched"
        ) from error


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def _named(name: str, tools: Tools) -> Mapping[str, Any] | None:
    return next((tool for tool in tools if _function(tool).get("name") == name), None)


def _validator(tool: Mapping[str, Any]) -> Validator:
    """Return what checks the arguments of a tool; without a schema it takes any."""
    function = _function(tool)
    name = str(function.get("name"))
    schema = orjson.dumps(function.get("parameters") or {})
    kept = len(name) + len(schema) <= MAX_KEPT_BYTES
    return _kept_validator(name, schema) if kept else _new_validator(name, schema)


def _new_validator(name: str, schema_json: bytes) -> Validator:
    """Return a validator. Raises DataError where the schema is none."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = _standard(orjson.loads(schema_json))
    try:
        if not isinstance(schema, dict):
            raise SchemaError("it is not a map")
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
    except SchemaError as error:
        where = ".".join(map(str, error.absolute_path))
        raise DataError(
            f"tools: the parameters of {name!r} are no JSON schema"
            f"{f' ({where})' if where else ''}: {error.message}"
        ) from error
    if "properties" in schema and not schema.keys() & OPEN:
        schema["additionalProperties"] = False
    # an empty registry: nothing is fetched from where a schema points to
    found: Validator = kind(schema, registry=Registry())
    return found


_kept_validator = lru_cache(1024)(_new_validator)


def _standard(schema: Any) -> Any:
    """Return a schema in the words of JSON schema, where it has those of OpenAPI or Python."""
    if isinstance(schema, list):
        return [_standard(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: v if key in VALUES else _standard(v) for key, v in schema.items()}
    types = found.get("type")
    if isinstance(types, str | list):
        given = [types] if isinstance(types, str) else types
        names = [TYPES.get(name) if isinstance(name, str) else None for name in given]
        found["type"] = names[0] if isinstance(types, str) else names
        if None in names:
            del found["type"]
    if isinstance(found.get("required"), bool):
        del found["required"]  # of the third draft, in properties
    if found.get("nullable") is True:
        null = {"type": "null"}
        found.pop("nullable")
        found = {"anyOf": [found, null]}
    return found
