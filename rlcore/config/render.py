"""A configuration as YAML with the origin of each value; it loads to the same configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rlcore.config.load import Loaded
from rlcore.config.yaml_reader import ConfigDumper

_COMMENT_COLUMN = 52
_ENDLESS = 1 << 20


def render(loaded: Loaded) -> str:
    """Return the configuration with all defaults as `key: value    # origin` lines."""
    return render_config(loaded.config.model_dump(), loaded.origins)


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
        yield f"{line.ljust(_COMMENT_COLUMN)}  # {comment}" if comment else line


def _flow(value: Any) -> str:
    """Return one line of YAML."""
    text = yaml.dump(
        value, Dumper=ConfigDumper, default_flow_style=True, width=_ENDLESS, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")
