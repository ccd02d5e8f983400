"""What the run checkpoint keeps of a rollout service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from rollout.collection.buffer import BufferedGroup, encode
from rollout.collection.published_versions import Publication


@dataclass(frozen=True)
class Snapshot:
    """A moment between two steps. Cheap to take, since nothing in it changes any more; encoded where it is saved."""

    draws: dict[str, Any]
    finished: Sequence[BufferedGroup] = ()               # and not trained on
    publications: Sequence[Publication] = ()

    def encoded(self) -> dict[str, Any]:
        """JSON-able, with the publications that the groups' versions need."""
        made_by = [span.version for kept in self.finished for one in kept.group.samples for span in one.versions]
        needed = [astuple(one) for one in self.publications if made_by and one.version >= min(made_by)]
        return {**self.draws, "ahead": {"groups": encode(self.finished), "versions": needed}}
