"""Which policy step the weights of each publication were of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlcore.data.sample import Sample


@dataclass(frozen=True)
class Publication:
    version: int
    step: int  # policy step: the number of updates behind the weights
    incarnation: int  # how often the trainer was started before


class PublishedVersions:
    """The publications that succeeded, versions growing. One that failed was of the step of the
    next that did not.
    """

    def __init__(self) -> None:
        self._known: list[Publication] = []

    def add(self, publication: Publication) -> None:
        """Raises ValueError for a version that is not the newest: they never go back."""
        if self._known and publication.version <= self._known[-1].version:
            raise ValueError(
                f"version {publication.version} after {self._known[-1].version}: versions only grow"
            )
        self._known.append(publication)

    def of(self, version: int) -> Publication | None:
        """None for one that is newer than all that are known: its publication is about to end."""
        at = bisect_left(self._known, version, key=lambda one: one.version)
        return self._known[at] if at < len(self._known) else None

    def of_samples(self, samples: Iterable[Sample]) -> dict[int, int]:
        """The policy step of each version that made a token of `samples`, as far as it is known."""
        found = {
            version: self.of(version)
            for version in {span.version for one in samples for span in one.versions}
        }
        return {
            version: publication.step
            for version, publication in found.items()
            if publication is not None
        }

    @property
    def known(self) -> tuple[Publication, ...]:
        """In the order of versions."""
        return tuple(self._known)

    def learn(self, publications: Iterable[Sequence[int]]) -> None:
        """As `add`, of any that were made, given by their fields."""
        merged = {
            one.version: one for one in (*(Publication(*one) for one in publications), *self._known)
        }
        self._known = [merged[version] for version in sorted(merged)]
