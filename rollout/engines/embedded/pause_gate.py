"""The point between two tokens where the decoding thread meets pause, resume and abort.

Calls carry tickets in the order in which they were accepted. A pause holds the calls that it does
not let finish; an abort ends every call accepted so far. The control side runs in other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rlcore.data.generation import PauseMode
from rlcore.errors import RunFailed


class PauseGate:
    """Holds, ends or lets through the calls of one engine.

    Nothing here has a deadline: callers have, and end a wait by `abandon` or `close`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self.mode: PauseMode | None = None  # the pause in force
        self._changed = threading.Condition()
        self._next_ticket = 0
        self._open_tickets: set[int] = set()
        # the ticket of the call that is held in `pass_through`
        self._held_ticket: int | None = None
        self._held_from = 0  # while paused, tickets from this on are held
        self._aborted_before = 0
        self._abandoned: set[int] = set()

    # --- calls ------------------------------------------------------------------------------------

    def enter(self) -> int:
        """Return a ticket for a call that was just accepted."""
        with self._changed:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._open_tickets.add(ticket)
            return ticket

    def leave(self, ticket: int) -> None:
        """End a call: it has returned or failed."""
        with self._changed:
            self._open_tickets.discard(ticket)
            self._abandoned.discard(ticket)
            self._changed.notify_all()

    def aborted(self, ticket: int) -> bool:
        """Whether a call shall end at its next token."""
        return ticket < self._aborted_before or ticket in self._abandoned

    def abandon(self, ticket: int) -> None:
        """End a call at its next token: its caller has gone."""
        with self._changed:
            if ticket in self._open_tickets:
                self._abandoned.add(ticket)
                self._changed.notify_all()

    def pass_through(self, ticket: int, on_retract: Callable[[], None]) -> None:
        """Wait, between two tokens, while the engine is paused.

        Raises RunFailed when the engine was closed meanwhile.
        """
        if self.mode is None and not self.closed:  # the common case takes no lock
            return
        with self._changed:
            while self._holds(ticket):
                if self.mode == "retract":
                    on_retract()
                self._held_ticket = ticket
                self._changed.notify_all()
                self._changed.wait()
            self._held_ticket = None
            if self.closed:
                raise RunFailed(f"{self.name}: the engine was closed during a request")

    def _holds(self, ticket: int) -> bool:
        return (
            not self.closed
            and self.mode is not None
            and ticket >= self._held_from
            and not self.aborted(ticket)
        )

    @property
    def holding(self) -> bool:
        """Whether a pause keeps calls from making tokens."""
        with self._changed:
            return self.mode is not None and self._quiet()

    # --- control ----------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Return once no token is being made. A second pause goes on holding held calls.

        Raises RunFailed when the engine was closed meanwhile.
        """
        with self._changed:
            if self.mode is None:
                self._held_from = self._next_ticket if mode in ("drain", "abort") else 0
            if mode == "abort":
                self._aborted_before = self._next_ticket
            self.mode = mode
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.closed or self._quiet())
            if self.closed:
                raise RunFailed(f"{self.name}: the engine was closed before it was paused")

    def _quiet(self) -> bool:
        """Whether no token is being made.

        Calls run one after the other: when a call is held, all that were accepted later wait too.
        """
        if any(
            ticket < max(self._held_from, self._aborted_before) for ticket in self._open_tickets
        ):
            return False
        return not self._open_tickets or self._held_ticket is not None

    def resume(self) -> None:
        """Let the calls go on."""
        with self._changed:
            self.mode = None
            self._changed.notify_all()

    def abort(self) -> None:
        """End every call accepted so far."""
        with self._changed:
            self._aborted_before = self._next_ticket
            self._changed.notify_all()

    def close(self) -> None:
        """End every call, now and from now on."""
        with self._changed:
            self.closed = True
            self._aborted_before = self._next_ticket
            self._changed.notify_all()
