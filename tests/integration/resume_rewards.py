"""The rewards of test_resume.py. Their worker process imports this and no torch."""

from __future__ import annotations

from rlcore.data.sample import Sample


def share_of_digits(sample: Sample) -> float:
    """Return the share of digits: it differs between samples of an untrained model."""
    return sum(symbol.isdigit() for symbol in sample.response_text) / max(
        len(sample.response_text), 1
    )
