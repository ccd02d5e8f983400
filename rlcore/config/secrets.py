"""Finds secrets among the values of a configuration, and masks them where it is written or shown.

These values count as secrets:

- a value whose key no section declares and whose name is that of a secret: `WANDB_API_KEY`,
  `hf_token`, `password` (rlcore's own keys hold no secrets);
- every value of a map of environment variables;
- in a URL, the user and password, and parameters and parts of the path that are secret by name or
  look like a key;
- in a list of words, the value of an option, a variable or a header that is secret by name.

`hide_secrets` masks these values in all later output of the process too, since errors of other
libraries may quote them.
"""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from rlcore.config.schema import section_at
from rlcore.config.yaml_settings import KeyPath, plain, read_override
from rlcore.errors import ConfigError
from rlcore.terminal import MASK, hide, redacted

_ENVIRONMENTS = frozenset({"environment", "env_vars"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Words that mark a key as secret anywhere in its name.
_SECRET = frozenset(
    {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "credential"}
    | {"credentials", "apikey", "authorization", "bearer"}
)
# Words that mark a key as secret only at its end, unlike in `moe_token_dispatcher_type`,
# `token_file` or `max_new_tokens`.
_SECRET_AT_THE_END = frozenset(
    {"key", "token", "auth", "cookie", "pat", "pass", "sig", "signature"}
)
# Words before the last one that name a column or a symbol: `answer_key`, `eos_token`.
_ORDINARY = frozenset(
    {"answer", "input", "label", "messages", "output", "prompt", "question", "sort", "tools"}
    | {"bos", "cls", "eos", "image", "mask", "pad", "sep", "special", "stop", "unk"}
)
_USER_OF_A_URL = re.compile(r"(?<=://)[^/?#\s@'\"]*(?:@[^/?#\s@'\"]*)*(?=@)")
_PARAMETER = re.compile(r"(?<=[?&])([\w.\-]+)=([^&#\s'\"]+)")
_URL = re.compile(r"\w+://[^\s'\"<>]+")
_PART_OF_A_PATH = re.compile(r"(?<=/)[^/?#]+")
# A sequence of letters and digits that nobody chose as a name.
_RANDOM = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{12,}|[A-Za-z]{24,}")
# `--api-key`, `--token=X`, `API_KEY=X`, `X-Api-Key: X`
_OPTION = re.compile(r"(?<!\S)(-{0,2})([A-Za-z][\w-]*)(?:(=|:\s*|\s+)(.+))?", re.DOTALL)
_BEARER = re.compile(r"(?<=Bearer )[\w.~+/=-]{6,}|(?<=Basic )[\w+/=]{12,}")


def masked(values: Mapping[str, Any], path: KeyPath = ()) -> dict[str, Any]:
    """Return the nested values of a configuration with every secret masked."""
    shown: dict[str, Any] = _Masker().value(values, path)
    return shown


def hide_secrets(values: Mapping[str, Any]) -> None:
    """Mask the secrets of a configuration and of our environment in this process's output."""
    masker = _Masker()
    masker.value(values, ())
    named = {text for path, text in texts(values) if path[-1].endswith("_env")}
    for name, value in os.environ.items():
        if name in named or _is_secret_name(name):
            masker.found.add(value)
        else:
            # The URL of a proxy may have a password.
            masker.text(value)
    hide(masker.found)


def mask_text(text: str) -> str:
    """Mask hidden secrets and the secret parts of URLs in a text."""
    return _Masker().text(redacted(text))


def is_secret(path: KeyPath) -> bool:
    """Whether text under this key is a secret."""
    section = section_at(path[:-1])
    if section is not None and path[-1] in section.model_fields:
        return False
    return (path[-2:-1] != () and path[-2] in _ENVIRONMENTS) or _is_secret_name(path[-1])


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line in which overrides with secrets are masked as a whole."""
    return [_masked_argument(argument) for argument in arguments]


def texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text of nested values with its key; the items of a list have the list's."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item, path)
    elif isinstance(value, str):
        yield path, value


class _Masker:
    """Masks secrets, and collects them."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def value(self, value: Any, path: KeyPath) -> Any:
        """Mask a value of the configuration."""
        if isinstance(value, Mapping):
            return {key: self.value(inner, (*path, str(key))) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return self._words(value, path)
        if not isinstance(value, str) or not value:
            return value
        if is_secret(path):
            # An environment variable may hold an ordinary word (`INFO`). Only values that look like
            # a key are masked in other output too.
            is_key = _is_secret_name(path[-1]) or _RANDOM.search(value) is not None
            return self._hidden(value) if is_key else MASK
        return self.text(value)

    def text(self, text: str) -> str:
        """Mask secret parts of URLs, and the credentials after `Bearer` and `Basic`."""
        text = _BEARER.sub(lambda found: self._hidden(found[0]), text)
        if "://" not in text:
            return text
        text = _USER_OF_A_URL.sub(lambda found: self._hidden_user(found[0]), text)
        return _URL.sub(lambda found: self._url(found[0]), text)

    def _words(self, values: Sequence[Any], path: KeyPath) -> list[Any]:
        """Mask the items of a list, which may be the words of a command."""
        masked_values: list[Any] = []
        # Whether the previous word is an option that is secret by name.
        of_secret = False
        for value in values:
            is_secret_text = of_secret and isinstance(value, str) and value
            known = self._hidden(value) if is_secret_text else self.value(value, path)
            found = _OPTION.fullmatch(known) if isinstance(known, str) else None
            of_secret = False
            if found is not None and _is_secret_name(found[2]):
                dashes, name, between, given = found.groups()
                if given and (dashes or between != " "):
                    known = f"{dashes}{name}{between}{self._hidden(given)}"
                of_secret = bool(dashes) and not given
            masked_values.append(known)
        return masked_values

    def _url(self, url: str) -> str:
        def parameter(found: re.Match[str]) -> str:
            name, value = found.groups()
            secret = _is_secret_name(name) or name == "code" or _RANDOM.search(value)
            return f"{name}={self._hidden(value) if secret else value}"

        def part(found: re.Match[str]) -> str:
            return self._hidden(found[0]) if _RANDOM.search(found[0]) else found[0]

        scheme, _, rest = url.partition("://")
        address, mark, parameters = rest.partition("?")
        # For other schemes the address is the name of a file.
        shown = _PART_OF_A_PATH.sub(part, address) if scheme.startswith("http") else address
        return f"{scheme}://{shown}{_PARAMETER.sub(parameter, mark + parameters)}"

    def _hidden_user(self, user: str) -> str:
        name, _, password = user.partition(":")
        # The header of a request has user and password in this form.
        self.found.add(b64encode(unquote(user).encode()).decode())
        return self._hidden(password or name)

    def _hidden(self, secret: str) -> str:
        if secret != MASK:
            self.found |= {secret, unquote(secret)}
        return MASK


def _masked_argument(argument: str) -> str:
    key, equals, _ = argument.partition("=")
    if not equals or argument.startswith("-"):
        return argument
    try:
        tree = read_override(argument)
    except ConfigError:
        # The argument is not an override; the command itself refuses it.
        return mask_text(argument)
    values = plain(tree)
    return argument if masked(values) == values else f"{key}={MASK}"


def _is_secret_name(key: str) -> bool:
    words = [word.lower() for word in _WORD.findall(key)]
    if _SECRET & set(words):
        return True
    if not words or words[-1] not in _SECRET_AT_THE_END:
        return False
    return not (len(words) > 1 and words[-2] in _ORDINARY)
