"""What an engine holds, told by what it was sent: one whole version of the weights, or nothing it may generate with.

    empty -> updating -> unversioned -> ready
               ^  ^ ______________________/
               |   (a failure on the way leaves it `updating`: stale until a whole update came)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rlcore.errors import EngineFailed
from rlcore.weights import Bucket

State = Literal["empty", "updating", "unversioned", "ready"]


class WeightState:
    """The update of an engine named `name`, step by step. Raises EngineFailed for a step that is out of order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: State = "empty"
        self.version: int | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._received: set[int] = set()

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """From here on the weights are nobody's version."""
        self.state, self._buckets, self._received = "updating", tuple(buckets), set()

    def bucket(self, index: int) -> Bucket:
        """The layout of bucket `index`, which is about to come."""
        if self.state != "updating":
            raise EngineFailed(f"engine {self.name}: a bucket came outside an update; call begin_update first")
        if not 0 <= index < len(self._buckets):
            raise EngineFailed(f"engine {self.name}: bucket {index} of {len(self._buckets)}")
        return self._buckets[index]

    def received(self, index: int) -> None:
        self._received.add(self.bucket(index).index)

    def received_all(self) -> None:
        """In one piece, as a folder."""
        self._received = {bucket.index for bucket in self._buckets}

    def check_whole(self) -> None:
        """Raises EngineFailed where a bucket is missing; the engine is stale then."""
        if self.state != "updating":
            raise EngineFailed(f"engine {self.name}: end_update without begin_update")
        missing = [bucket.index for bucket in self._buckets if bucket.index not in self._received]
        if missing:
            raise EngineFailed(
                f"engine {self.name}: the update ended without {len(missing)} of {len(self._buckets)} buckets (the first: "
                f"{missing[0]}); it is stale until a whole update comes"
            )

    def end(self) -> None:
        self.check_whole()
        self.state = "unversioned"

    def check_version(self, version: int) -> None:
        """Raises EngineFailed unless the weights are whole, and `version` is not behind the one before."""
        if self.state not in ("unversioned", "ready"):
            raise EngineFailed(f"engine {self.name}: version {version} cannot be set, the weights are {self.state}")
        if self.version is not None and version < self.version:
            raise EngineFailed(f"engine {self.name}: version {version} after {self.version}: versions never go back")

    def set_version(self, version: int) -> None:
        self.check_version(version)
        self.version, self.state = version, "ready"

    def lose(self) -> None:
        """Their memory is given back."""
        self.state = "empty"

    def require_ready(self) -> int:
        """The version in force. Raises EngineFailed when there is none."""
        if self.state == "ready" and self.version is not None:
            return self.version
        raise EngineFailed(f"engine {self.name}: its weights are {self.state}: publish a whole update before it generates")
