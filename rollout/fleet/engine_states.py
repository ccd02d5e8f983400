"""The life of one engine, as a table of states and events. Pure: no I/O, no clock, no asyncio;
`rollout/fleet/fleet.py` acts on it.

                 START             UP             DRAIN             PUBLISHED
        dead ----------> starting ----> stale ------------> draining ----------> serving
         ^                                ^                  |    ^                 |
         |  FAIL, from every state        +------ MISSED ----+    +----- DRAIN -----+

Only a serving engine is given requests. A stale one runs, but has no whole version of the weights,
or not the last one. LEAVE makes a stale or a serving engine a leaving one, which is taken out of
the fleet once it has no requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlcore.config.sections.rollout import RestartConfig

DOUBLINGS = 30  # of the pause before a restart; the float would overflow at a thousand


class State(str, Enum):
    """The states of an engine."""

    STARTING = "starting"  # its process comes up, or a server of somebody else is checked
    STALE = "stale"  # it answers, and waits for a whole version of the weights
    SERVING = "serving"
    DRAINING = "draining"  # in a publication: it gets no requests until that has ended well
    LEAVING = "leaving"  # it ends the requests that it has, and takes part in nothing else
    DEAD = "dead"  # it does not run, or is not listened to

    def __str__(self) -> str:
        return self.value


class Event(str, Enum):
    """The events in the life of an engine."""

    START = "start"
    UP = "up"
    DRAIN = "drain"
    PUBLISHED = "published"  # it took a whole version and was resumed
    MISSED = "missed"  # the publication was given up
    LEAVE = "leave"  # whoever runs it takes it out of the run
    FAIL = "fail"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.DEAD: {Event.START: State.STARTING},
    State.STARTING: {Event.UP: State.STALE, Event.FAIL: State.DEAD},
    State.STALE: {
        Event.DRAIN: State.DRAINING,
        Event.LEAVE: State.LEAVING,
        Event.FAIL: State.DEAD,
    },
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
    """The state of one engine, and what is left of its restarts."""

    restart: RestartConfig
    state: State = State.DEAD
    why: str = "it was not started"  # it is dead
    starts: int = 0
    failed_starts: int = 0  # starts, up to the last, that never came to serve
    # when it was restarted; when it last failed, those older than the window were left out
    restarted_at: list[float] = field(default_factory=list)

    def accepts(self, event: Event) -> bool:
        """Whether the table has this event in the present state."""
        return event in TRANSITIONS[self.state]

    def on(self, event: Event, why: str = "", *, now: float = 0.0) -> None:
        """Apply an event. Raises ValueError for one that the state does not have: a defect of ours.

        Args:
            why: the reason of a failure.
            now: seconds on the caller's clock, of a start or a failure.
        """
        if not self.accepts(event):
            known = ", ".join(TRANSITIONS[self.state]) or "nothing more"
            raise ValueError(
                f"an engine that is {self.state} cannot meet {event.name}; it can meet {known}"
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
        """Restarts that the limit leaves it."""
        return self.restart.limit - len(self.restarted_at)

    @property
    def can_come_back(self) -> bool:
        """False for an engine that is dead for good, or leaves."""
        if self.state is State.DEAD:
            return self.restarts_left > 0
        return self.state is not State.LEAVING

    @property
    def pause_s(self) -> float:
        """Seconds before the next restart: they double with each start that came to nothing."""
        return pause_before(self.restart, self.failed_starts)


class ProgressClock:
    """Tells how long an engine that has requests has made no token.

    Args:
        now: seconds on the caller's clock.
    """

    def __init__(self, now: float) -> None:
        self.looked_at = now
        self.moved_at = now
        self.seen: Any = None  # at the last look

    def look(self, now: float, seen: Any) -> float:
        """Return the seconds in which `seen` has not changed.

        Args:
            seen: a value that changes with the engine's tokens; None where it has none to make.
        """
        if seen is None or seen != self.seen:
            self.moved_at = now
        self.looked_at = now
        self.seen = seen
        return now - self.moved_at


def pause_before(restart: RestartConfig, failed_starts: int) -> float:
    """Seconds to wait before a restart, behind so many failed starts."""
    return min(restart.backoff_s * 2.0 ** min(failed_starts, DOUBLINGS), restart.max_backoff_s)
