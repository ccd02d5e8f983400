"""Makes the client of a reward part that asks servers."""

from __future__ import annotations

import os

from rlcore.config.sections.reward_services import ServerConfig
from rlcore.errors import ConfigError
from rlcore.tls import client_context
from rollout.json_client import JsonClient, NoAnswer
from rollout.rewards.base import RewardFailure

MAX_ANSWER_BYTES = 4 << 20


def client_of(where: str, config: ServerConfig) -> JsonClient:
    """Return the client of a part whose configuration key is `where`.

    Raises:
        ConfigError: `api_key_env` names a variable that is not set, or `ca_file` no such file.
    """
    if config.ca_file is not None:
        client_context(config.ca_file, where=f"{where}.ca_file")  # says now what is wrong with it
    headers = {}
    if config.api_key_env is not None:
        key = os.environ.get(config.api_key_env)
        if not key:
            raise ConfigError(
                f"{where}.api_key_env: the variable {config.api_key_env} is not set in the"
                " environment of the trainer"
            )
        headers["Authorization"] = f"Bearer {key}"
    return JsonClient(
        config.url,
        where=where,
        timeout_s=config.timeout_s,
        retries=config.retries,
        concurrency=config.concurrency,
        answer_bytes=MAX_ANSWER_BYTES,
        headers=headers,
        ca_file=config.ca_file,
    )


def failure(error: NoAnswer, where: str, config: ServerConfig) -> RewardFailure:
    """Return the failure of the samples that were asked about."""
    attempts = f", in {config.retries + 1} attempts ({where}.retries)" if error.again else ""
    return RewardFailure("timeout" if error.kind == "timeout" else "error", f"{error}{attempts}")
