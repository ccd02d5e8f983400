"""Tools of MCP servers: what is refused, and servers that do not start."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.errors import ConfigError
from rollout.workflows.mcp_tools import McpFailed, McpTools
from rollout.workflows.registry import build_workflow
from tests.unit.rollout.conversation.kit import make_context, make_tokenizer

SERVER = {"command": ["cat"]}


def workflow(*servers: dict[str, Any], **options: Any) -> Any:
    settings = WorkflowConfig.model_validate({"name": "env", "mcp": [*servers], **options})
    return build_workflow(make_context(make_tokenizer(), settings=settings))


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        ({}, {}, r"workflow\.mcp\.0: expected either command or url"),
        ({**SERVER, "url": "http://h"}, {}, "expected either command or url"),
        ({"command": "no-such-program"}, {}, "'no-such-program' is not in PATH"),
        ({**SERVER, "shard": 1}, {}, r"workflow\.mcp\.0\.shard: expected"),
        (None, {}, r"rollout\.workflow\.env: missing: name a class"),
        (SERVER, {"env": f"{__name__}:Steps"}, r"tools \(those of mcp\) and step\(\)"),
    ],
)
def test_a_wrong_entry_is_refused_at_the_start(
    server: dict[str, Any] | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        workflow(*([] if server is None else [server]), **options)


class Steps:
    def step(self, reply: Any) -> None:
        """Answer."""


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install 'rlcore\[mcp\]'"):
        workflow(SERVER)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"command": [sys.executable, "-c", "print(1)"]}, "ended at its start: .*closed"),
        (
            {"command": ["sleep", "60"], "start_timeout_s": 0.5},
            r"'sleep' listed no tools in 0\.5 s \(rollout\.workflow\.mcp\.start_timeout_s\)",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "'http://127.0.0.1:9/mcp' ended at its start: .*"),
    ],
)
def test_a_server_that_does_not_start_fails_the_rollout(
    server: dict[str, Any], message: str
) -> None:
    async def connect() -> None:
        async with McpTools([server]).connected():
            pass

    with pytest.raises(McpFailed, match=message):
        asyncio.run(connect())
