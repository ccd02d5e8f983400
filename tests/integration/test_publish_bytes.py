"""Senders in processes broadcast exactly the bytes that the simulation of a publication counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.publish_bytes import compare


@pytest.mark.parametrize(("ranks", "engines"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.full)])
def test_each_sender_sends_what_the_simulation_says(
    ranks: int, engines: int, tmp_path: Path
) -> None:
    """2 and 4 processes; the engines compare digests of what they received."""
    sent = compare(tmp_path, ranks, engines)
    assert sent.real == sent.simulated
    assert min(sent.real) > 10_000_000
