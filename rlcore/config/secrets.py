"""Finds secrets among the values of a configuration, and masks them where it is written or shown.

A value is a secret by the name of its key, if no section declares that key (rlcore's own keys hold
no secrets): `WANDB_API_KEY`, `hf_token`, `password`. Ray's `env_vars` are secrets one and all. Of a
URL the part before the host and secrets among its parameters are masked, under every key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcore.config.schema import section_at
from rlcore.config.yaml_settings import KeyPath, read_override, settings
from rlcore.errors import ConfigError

MASK = "(masked)"
_ENVIRONMENT = ("cluster", "ray", "runtime_env", "env_vars")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# secret wherever they stand in a key
_SECRET = frozenset(
    {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "credential"}
    | {"credentials", "apikey"}
)
# secret as the last word: not in `moe_token_dispatcher_type`, `token_file`, `max_new_tokens`
_SECRET_AT_THE_END = frozenset({"key", "token"})
# the word before names a column or a symbol: `answer_key`, `eos_token`
_ORDINARY = frozenset(
    {"answer", "input", "label", "messages", "output", "prompt", "question", "sort", "tools"}
    | {"bos", "cls", "eos", "image", "mask", "pad", "sep", "special", "stop", "unk"}
)
_USER_OF_A_URL = re.compile(r"(?<=://)[^/?#\s@'\"]*(?:@[^/?#\s@'\"]*)*(?=@)")
_PARAMETER = re.compile(r"(?<=[?&])([\w.\-]+)=([^&#\s'\"]+)")


def masked(values: Mapping[str, Any], path: KeyPath = ()) -> dict[str, Any]:
    """Return the nested values of a configuration with every secret masked."""
    return {key: _masked(value, (*path, str(key))) for key, value in values.items()}


def mask_urls(text: str) -> str:
    """Return the text with the user, the password and secret parameters of its URLs masked."""
    if "://" not in text:
        return text
    text = _USER_OF_A_URL.sub(MASK, text)
    return _PARAMETER.sub(
        lambda found: f"{found[1]}={MASK if _is_secret_name(found[1]) else found[2]}", text
    )


def is_secret(path: KeyPath) -> bool:
    """Whether text under this key is a secret."""
    section = section_at(path[:-1])
    if section is not None and path[-1] in section.model_fields:
        return False
    return path[:-1] == _ENVIRONMENT or _is_secret_name(path[-1])


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the overrides that hold secrets masked as a whole."""
    return [_masked_argument(argument) for argument in arguments]


def masked_keys(value: Any, path: KeyPath = ()) -> Iterator[str]:
    """Yield the dotted key of every value that `masked` has masked."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from masked_keys(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        yield from (found for item in value for found in masked_keys(item, path))
    elif isinstance(value, str) and (value == MASK or f"://{MASK}@" in value):
        yield ".".join(path)


def _masked(value: Any, path: KeyPath) -> Any:
    if isinstance(value, Mapping):
        return masked(value, path)
    if isinstance(value, list | tuple):
        return [_masked(item, path) for item in value]
    if not isinstance(value, str):
        return value
    return MASK if value and is_secret(path) else mask_urls(value)


def _masked_argument(argument: str) -> str:
    key, equals, _ = argument.partition("=")
    if not equals or argument.startswith("-"):
        return argument
    try:
        tree = read_override(argument)
    except ConfigError:  # no override; the command itself refuses it
        return mask_urls(argument)
    holds_secrets = any(
        _masked(setting.value, path) != setting.value for path, setting in settings(tree)
    )
    return f"{key}={MASK}" if holds_secrets else argument


def _is_secret_name(key: str) -> bool:
    words = [word.lower() for word in _WORD.findall(key)]
    if _SECRET & set(words):
        return True
    if not words or words[-1] not in _SECRET_AT_THE_END:
        return False
    return not (len(words) > 1 and words[-2] in _ORDINARY)
