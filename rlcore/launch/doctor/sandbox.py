"""Whether programs that a model wrote can be confined here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from rlcore.errors import ConfigError
from rlcore.launch.doctor.finding import Finding
from rlcore.launch.doctor.needs import Needs
from rollout.sandbox import Sandbox
from rollout.sandbox.local import build_sandbox


def sandbox(needs: Needs) -> Iterator[Finding]:
    """Run a first program as a run with the grader `code` does at its start."""
    if needs.sandbox is None:
        return
    kind = needs.sandbox.kind
    try:
        asyncio.run(_start(build_sandbox(needs.sandbox)))
    except ConfigError as error:
        advice = "see docs/sandbox.md, or reward.sandbox.kind: fusion"
        yield Finding("FAIL", "sandbox", str(error), "a confinement that works", advice)
        return
    yield Finding("ok", "sandbox", f"a program ran ({kind})")


async def _start(built: Sandbox) -> None:
    try:
        await built.start()
    finally:
        await built.close()
