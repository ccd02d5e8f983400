"""benchmarks/control.py, small: a whole run whose ranks are threads, over stubs of engines."""

from __future__ import annotations

from pathlib import Path

from benchmarks.control import measure

RANKS = 9
ENGINES = 2


def test_a_step_costs_each_rank_a_few_requests(tmp_path: Path) -> None:
    """Counts, not seconds, of all that a step asks of the store except looks for awaited values."""
    smaller = {"num_hidden_layers": 1, "num_experts": 8}
    found = measure(tmp_path, RANKS, engines=ENGINES, steps=1, smaller=smaller)
    assert 4 * RANKS <= found.requests["writes"] <= 8 * RANKS
    assert 4 * RANKS <= found.requests["reads"] <= 8 * RANKS
    assert 100 * RANKS <= found.requests["bytes"] <= 1000 * RANKS
