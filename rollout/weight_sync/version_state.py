"""Tracks whether an engine holds one whole version of the weights.

    empty -> updating -> unversioned -> ready
               ^  ^ ______________________/
               |   (after a failure the state stays `updating`: stale until a whole update)

In each state the memory can be released, which loses the weights. When the memory is restored, the
state is `empty` again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rlcore.errors import EngineFailed
from rlcore.weights import Bucket

SHOWN = 5  # items listed in an error

State = Literal["empty", "updating", "unversioned", "ready", "released"]


class WeightState:
    """The state of engine `name`. Raises EngineFailed for a step out of order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: State = "empty"
        self.version: int | None = None
        # Whether whole weights came since the start, or since their memory was released.
        self.holds_base = False
        # The open update, if any.
        self._buckets: tuple[Bucket, ...] | None = None
        self._received: set[int] = set()

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Open an update. The weights then have no version."""
        if self.state == "released":
            raise EngineFailed(
                f"{self.name}: the memory of its weights is released; restore it before an update"
            )
        self.state = "updating"
        self._buckets = tuple(buckets)
        self._received = set()

    def open_buckets(self) -> tuple[Bucket, ...]:
        """The buckets of the current update. Raises EngineFailed if no update is open."""
        if self.state != "updating" or self._buckets is None:
            raise EngineFailed(
                f"{self.name}: weights came outside an update; call begin_update first"
            )
        return self._buckets

    def bucket(self, index: int) -> Bucket:
        """The layout of bucket `index` of the open update."""
        buckets = self.open_buckets()
        if not 0 <= index < len(buckets):
            raise EngineFailed(f"{self.name}: bucket {index} of {len(buckets)}")
        return buckets[index]

    def received(self, index: int) -> None:
        """Record that bucket `index` is in the model."""
        self._received.add(self.bucket(index).index)

    def received_all(self) -> None:
        """Record that all buckets are in the model, as after loading a folder."""
        self._received = {bucket.index for bucket in self.open_buckets()}

    def check_whole(self) -> None:
        """Raise EngineFailed if a bucket is missing. The engine then stays stale."""
        if self.state != "updating" or self._buckets is None:
            raise EngineFailed(f"{self.name}: end_update without begin_update")
        missing = sorted(set(range(len(self._buckets))) - self._received)
        if missing:
            raise EngineFailed(
                f"{self.name}: the update ended without bucket{'s' * (len(missing) > 1)}"
                f" {shorten(missing)} of {len(self._buckets)}; the engine is stale until a whole"
                " update comes"
            )

    def end(self) -> None:
        """Close the update."""
        self.check_whole()
        self.state = "unversioned"
        self.holds_base = True

    def check_version(self, version: int) -> None:
        """Raise EngineFailed unless the weights are whole and `version` does not go back."""
        if self.state not in ("unversioned", "ready"):
            raise EngineFailed(
                f"{self.name}: version {version} cannot be set, the weights are {self.state}"
            )
        if self.version is not None and version < self.version:
            raise EngineFailed(
                f"{self.name}: version {version} after {self.version}: versions never go back"
            )

    def set_version(self, version: int) -> None:
        """Put the new weights in force as `version`, a counter that never goes back."""
        self.check_version(version)
        self.version = version
        self.state = "ready"

    def require_ready(self) -> int:
        """The version in force. Raises EngineFailed if no version is in force."""
        if self.state == "ready" and self.version is not None:
            return self.version
        if self.state == "empty":
            raise EngineFailed(
                f"{self.name}: no weights were published to this engine yet, it cannot generate"
            )
        if self.state == "released":
            raise EngineFailed(
                f"{self.name}: the memory of its weights is released, it cannot generate"
            )
        raise EngineFailed(
            f"{self.name}: its weights are stale ({self.state}): publish a whole update before"
            " generating"
        )

    def release(self) -> None:
        """Record that the memory of the weights was released."""
        self.state = "released"
        self.holds_base = False

    def restore(self) -> None:
        """Record that the memory was restored, for a whole update to fill."""
        if self.state == "released":
            self.state = "empty"


def shorten(items: Iterable[object]) -> str:
    """Join the first items, with a count of the others."""
    shown = [str(item) for item in items]
    rest = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + rest
