"""Judges an engine by its answers to probes, and by its progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rlcore.config.sections.rollout import EngineConfig
from rlcore.deadlines import ENGINE_GRACE_S
from rlcore.errors import DeadlineExceeded, RlcoreError
from rlcore.interfaces import RolloutEngine
from rollout.asyncio_utils import within
from rollout.fleet.engine_states import ProgressClock, State
from rollout.fleet.router import Member
from rollout.weight_sync.base import describe

# Probes in a row to which an engine must answer with an error.
MISSED = 3


class Probes:
    """The probes of an engine from one start to the next.

    A healthy engine may be silent, while it compiles a kernel or reads from a slow disk. So an
    engine fails after several errors in a row, or after `limit_s` of silence in which it has
    completed no request.

    Args:
        answers: returns the number of requests that it has completed.
        limit_s: `rollout.engine.health_timeout_s`.
    """

    def __init__(self, engine: RolloutEngine, answers: Callable[[], int], limit_s: float) -> None:
        self._engine = engine
        self._answers = answers
        self._limit_s = limit_s
        self._missed = 0

    async def fault(self, *, at_once: bool = False) -> str | None:
        """Probe once.

        Args:
            at_once: the first error counts, as the process has ended.

        Returns:
            Why the engine counts as failed, otherwise None.
        """
        before = self._answers()
        try:
            # The engine has the same limit, and may know better why it is silent.
            await within(self._limit_s + ENGINE_GRACE_S, self._engine.health(), self._late)
        except DeadlineExceeded as error:
            return None if self._answers() != before and not at_once else str(error)
        except Exception as error:  # noqa: BLE001 - any error of an engine is a missed probe
            self._missed += 1
            return describe(error) if at_once or self._missed >= MISSED else None
        self._missed = 0
        return None

    def _late(self) -> str:
        return (
            f"engine {self._engine.name} answered no probe within {self._limit_s:g} s"
            " (rollout.engine.health_timeout_s)"
        )


async def standstill(member: Member, clock: ProgressClock, config: EngineConfig) -> str | None:
    """Check an engine's progress. Returns why the engine counts as failed, otherwise None."""
    seen: Any = None
    held = False
    if member.leases:
        limit = config.health_timeout_s
        try:
            count = await within(limit, member.engine.progress(), lambda: "no answer")
        except RlcoreError:
            # No answer means no progress; probes judge a silent engine.
            seen = clock.seen or (None, member.answers)
        except Exception as error:  # noqa: BLE001 - any other error is a defect of the engine
            return describe(error)
        else:
            # An engine behind a router never reports progress, though its requests run.
            held = count is None and member.health.state is not State.SERVING
            seen = None if count is None else (count, member.answers)
    now = time.monotonic()
    if held:
        member.held_s += now - clock.looked_at
    limit = config.progress_timeout_s
    if clock.look(now, seen) <= limit:
        return None
    return (
        f"engine {member.name} has {member.num_requests} requests and made no token for"
        f" {limit:g} s (rollout.engine.progress_timeout_s)"
    )
