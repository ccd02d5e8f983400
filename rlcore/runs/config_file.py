"""config.yaml as a run writes it: every value with where it came from, and readable as a configuration again.

    policy:
      optimizer:
        lr: 2.0e-06  # command line
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


def render_config(values: Mapping[str, Any], origins: Mapping[str, object]) -> str:
    """YAML text of nested `values`; `origins` maps dotted keys (`policy.optimizer.lr`) to comments."""
    return "\n".join(_lines(values, origins, "", 0)) + "\n"


def _lines(values: Mapping[str, Any], origins: Mapping[str, object], prefix: str, depth: int) -> list[str]:
    lines = []
    for key, value in values.items():
        dotted, head = f"{prefix}{key}", "  " * depth + f"{_scalar(key)}:"
        if isinstance(value, Mapping) and value:
            lines += [head, *_lines(value, origins, f"{dotted}.", depth + 1)]
        else:
            comment = " ".join(str(origins[dotted]).split()) if dotted in origins else ""
            lines.append(f"{head} {_scalar(value)}" + (f"  # {comment}" if comment else ""))
    return lines


class _OneLine(yaml.SafeDumper):
    """Values on one line each, so that a comment can follow."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_OneLine.add_representer(str, _string)


def _scalar(value: Any) -> str:
    text = yaml.dump(value, Dumper=_OneLine, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
