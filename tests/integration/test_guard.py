"""What a step, a token and a start cost in numbers that no other program changes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from guard import RECORD, grown, measure


def test_nothing_has_grown_by_more_than_five_percent() -> None:
    """To accept a number: `python benchmarks/guard.py --record`, in the commit that changes it."""
    assert grown(measure(), json.loads(RECORD.read_text())) == []


def test_a_number_that_has_grown_is_named() -> None:
    recorded = {"calls, a step": 1000, "files, a step": 3}
    assert grown({"calls, a step": 1050, "files, a step": 4}, recorded) == []
    found = grown({"calls, a step": 1060, "files, a step": 2, "new": 1}, recorded)
    assert found == ["calls, a step: 1,060, recorded 1,000", "new: 1, recorded nothing"]
