"""Knows from which policy step the weights of each publication are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlcore.data.sample import Sample


@dataclass(frozen=True)
class Publication:
    """A publication that succeeded."""

    version: int
    step: int  # policy step: the number of updates behind the weights
    incarnation: int  # how often the trainer was started before


class PublishedVersions:
    """The publications that succeeded, in the order of growing versions.

    A publication that failed is of the step of the next one that succeeded.
    """

    def __init__(self) -> None:
        self._known: list[Publication] = []

    def add(self, publication: Publication) -> None:
        """Add a publication. Raises ValueError unless its version is the newest."""
        if self._known and publication.version <= self._known[-1].version:
            raise ValueError(
                f"version {publication.version} after {self._known[-1].version}: versions only grow"
            )
        self._known.append(publication)

    def of(self, version: int) -> Publication | None:
        """The publication of `version`; None if it is newer than all and so about to end."""
        at = bisect_left(self._known, version, key=lambda publication: publication.version)
        return self._known[at] if at < len(self._known) else None

    def of_samples(self, samples: Iterable[Sample]) -> dict[int, int]:
        """The policy step of each version that made a token of `samples`, as far as it is known."""
        found = {
            version: self.of(version)
            for version in {span.version for sample in samples for span in sample.versions}
        }
        return {
            version: publication.step
            for version, publication in found.items()
            if publication is not None
        }

    @property
    def known(self) -> tuple[Publication, ...]:
        """All publications, in the order of versions."""
        return tuple(self._known)

    def learn(self, publications: Iterable[Sequence[int]]) -> None:
        """Add publications of a snapshot, given by their fields, wherever they belong."""
        by_version = {made.version: made for made in (Publication(*one) for one in publications)}
        by_version |= {made.version: made for made in self._known}
        self._known = [by_version[version] for version in sorted(by_version)]
