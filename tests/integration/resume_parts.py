"""The reward of the runs in test_resume.py. A module of its own: worker processes import it."""

from __future__ import annotations

from rlcore.data.sample import Sample


def share_of_digits(sample: Sample) -> float:
    """How much of the response is digits: differs between the samples of an untrained model."""
    return sum(symbol.isdigit() for symbol in sample.response_text) / max(len(sample.response_text), 1)
