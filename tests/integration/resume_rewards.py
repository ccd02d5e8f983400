"""The rewards of test_resume.py. Their worker process imports this and no torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rlcore.data.sample import Sample


def share_of_digits(sample: Sample) -> float:
    """Return the share of digits: it differs between samples of an untrained model."""
    return sum(symbol.isdigit() for symbol in sample.response_text) / max(
        len(sample.response_text), 1
    )


def stalling_share_of_digits(sample: Sample) -> float:
    """Return the same, but once STALL_FILE has STALL_LINES lines stall until STALL_UNTIL exists."""
    watched = Path(os.environ["STALL_FILE"])
    if watched.exists() and watched.read_bytes().count(b"\n") >= int(os.environ["STALL_LINES"]):
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not Path(os.environ["STALL_UNTIL"]).exists():
            time.sleep(0.01)
    return share_of_digits(sample)
