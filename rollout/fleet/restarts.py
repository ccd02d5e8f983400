"""Watches one engine: probes its health from time to time, and sees the end of its process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rlcore.config.sections.rollout import EngineConfig
from rollout.asyncio_utils import within
from rollout.fleet.health import State
from rollout.fleet.router import Member
from rollout.weight_sync.base import describe


async def watch(
    member: Member,
    down: asyncio.Future[str],
    config: EngineConfig,
    fail: Callable[[Member, str], None],
) -> None:
    """Watch an engine until `down` is done; call `fail` once, with what is wrong.

    During a publication only the end of its process counts: a publication keeps an engine busy, and
    has deadlines of its own.
    """
    ended = member.engine.ended
    signs: set[asyncio.Future[Any]] = {down} if ended is None else {down, ended}
    while not down.done():
        await asyncio.wait(
            signs, timeout=config.health_every_s, return_when=asyncio.FIRST_COMPLETED
        )
        gone = ended is not None and ended.done()
        if down.done() or (member.health.state is State.DRAINING and not gone):
            continue
        why = await _probe_error(member, config.health_timeout_s)
        if not down.done() and (gone or (why and member.health.state is not State.DRAINING)):
            fail(member, why or "its process ended")


async def _probe_error(member: Member, limit_s: float) -> str | None:
    try:
        await within(
            limit_s,
            member.engine.health(),
            lambda: (
                f"engine {member.name} did not answer a probe within {limit_s:g} s"
                " (rollout.engine.health_timeout_s)"
            ),
        )
    except Exception as error:  # noqa: BLE001 - any error of a probe is a failure of the engine
        return describe(error)
    return None
