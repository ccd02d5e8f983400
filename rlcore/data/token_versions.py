"""The policy version that made each token of a batch, kept as spans of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlcore.data.sample import VersionSpan

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenVersions:
    """Versions of M tokens: a few numbers a sequence, where a number a token takes 8 bytes."""

    values: Tensor  # int64 [S], of each span, in the order of the tokens
    lengths: Tensor  # int64 [S], tokens of each span, above 0

    @classmethod
    def of(cls, versions: Tensor) -> TokenVersions:
        """Find the spans of integers [M]."""
        values, lengths = versions.unique_consecutive(return_counts=True)
        return cls(values, lengths)

    @classmethod
    def joined(cls, spans: Sequence[VersionSpan]) -> TokenVersions:
        """Put the spans of sequences one behind the other."""
        filled = [span for span in spans if span.end > span.start]
        return cls(
            torch.tensor([span.version for span in filled], dtype=torch.int64),
            torch.tensor([span.end - span.start for span in filled], dtype=torch.int64),
        )

    @property
    def num_tokens(self) -> int:
        """M."""
        return int(self.lengths.sum())

    def each(self) -> Tensor:
        """The version of each token, int64 [M]."""
        return self.spread(self.values)

    def spread(self, values: Tensor) -> Tensor:
        """Return [M] of [S]: what is known of a span, for each of its tokens."""
        return values.repeat_interleave(self.lengths)

    def cut(self, cu: Tensor) -> tuple[TokenVersions, Tensor]:
        """Cut the spans where sequences end.

        Args:
            cu: offsets of the B sequences, int64 [B+1], from 0 to M.

        Returns:
            The spans, none of which is part of two sequences, and how many each sequence has,
            int64 [B].
        """
        before = self.lengths.cumsum(0)
        ends = torch.cat([before, cu[1:][cu.diff() > 0]]).unique()
        cut = TokenVersions(
            self.values[torch.searchsorted(before, ends)], ends.diff(prepend=ends.new_zeros(1))
        )
        return cut, torch.searchsorted(ends, cu, right=True).diff()
