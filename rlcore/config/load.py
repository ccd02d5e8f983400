"""Loads files and overrides into a checked configuration that knows the origin of each value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlcore.config.checks.all_checks import check, warnings_of
from rlcore.config.messages import ConfigIssue, config_error, invalid_value
from rlcore.config.schema import may_be_null, section_at
from rlcore.config.secrets import MASK, hide_secrets, texts
from rlcore.config.sections.base import Plugin
from rlcore.config.sections.root import Config
from rlcore.config.yaml_settings import (
    DEFAULT,
    KeyPath,
    Setting,
    Tree,
    find,
    merge,
    plain,
    read_file,
    read_override,
    settings,
)
from rlcore.errors import ConfigError

_OVERRIDE = re.compile(r"[A-Za-z_][\w.\-+]*=")
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Loaded:
    """A configuration that passed every check except those that need torch."""

    config: Config
    # Dotted key of every value -> "file:line" | "override" | "default".
    origins: Mapping[str, str]
    # Warnings to log, one line each: values without effect, or without the expected effect.
    warnings: tuple[str, ...] = ()

    def origin(self, path: str) -> str:
        """Return where the value at `path` came from; for a section, its first value."""
        if path in self.origins:
            return self.origins[path]
        below = (origin for key, origin in self.origins.items() if key.startswith(path + "."))
        above = (origin for key, origin in self.origins.items() if path.startswith(key + "."))
        return next((origin for origin in (*above, *below) if origin != DEFAULT), DEFAULT)

    def to_json(self) -> str:
        """Return the configuration and its origins as text, secrets included."""
        return json.dumps([self.config.model_dump(), dict(self.origins), self.warnings])

    @classmethod
    def from_json(cls, text: str) -> Loaded:
        """Read the text of `to_json`, without repeating the checks."""
        values, origins, warnings = json.loads(text)
        hide_secrets(values)
        return cls(Config.model_validate(values), origins, tuple(warnings))

    def error(self, path: str, message: str) -> ConfigError:
        """Return a `ConfigError` about `path` that says where its value came from."""
        return ConfigError(ConfigIssue(path, message).at(self.origin(path)))


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split a command line into files (`*.yaml`, `*.yml`) and overrides (`a.b=value`)."""
    files: list[Path] = []
    overrides: list[str] = []
    for argument in arguments:
        if _OVERRIDE.match(argument):
            overrides.append(argument)
        elif argument.endswith(_SUFFIXES):
            files.append(Path(argument))
        else:
            raise ConfigError(
                f"argument {argument!r}: expected a file *.yaml or an override a.b.c=value"
            )
    return files, overrides


def load_config(
    files: Sequence[Path], overrides: Sequence[str] = (), *, presets: Sequence[str] = ()
) -> Loaded:
    """Merge `presets`, `files` and then the overrides, and check the result.

    Files merge left to right: maps merge, other values replace earlier ones. A section that is
    `null` returns to its defaults, and an entry of a map of sections (`reward.parts.NAME: null`) is
    removed. Presets are the settings of the command itself, written as overrides.

    If a later layer changes the `name` of a plugin section (`algorithm.estimator`, ...), the
    keywords of the earlier plugin are dropped.

    Raises:
        ConfigError: one line per error, with key, origin, the value and what was expected.
    """
    tree: Tree = {}
    warnings: list[ConfigIssue] = []
    for layer in (_tree_of(presets), *map(read_file, files), _tree_of(overrides)):
        tree = _on_top(tree, layer, warnings)
    config = _validate(tree)
    hide_secrets(config.model_dump())
    if issues := check(config):
        raise config_error(issues, tree)
    warnings += warnings_of(config)
    return Loaded(config, _origins(config, tree), tuple(str(one) for one in warnings))


def refuse_masked(loaded: Loaded) -> None:
    """Refuse masked values, which come from the config.yaml of a run.

    Raises:
        ConfigError: names every masked key.
    """
    found = [".".join(path) for path, text in texts(loaded.config.model_dump()) if MASK in text]
    if found:
        more = f"; the same for {', '.join(found[1:])}" if found[1:] else ""
        raise loaded.error(
            found[0],
            f"got {MASK}, which stands for a secret in the config.yaml of a run: give the value"
            f" again{more}",
        )


def _tree_of(overrides: Sequence[str]) -> Tree:
    tree: Tree = {}
    for override in overrides:
        tree = merge(tree, read_override(override))
    return tree


def _validate(tree: Tree) -> Config:
    # Required sections start empty, so that errors name the missing key inside them.
    fields = Config.model_fields.items()
    required: dict[str, Any] = {name: {} for name, field in fields if field.is_required()}
    values = required | plain(tree)
    try:
        try:
            return Config.model_validate(values)
        except ValidationError as error:
            _numbers_as_text(values, tree, error)
            return Config.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise config_error([invalid_value(details, tree) for details in found], tree) from None


def _numbers_as_text(values: dict[str, Any], tree: Tree, error: ValidationError) -> None:
    """Replace numbers by their text as written where a key holds text, as in `run.name: 1e-3`."""
    for details in error.errors(include_url=False):
        path = tuple(str(key) for key in details["loc"])
        setting = find(tree, path)
        if (
            details["type"] == "string_type"
            and isinstance(setting, Setting)
            and type(setting.value) in (int, float)
        ):
            holder = values
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = setting.text


def _on_top(tree: Tree, layer: Tree, warnings: list[ConfigIssue], path: KeyPath = ()) -> Tree:
    """Put a layer on top of `tree`, by the rules of `load_config`.

    A section with nothing after its name (`tracking:`) sets nothing; a `null` resets it.
    """
    merged = dict(tree)
    for key, new in layer.items():
        here = (*path, key)
        section = section_at(here)
        if isinstance(new, dict):
            old = merged.get(key)
            old = old if isinstance(old, dict) else {}
            if section is not None and issubclass(section, Plugin):
                old = _kept(old, new, section, here, warnings)
            merged[key] = _on_top(old, new, warnings, here)
        elif new.value is not None or section is None or may_be_null(here):
            merged[key] = new
        elif new.text:
            merged.pop(key, None)
    return merged


def _kept(
    old: Tree, new: Tree, section: type[Plugin], path: KeyPath, warnings: list[ConfigIssue]
) -> Tree:
    """Drop the keywords of a plugin that a later layer replaces by another."""
    names = [tree.get("name") for tree in (old, new)]
    values = [name.value for name in names if isinstance(name, Setting)]
    if len(values) < 2 or values[0] == values[1]:
        return old
    own = section.model_fields.keys() - section.keywords
    if dropped := [name for name in old if name not in own]:
        message = f"another name was given; dropped the earlier one's {', '.join(dropped)}"
        warnings.append(ConfigIssue(".".join(path), message))
    return {name: node for name, node in old.items() if name in own}


def _origins(config: Config, tree: Tree) -> dict[str, str]:
    written = {".".join(path): setting.origin for path, setting in settings(tree)}
    found = {path: written.get(path, DEFAULT) for path, _ in leaves(config.model_dump())}
    for path, origin in written.items():
        # The layer gives the name of a plugin instead of its section.
        if f"{path}.name" in found:
            found[f"{path}.name"] = origin
    return found


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value that is not a non-empty map."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
