"""Checks the arguments of a call against the JSON schema of its tool."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson

from rlcore.data.messages import parse_json
from rlcore.errors import DataError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

Tools = Sequence[Mapping[str, Any]]
# Schemas come from requests, and cached validators outlive these: longer schemas are not cached.
MAX_KEPT_BYTES = 16 << 10
# Python type names, which tools of public data sets use. Other type names that JSON schema does not
# know constrain nothing.
TYPES = {
    "array": "array", "boolean": "boolean", "integer": "integer", "null": "null",
    "number": "number", "object": "object", "string": "string",
    "bool": "boolean", "dict": "object", "double": "number", "float": "number", "int": "integer",
    "list": "array", "str": "string", "tuple": "array",
}  # fmt: skip
# Keywords whose values are not schemas.
VALUES = frozenset({"const", "default", "enum", "example", "examples", "required"})
# Keywords that may allow arguments beyond `properties`.
OPEN = frozenset(
    {
        "$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties",
        "unevaluatedProperties",
    }
)  # fmt: skip
# Keywords without effect on validation.
WORDS = frozenset({"default", "deprecated", "description", "example", "examples", "title"})
PYTHON = {"True": True, "False": False, "None": None}  # Python literals that chat templates write


def check_tools(tools: Tools) -> None:
    """Refuse a tool with an invalid schema (DataError)."""
    for tool in tools:
        _validator(tool)


def call_error(name: str, arguments: Mapping[str, Any], tools: Tools) -> str:
    """The reason for which a call is invalid; "" if it is valid.

    An argument that the schema does not name is an error, unless the schema allows others.

    Raises:
        DataError: the schema is invalid.
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


def typed(
    name: str, texts: Mapping[str, Any], tools: Tools, read: Callable[[str], Any] = parse_json
) -> dict[str, Any]:
    """Convert arguments that a format writes as texts to the types of the schema.

    Text that `read` does not make a value of such a type stays a text.
    """
    tool = _named(name, tools)
    if tool is None:
        return dict(texts)
    validator = _validator(tool)
    properties = validator.schema.get("properties", {})
    return {
        key: _typed(text, validator.evolve(schema=properties[key]), read)
        if key in properties
        else text
        for key, text in texts.items()
    }


def parse_python(text: str) -> Any:
    """Return the value of a text that is JSON, or a Python list or map that JSON can say.

    Raises as `parse_json`; also SyntaxError, TypeError and MemoryError.
    """
    try:
        return parse_json(text)
    except ValueError:
        if not text.lstrip().startswith(("[", "{")):
            raise
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = [ast.dump(key) for key in node.keys if key]
            if len({*keys}) < len(node.keys):
                raise ValueError("it has a key twice")
    return parse_json(json.dumps(ast.literal_eval(tree), allow_nan=False))


def _typed(text: Any, validator: Validator, read: Callable[[str], Any]) -> Any:
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
        value = PYTHON[word] if word in PYTHON else read(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
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
    """The validator of a tool's arguments; without a schema it accepts any."""
    function = _function(tool)
    name = str(function.get("name"))
    schema = orjson.dumps(function.get("parameters") or {})
    kept = len(name) + len(schema) <= MAX_KEPT_BYTES
    return (_kept_validator if kept else _new_validator)(name, schema)


def _new_validator(name: str, schema_json: bytes) -> Validator:
    """Make a validator. Raises DataError for an invalid schema."""
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
    # with an empty registry, references of the schema are never fetched
    found: Validator = kind(schema, registry=Registry())
    return found


_kept_validator = lru_cache(1024)(_new_validator)


def _standard(schema: Any) -> Any:
    """Translate keywords of OpenAPI and Python in a schema to JSON schema."""
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
        # a boolean `required` inside properties comes from draft 3
        del found["required"]
    if found.get("nullable") is True:
        del found["nullable"]
        found = {"anyOf": [found, {"type": "null"}]}
    return found
