"""The life of one engine, as a table of states and events. Pure: no I/O, no clock, no asyncio;
`rollout/fleet/fleet.py` acts on it.

                 START             UP             DRAIN             PUBLISHED
        dead ----------> starting ----> stale ------------> draining ----------> serving
         ^                                ^                  |    ^                 |
         |  FAIL, from every state        +------ MISSED ----+    +----- DRAIN -----+

Only a serving engine is given requests. A stale one runs, but has no whole version of the weights,
or not the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlcore.config.sections.rollout import RestartConfig

DOUBLINGS = 30  # of the pause before a restart; the float would overflow at a thousand


class State(str, Enum):
    STARTING = "starting"  # its process comes up, or a server of somebody else's is looked at
    STALE = "stale"  # it answers, and waits for a whole version of the weights
    SERVING = "serving"
    DRAINING = "draining"  # in a publication: it gets no requests until that has ended well
    DEAD = "dead"  # it does not run, or is not listened to

    def __str__(self) -> str:
        return self.value


class Event(str, Enum):
    START = "start"
    UP = "up"
    DRAIN = "drain"
    PUBLISHED = "published"  # it took a whole version and was resumed
    MISSED = "missed"  # the publication was given up
    FAIL = "fail"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.DEAD: {Event.START: State.STARTING},
    State.STARTING: {Event.UP: State.STALE, Event.FAIL: State.DEAD},
    State.STALE: {Event.DRAIN: State.DRAINING, Event.FAIL: State.DEAD},
    State.DRAINING: {
        Event.PUBLISHED: State.SERVING,
        Event.MISSED: State.STALE,
        Event.FAIL: State.DEAD,
    },
    State.SERVING: {Event.DRAIN: State.DRAINING, Event.FAIL: State.DEAD},
}


@dataclass
class Health:
    """Where one engine is in the table, and what is left of its restarts."""

    restart: RestartConfig
    state: State = State.DEAD
    why: str = "it was not started"  # it is dead
    lives: int = 0  # times that it was started
    barren: int = 0  # lives, up to the last, that never came to serve

    def accepts(self, event: Event) -> bool:
        return event in TRANSITIONS[self.state]

    def on(self, event: Event, why: str = "") -> None:
        """Raises ValueError for an event that the state does not know: a defect of ours.

        Args:
            why: it failed.
        """
        if not self.accepts(event):
            known = ", ".join(TRANSITIONS[self.state])
            raise ValueError(
                f"an engine that is {self.state} cannot meet {event.name}; it can meet {known}"
            )
        self.state = TRANSITIONS[self.state][event]
        if event is Event.START:
            self.lives += 1
            self.barren += 1
        elif event is Event.PUBLISHED:
            self.barren = 0
        elif event is Event.FAIL:
            self.why = why

    @property
    def restarts(self) -> int:
        """That were made so far."""
        return max(0, self.lives - 1)

    @property
    def can_come_back(self) -> bool:
        """False for one that is dead for good."""
        return self.state is not State.DEAD or self.restarts < self.restart.limit

    @property
    def pause_s(self) -> float:
        """Before the next restart: it doubles with each life that never came to serve."""
        return pause_before(self.restart, self.barren)


def pause_before(restart: RestartConfig, barren: int) -> float:
    """Seconds to wait before a restart, behind so many lives that were of no use."""
    return min(restart.backoff_s * 2.0 ** min(barren, DOUBLINGS), restart.max_backoff_s)
