"""The versions of a batch's tokens as spans, against one number for each token."""

from __future__ import annotations

import random

import pytest
import torch

from rlcore.data.batch import RolloutBatch, TokenVersions
from rlcore.data.sample import VersionSpan


def drawn(rng: random.Random) -> tuple[list[int], list[int]]:
    """Versions of each token, and lengths of sequences; some have none, spans go over several."""
    lengths = [rng.choice([0, 0, 1, 2, 7]) for _ in range(rng.randrange(6))]
    versions: list[int] = []
    while len(versions) < sum(lengths):
        versions += [rng.randrange(4)] * rng.randrange(1, 6)
    return versions[: sum(lengths)], lengths


def batch_of(versions: list[int], lengths: list[int]) -> RolloutBatch:
    tokens = sum(lengths) + len(lengths)  # each begins with a token of its prompt
    cu = torch.tensor([0, *(n + 1 for n in lengths)]).cumsum(0)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[cu[:-1]] = False
    return RolloutBatch(
        torch.zeros(tokens, dtype=torch.int32),
        cu,
        mask,
        {"versions": torch.tensor(versions).long()},
    )


@pytest.mark.parametrize("seed", range(30))
def test_spans_say_what_a_number_for_each_token_says(seed: int) -> None:
    rng = random.Random(seed)
    versions, lengths = drawn(rng)
    batch = batch_of(versions, lengths)
    assert batch.versions is not None
    assert batch.vectors == {}
    assert batch.names == {"versions"}
    assert batch.versions.each().tolist() == versions
    cut, counts = batch.versions.cut(batch.cu_seqlens)
    assert cut.each().tolist() == versions
    assert bool((cut.lengths > 0).all())
    parts = torch.tensor(versions).long().split(lengths)
    pieces = zip(cut.values.split(counts.tolist()), cut.lengths.split(counts.tolist()))
    assert [TokenVersions(*piece).each().tolist() for piece in pieces] == [
        part.tolist() for part in parts
    ]
    rows = [rng.randrange(len(lengths)) for _ in range(4)] if lengths else []
    chosen = batch.select(rows).versions
    assert chosen is not None
    assert chosen.each().tolist() == [x for row in rows for x in parts[row].tolist()]


def test_spans_without_a_token_are_left_out() -> None:
    spans = [VersionSpan(3, 0, 0), VersionSpan(4, 0, 2), VersionSpan(5, 2, 2)]
    found = TokenVersions.joined(spans)
    assert (found.values.tolist(), found.lengths.tolist(), found.num_tokens) == ([4], [2], 2)
    assert TokenVersions.joined([]).each().tolist() == []


def test_versions_of_another_number_of_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batch.versions has shape \(2,\), expected \(3,\)"):
        batch_of([1, 1], [3])
    with pytest.raises(ValueError, match=r"batch.versions cover 2 tokens, expected 3"):
        RolloutBatch(
            torch.zeros(3, dtype=torch.int32), torch.tensor([0, 3]),
            torch.ones(3, dtype=torch.bool),
            versions=TokenVersions.joined([VersionSpan(1, 0, 2)]),
        )  # fmt: skip
