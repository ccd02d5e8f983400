"""A configuration as YAML that says behind each value where it came from, and that loads to the same configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rlcore.config.load import Loaded
from rlcore.config.yaml_reader import ConfigDumper

_WIDTH = 52     # column of the origins
_ENDLESS = 1 << 20


def render(loaded: Loaded) -> str:
    """The merged configuration, every default included, as `key: value    # origin` lines."""
    return "\n".join(_lines(loaded, loaded.config.model_dump(), "", "")) + "\n"


def _lines(loaded: Loaded, values: Mapping[str, Any], path: str, indent: str) -> Iterator[str]:
    for key, value in values.items():
        name = _flow(key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _lines(loaded, value, f"{path}{key}.", indent + "  ")
        else:
            yield f"{indent}{name}: {_flow(value)}".ljust(_WIDTH) + f"  # {loaded.origin(path + key)}"


def _flow(value: Any) -> str:
    """One line of YAML."""
    text = yaml.dump(value, Dumper=ConfigDumper, default_flow_style=True, width=_ENDLESS, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
