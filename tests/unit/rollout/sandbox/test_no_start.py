"""A sandbox that does not come up says so."""

from __future__ import annotations

import asyncio

import pytest

from rlcore.config.sections.sandbox import SandboxConfig
from rlcore.errors import ConfigError
from rollout.sandbox import Program, local
from rollout.sandbox.local import build_sandbox


def test_a_sandbox_that_starts_too_slowly_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        sandbox = build_sandbox(SandboxConfig(kind="rlimits"))
        await sandbox.start()
        monkeypatch.setattr(local, "SANDBOX_START_S", 0.0)
        found = await sandbox.run(Program("print(1)", timeout_s=20))
        await sandbox.close()
        assert (found.status, found.stdout) == ("error", "")
        assert found.reason == "the sandbox has not started in 0 s"

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_without_any_sandbox_the_reasons_of_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SANDBOX_START_S", 0.0)
    sandbox = build_sandbox(SandboxConfig(kind="rlimits"))
    with pytest.raises(ConfigError, match="rlimits: the sandbox has not started in 0 s"):
        asyncio.run(asyncio.wait_for(sandbox.start(), 60))
