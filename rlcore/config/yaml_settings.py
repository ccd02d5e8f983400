"""Settings as YAML, without YAML's traps: read with line numbers, and written with origins.

`1e-6` is a number, `2026-01-31` and `12:30` are text, `010` is not octal, and a key that is written
twice is an error. ruamel.yaml is no replacement: dates stay dates, a number loses its text, tags
and maps that contain themselves pass, and `yes` and `off`, which are booleans here, become text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import yaml

from rlcore.errors import ConfigError

DEFAULT = "default"
OVERRIDE = "override"

KeyPath = tuple[str, ...]

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_FLOAT = re.compile(
    r"""[-+]?(?:(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?
             |[0-9][0-9_]*[eE][-+]?[0-9]+
             |\.(?:inf|Inf|INF))$
      |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)
_DIGITS = list("-+.0123456789")
Where = Callable[[yaml.Node], str]
# YAML 1.1 takes the first three for line breaks and skips the last at the start of a text; YAML 1.2
# keeps all four inside of values.
_KEPT = "\x85\u2028\u2029\ufeff"
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_COMMENT_COLUMN = 52
_ENDLESS = 1 << 20


# --- settings as they were written ----------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One value (scalar or list), its origin (`file:line` or "override"), and a scalar's text."""

    value: Any
    origin: str
    text: str | None = None


Tree = dict[str, Union[Setting, "Tree"]]


def merge(base: Tree, over: Tree) -> Tree:
    """Put `over` on top of `base`: maps merge, other values replace earlier ones."""
    merged = dict(base)
    for key, new in over.items():
        old = merged.get(key)
        merged[key] = merge(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
    return merged


def plain(tree: Tree) -> dict[str, Any]:
    """Return the values alone."""
    return {
        key: plain(node) if isinstance(node, dict) else node.value for key, node in tree.items()
    }


def settings(tree: Tree, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Setting]]:
    """Yield every leaf with its path, in the order written."""
    for key, node in tree.items():
        if isinstance(node, dict):
            yield from settings(node, (*path, key))
        else:
            yield (*path, key), node


def find(tree: Tree, path: KeyPath) -> Setting | Tree | None:
    """Return the node at `path`, or None. For the index of a list item, return the list."""
    node: Setting | Tree = tree
    for key in path:
        if isinstance(node, Setting):
            return node
        if key not in node:
            return None
        node = node[key]
    return node


def origin(tree: Tree, path: KeyPath) -> str:
    """Return the origin of `path` (of a map, that of its first setting), or "default"."""
    node = find(tree, path)
    if isinstance(node, dict):
        node = next((setting for _, setting in settings(node)), None)
    return DEFAULT if node is None else node.origin


# --- reading --------------------------------------------------------------------------------------


class ConfigLoader(yaml.SafeLoader):
    """PyYAML's safe loader with other rules for plain scalars.

    Characters that PyYAML would not keep are replaced, while parsing, by others that the text does
    not contain.
    """

    def __init__(self, text: str) -> None:
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in text)
        replaced = dict(zip(_KEPT, free))
        self._kept = {ord(new): old for old, new in replaced.items()}
        super().__init__(text.translate({ord(old): new for old, new in replaced.items()}))

    def compose_scalar_node(self, anchor: dict[Any, yaml.Node]) -> yaml.ScalarNode:
        """Restore the replaced characters."""
        node = super().compose_scalar_node(anchor)
        node.value = node.value.translate(self._kept)
        return node


class ConfigDumper(yaml.SafeDumper):
    """The inverse of `ConfigLoader`: it quotes text that would be read as another type."""

    def represent_float(self, data: float) -> yaml.ScalarNode:
        """Write `1e-06`, where PyYAML would write 1.0e-06."""
        if math.isfinite(data):
            return self.represent_scalar(_TAG + "float", repr(data))
        return super().represent_float(data)

    def represent_text(self, data: str) -> yaml.ScalarNode:
        """Escape line breaks of any kind, which other styles would fold."""
        style = None if data.isprintable() else '"'
        return self.represent_scalar(_TAG + "str", data, style)

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value out, without YAML's anchors."""
        return True


_DROPPED = {_TAG + kind for kind in ("int", "float", "timestamp")}
for _class in (ConfigLoader, ConfigDumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in _DROPPED]
        for first, rules in _class.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver(_TAG + "int", _INT, _DIGITS)
    _class.add_implicit_resolver(_TAG + "float", _FLOAT, _DIGITS)
ConfigDumper.add_representer(float, ConfigDumper.represent_float)
ConfigDumper.add_representer(str, ConfigDumper.represent_text)


def read_file(path: Path) -> Tree:
    """Return the settings of one file. Errors name file and line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    tree = _parse(text, str(path), lambda node: f"{path}:{node.start_mark.line + 1}")
    if tree is None:
        return {}
    if isinstance(tree, Setting):
        raise ConfigError(f"{tree.origin}: got {tree.value!r}, expected `key: value` lines")
    return tree


def read_override(argument: str) -> Tree:
    """Return the settings of one argument `a.b.c=value`; the value is YAML."""
    dotted, _, text = argument.partition("=")
    keys = dotted.split(".")
    if not all(keys):
        raise ConfigError(f"override {argument!r}: expected a.b.c=value")
    if not text.strip(" \t\r\n"):
        raise ConfigError(
            f"override {argument!r}: no value after '='; `{dotted}=null` unsets a key"
        )
    node: Setting | Tree = _parse(text, f"override {argument!r}", lambda _: OVERRIDE) or Setting(
        None, OVERRIDE
    )
    for key in reversed(keys):
        node = {key: node}
    assert isinstance(node, dict)
    return node


def _parse(text: str, source: str, where: Where) -> Setting | Tree | None:
    try:
        loader = ConfigLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, where, frozenset())
        return _convert(loader, node, where)
    except RecursionError as error:
        raise ConfigError(f"{source}: not valid YAML: too many parts inside each other") from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_one_line(error, source)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def _convert(loader: ConfigLoader, node: yaml.Node, where: Where) -> Setting | Tree:
    if not isinstance(node, yaml.MappingNode):
        text = node.value if isinstance(node, yaml.ScalarNode) else None
        return Setting(loader.construct_object(node, deep=True), where(node), text)
    loader.flatten_mapping(node)
    return {key.value: _convert(loader, value, where) for key, value in node.value}


def _check_keys(node: yaml.Node, where: Where, above: frozenset[int]) -> None:
    """Refuse repeated keys, keys that are not plain words, tags, and recursive maps."""
    if id(node) in above:
        raise ConfigError(f"{where(node)}: this part contains itself")
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, where, above | {id(node)})
    if not isinstance(node, yaml.MappingNode):
        return
    if node.tag != _TAG + "map":
        raise ConfigError(f"{where(node)}: tag {node.tag!r} has no meaning here")
    first: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{where(key)}: a key is a plain word, got a list or map")
        if key.value in first and key.tag != _TAG + "merge":
            raise ConfigError(
                f"{where(key)}: key {key.value!r} is given twice, first at"
                f" {where(first[key.value])}"
            )
        first[key.value] = key
        _check_keys(value, where, above | {id(node)})


def _one_line(error: yaml.MarkedYAMLError, source: str) -> str:
    mark = error.problem_mark or error.context_mark
    at = (
        f":{mark.line + 1}:{mark.column + 1}"
        if mark is not None and not source.startswith("override")
        else ""
    )
    what = ", ".join(part for part in (error.context, error.problem) if part)
    return f"{source}{at}: not valid YAML: {what}"


# --- writing --------------------------------------------------------------------------------------


def render_config(values: Mapping[str, Any], origins: Mapping[str, object]) -> str:
    """Return YAML of nested `values`; `origins` maps dotted keys to comments."""
    return "".join(f"{line}\n" for line in _lines(values, origins, "", ""))


def _lines(
    values: Mapping[str, Any], origins: Mapping[str, object], path: str, indent: str
) -> Iterator[str]:
    for key, value in values.items():
        head = f"{indent}{_flow(key)}:"
        if isinstance(value, Mapping) and value:
            yield head
            yield from _lines(value, origins, f"{path}{key}.", indent + "  ")
            continue
        line = f"{head} {_flow(value)}"
        comment = " ".join(str(origins.get(path + key, "")).split())
        # The name of a file may have control characters, or bytes that are not UTF-8.
        comment = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in comment)
        yield f"{line.ljust(_COMMENT_COLUMN)}  # {comment}" if comment else line


def _flow(value: Any) -> str:
    """Return one line of YAML."""
    text = yaml.dump(
        value, Dumper=ConfigDumper, default_flow_style=True, width=_ENDLESS, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")
