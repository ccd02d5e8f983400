"""Rows of evaluation sets, scored by passes of the trainer, where nothing generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample

if TYPE_CHECKING:
    from rlcore.trainer.sources import Rows


def batch_of_rows(samples: Sequence[Sample]) -> RolloutBatch:
    """Make a batch of answers that come from rows: no engine made their tokens."""
    batch = RolloutBatch.from_samples(samples)
    del batch.vectors["rollout_logprobs"]
    batch.versions = None
    return batch


class HeldOutRows:
    """The held-out rows of a run, on rank 0, and the measurements of one evaluation.

    Args:
        sets: the rows of each evaluation set; metrics are named by the set's prefix.
        batch_size: rows that are scored together.
    """

    def __init__(self, sets: Mapping[str, Rows], batch_size: int) -> None:
        self._sets = sets
        self._batch_size = batch_size
        self._found: dict[str, list[Tensor]] = {}

    def count(self, name: str) -> int:
        """The number of batches of a set."""
        return -(-len(self._sets[name]) // self._batch_size)

    def batch(self, name: str, index: int) -> RolloutBatch:
        """Return one of the batches of a set."""
        rows = self._sets[name]
        first = index * self._batch_size
        chosen = range(first, min(first + self._batch_size, len(rows)))
        return batch_of_rows([sample for row in chosen for sample in rows.samples(row, row)])

    def add(self, prefix: str, measured: Mapping[str, Tensor]) -> None:
        """Take the measurements of a batch, vectors by the metric's name."""
        for name, values in measured.items():
            self._found.setdefault(prefix + name, []).append(values.double())

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric over all that was added, and forget it."""
        found = {name: float(torch.cat(parts).mean()) for name, parts in self._found.items()}
        self._found = {}
        return found
