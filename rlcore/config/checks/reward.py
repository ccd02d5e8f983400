"""Checks of rewards. Pure, as all checks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from rlcore.config.evaluation_sets import evaluation_sets
from rlcore.config.messages import Problem, expected_by, show
from rlcore.config.secrets import mask_text
from rlcore.config.sections.graders import GRADERS, GraderArgs, OverlongArgs
from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.root import Config

_LOOPBACK = re.compile(r"localhost|127\.[\d.]+|::1")


def graders(config: Config) -> Iterator[Problem]:
    """Rewards have parts; built-in graders are known and take the arguments they are given."""
    limit = config.rollout.sampling.max_new_tokens
    if config.reward.parts or not config.is_sft:
        yield from reward_problems(config.reward, limit)
    for one in evaluation_sets(config):
        if one.reward is not None:
            yield from reward_problems(one.reward, limit, f"{one.key}.reward")


def keys_over_tls(config: Config) -> Iterator[Problem]:
    """With TLS no key of a service, judge or MCP server goes over plain HTTP."""
    if config.cluster.tls is not None:
        for path, url in _keys_in_clear(config):
            yield Problem(
                path,
                f"got {mask_text(url)!r}, but cluster.tls is set and the key of `api_key_env` would"
                " go there in clear: expected https://..., or leave cluster.tls out",
            )


def key_notes(config: Config) -> Iterator[Problem]:
    """Name keys that go over plain HTTP to another machine."""
    if config.cluster.tls is None:
        for path, url in _keys_in_clear(config):
            yield Problem(
                path,
                f"the key of `api_key_env` goes to {mask_text(url)} in clear: use https://..., or a"
                " network of its own",
            )


def _keys_in_clear(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the configuration key and the URL of servers elsewhere that get a key without TLS."""
    rewards = {"reward": config.reward}
    rewards |= {f"{s.key}.reward": s.reward for s in evaluation_sets(config) if s.reward}
    asked = [
        (f"{path}.parts.{name}.{kind}.url", url, server.api_key_env)
        for path, reward in rewards.items()
        for name, part in reward.parts.items()
        for kind, server in (("service", part.service), ("judge", part.judge))
        if server is not None
        for url in server.url
    ]
    # the workflow checks its own keywords, later
    servers = config.rollout.workflow.options.get("mcp")
    for number, server in enumerate(servers if isinstance(servers, list) else ()):
        if isinstance(server, dict):
            where = f"rollout.workflow.mcp.{number}.url"
            asked.append((where, str(server.get("url", "")), server.get("api_key_env")))
    for path, url, key in asked:
        host = urlsplit(url).hostname or ""
        if key is not None and url.startswith("http://") and not _LOOPBACK.fullmatch(host):
            yield path, url


def reward_problems(
    reward: RewardConfig, max_new_tokens: int | None, path: str = "reward"
) -> Iterator[Problem]:
    """Yield what is wrong with a reward.

    Args:
        max_new_tokens: of the responses to score.
        path: the section's key.
    """
    if not reward.parts:
        yield Problem(
            f"{path}.parts", "empty: give one part or more, each with a `function` or a `model`"
        )
    for name, part in reward.parts.items():
        function = part.function
        if function in GRADERS:
            args = f"{path}.parts.{name}.args"
            wrong = [*_problems(GRADERS[function], part.args, args)]
            yield from wrong or _overlong(function, part.args, max_new_tokens, args)
        elif function is not None and ":" not in function:
            near = difflib.get_close_matches(function, GRADERS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            module, dot, attribute = function.rpartition(".")
            if dot:
                hint = f"; did you mean '{module}:{attribute}', with a colon?"
            yield Problem(
                f"{path}.parts.{name}.function",
                f"{function!r} is unknown{hint} (known: {', '.join(GRADERS)}, or"
                " package.module:function)",
            )


def _overlong(
    function: str, args: dict[str, Any], max_new_tokens: int | None, path: str
) -> Iterator[Problem]:
    """The buffer of `overlong` is no longer than the response may be."""
    if function != "overlong":
        return
    given = OverlongArgs.model_validate(args)
    limit = given.max_tokens or max_new_tokens
    if limit is None or given.buffer > limit:
        yield Problem(
            f"{path}.buffer",
            f"got {given.buffer}, expected at most the limit of {limit} tokens (args.max_tokens,"
            " or rollout.sampling.max_new_tokens)",
        )


def _problems(known: type[GraderArgs], args: dict[str, object], path: str) -> Iterator[Problem]:
    try:
        known.model_validate(args)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            key = ".".join((path, *(str(part) for part in details["loc"])))
            if details["type"] == "extra_forbidden":
                near = difflib.get_close_matches(str(details["loc"][-1]), known.model_fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                yield Problem(key, f"unknown{hint} (known: {', '.join(known.model_fields)})")
            elif details["type"] == "missing":
                yield Problem(key, f"missing: give it in a file or as {key}=VALUE")
            elif not details["loc"]:
                yield Problem(key, expected_by(details))
            else:
                yield Problem(key, f"got {show(details['input'])}, expected {expected_by(details)}")
