"""The life of one engine, as a table of states and events. Pure: no I/O, no clock, no asyncio;
`rollout/fleet/fleet.py` acts on it.

                 START             UP             DRAIN             PUBLISHED
        dead ----------> starting ----> stale ------------> draining ----------> serving
         ^                                ^                  |    ^                 |
         |  FAIL, from every state        +------ MISSED ----+    +----- DRAIN -----+

Only a serving engine gets requests. A stale engine runs, but lacks the whole last version of the
weights. LEAVE turns a stale or serving engine into a leaving one, which is removed from the fleet
once it has no requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlcore.config.sections.rollout import RestartConfig

DOUBLINGS = 30  # of the pause before a restart; a float overflows at about a thousand


class State(StrEnum):
    """The states of an engine."""

    STARTING = "starting"  # its process comes up, or an external server is checked
    STALE = "stale"  # it answers and waits for a whole version of the weights
    SERVING = "serving"
    DRAINING = "draining"  # in a publication: it gets no requests until the publication succeeds
    LEAVING = "leaving"  # it ends its requests and takes no other part in the run
    DEAD = "dead"  # it does not run, or is ignored


class Event(StrEnum):
    """The events in the life of an engine."""

    START = "start"
    UP = "up"
    DRAIN = "drain"
    PUBLISHED = "published"  # it took a whole version and was resumed
    MISSED = "missed"  # the publication was cancelled
    LEAVE = "leave"  # its owner takes it out of the run
    FAIL = "fail"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.DEAD: {Event.START: State.STARTING},
    State.STARTING: {Event.UP: State.STALE, Event.FAIL: State.DEAD},
    State.STALE: {Event.DRAIN: State.DRAINING, Event.LEAVE: State.LEAVING, Event.FAIL: State.DEAD},
    State.DRAINING: {
        Event.PUBLISHED: State.SERVING,
        Event.MISSED: State.STALE,
        Event.FAIL: State.DEAD,
    },
    State.SERVING: {
        Event.DRAIN: State.DRAINING,
        Event.LEAVE: State.LEAVING,
        Event.FAIL: State.DEAD,
    },
    State.LEAVING: {},
}


@dataclass
class Health:
    """The state of one engine and its remaining restarts."""

    restart: RestartConfig
    state: State = State.DEAD
    why: str = "it was not started"  # reason of its last failure
    starts: int = 0
    failed_starts: int = 0  # latest starts in a row after which it never served
    # Times of restarts; each failure drops those older than the window.
    restarted_at: list[float] = field(default_factory=list)

    def accepts(self, event: Event) -> bool:
        """Whether the table has this event for the current state."""
        return event in TRANSITIONS[self.state]

    def on(self, event: Event, why: str = "", *, now: float = 0.0) -> None:
        """Apply an event. Raises ValueError, for a defect in the caller, if the state lacks it.

        Args:
            why: the reason of a failure.
            now: time of a start or a failure, in seconds of the caller's clock.
        """
        if not self.accepts(event):
            known = ", ".join(TRANSITIONS[self.state]) or "no event"
            raise ValueError(
                f"an engine that is {self.state} does not accept {event.name}, only {known}"
            )
        self.state = TRANSITIONS[self.state][event]
        if event is Event.START:
            if self.starts:
                self.restarted_at.append(now)
            self.starts += 1
            self.failed_starts += 1
        elif event is Event.PUBLISHED:
            self.failed_starts = 0
        elif event is Event.FAIL:
            self.why = why
            since = now - self.restart.window_s
            self.restarted_at = [at for at in self.restarted_at if at > since]

    @property
    def restarts(self) -> int:
        """Restarts so far."""
        return max(0, self.starts - 1)

    @property
    def restarts_left(self) -> int:
        """Restarts left within the limit."""
        return self.restart.limit - len(self.restarted_at)

    @property
    def can_come_back(self) -> bool:
        """Whether the engine may serve again: false if it is dead for good, or leaves."""
        if self.state is State.DEAD:
            return self.restarts_left > 0
        return self.state is not State.LEAVING

    def may_try_again(self, now: float) -> bool:
        """Whether an engine that is dead for good used up its restarts more than a window ago."""
        latest = max(self.restarted_at, default=now)
        dead = self.state is State.DEAD and not self.can_come_back
        return dead and now - latest > self.restart.window_s

    @property
    def pause_s(self) -> float:
        """Seconds before the next restart, doubled with each failed start."""
        return pause_before(self.restart, self.failed_starts)


class ProgressClock:
    """Measures how long an engine with requests has made no token.

    Args:
        now: seconds on the caller's clock.
    """

    def __init__(self, now: float) -> None:
        self.looked_at = now
        self.moved_at = now
        # value at the last look
        self.seen: Any = None

    def look(self, now: float, seen: Any) -> float:
        """Return for how many seconds `seen` has not changed.

        Args:
            seen: a value that changes with the engine's tokens; None if it has no token to make.
        """
        if seen is None or seen != self.seen:
            self.moved_at = now
        self.looked_at = now
        self.seen = seen
        return now - self.moved_at


def pause_before(restart: RestartConfig, failed_starts: int) -> float:
    """Seconds to wait before a restart, after `failed_starts` failed starts."""
    return min(restart.backoff_s * 2.0 ** min(failed_starts, DOUBLINGS), restart.max_backoff_s)
