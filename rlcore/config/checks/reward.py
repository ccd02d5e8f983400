"""Checks of rewards. Pure, like all checks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from rlcore.config.evaluation_sets import evaluation_sets
from rlcore.config.messages import ConfigIssue, expected_by, show
from rlcore.config.secrets import mask_text
from rlcore.config.sections.base import Found
from rlcore.config.sections.graders import GRADERS, OverlongArgs
from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.root import Config

_LOOPBACK = re.compile(r"localhost|127\.[\d.]+|::1")


def graders(config: Config) -> Iterator[ConfigIssue]:
    """Rewards have parts; built-in graders exist and accept their arguments."""
    limit = config.rollout.sampling.max_new_tokens
    for path, reward in _rewards(config):
        if not reward.parts and not (config.learns_from_rows and path == "reward"):
            message = "empty: give one part or more, each with a `function` or a `service`"
            yield ConfigIssue(f"{path}.parts", message)
        for name, part in reward.parts.items():
            where = f"{path}.parts.{name}"
            function = part.function
            if function in GRADERS:
                yield from _arguments(function, part.args, limit, f"{where}.args")
            elif function is not None and ":" not in function:
                hint = _meant(function, GRADERS)
                module, dot, attribute = function.rpartition(".")
                if dot:
                    hint = f"; did you mean '{module}:{attribute}', with a colon?"
                message = f"{function!r} is unknown{hint} (known: {', '.join(GRADERS)}, or"
                yield ConfigIssue(f"{where}.function", f"{message} package.module:function)")


def keys_over_tls(config: Config) -> Found:
    """With TLS, no key of a service, judge or MCP server goes over plain HTTP."""
    for path, url in _keys_in_clear(config) if config.cluster.tls is not None else ():
        yield (
            path,
            f"got {mask_text(url)!r}, but cluster.tls is set and the key of `api_key_env` would"
            " go there in clear: expected https://..., or leave cluster.tls out",
        )


def key_notes(config: Config) -> Found:
    """Yield keys that go over plain HTTP to another machine."""
    for path, url in _keys_in_clear(config) if config.cluster.tls is None else ():
        message = f"the key of `api_key_env` goes to {mask_text(url)} in clear: use https://..."
        yield path, f"{message}, or a network of its own"


def _rewards(config: Config) -> Iterator[tuple[str, RewardConfig]]:
    """Yield the rewards of the run and of evaluation sets, with their keys."""
    yield "reward", config.reward
    for one in evaluation_sets(config):
        if one.reward is not None:
            yield f"{one.key}.reward", one.reward


def _keys_in_clear(config: Config) -> Iterator[tuple[str, str]]:
    """Yield configuration key and URL of each remote server that gets a key without TLS."""
    asked = [
        (f"{path}.parts.{name}.{kind}.url", url, server.api_key_env)
        for path, reward in _rewards(config)
        for name, part in reward.parts.items()
        for kind, server in (("service", part.service), ("judge", part.judge))
        if server is not None
        for url in server.url
    ]
    # The workflow checks its own keywords later.
    servers = config.rollout.workflow.options.get("mcp")
    for number, server in enumerate(servers if isinstance(servers, list) else ()):
        if isinstance(server, dict):
            where = f"rollout.workflow.mcp.{number}.url"
            asked.append((where, str(server.get("url", "")), server.get("api_key_env")))
    for path, url, key in asked:
        host = urlsplit(url).hostname or ""
        if key is not None and url.startswith("http://") and not _LOOPBACK.fullmatch(host):
            yield path, url


def _arguments(
    function: str, args: dict[str, Any], max_new_tokens: int, path: str
) -> Iterator[ConfigIssue]:
    """Yield arguments that a built-in grader does not accept."""
    known = GRADERS[function].model_fields
    try:
        given = GRADERS[function].model_validate(args)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            key = ".".join((path, *(str(part) for part in details["loc"])))
            message = f"got {show(details['input'])}, expected {expected_by(details)}"
            if details["type"] == "extra_forbidden":
                hint = _meant(str(details["loc"][-1]), known)
                message = f"unknown{hint} (known: {', '.join(known)})"
            elif details["type"] == "missing":
                message = f"missing: give it in a file or as {key}=VALUE"
            elif not details["loc"]:
                message = expected_by(details)
            yield ConfigIssue(key, message)
        return
    if isinstance(given, OverlongArgs):
        limit = given.max_tokens or max_new_tokens
        if given.buffer > limit:
            message = f"got {given.buffer}, expected at most the limit of {limit} tokens"
            where = "args.max_tokens, or rollout.sampling.max_new_tokens"
            yield ConfigIssue(f"{path}.buffer", f"{message} ({where})")


def _meant(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
