"""benchmarks/conversations.py runs, at its quick size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.rest
def test_the_benchmark_prints_each_side(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, "benchmarks/conversations.py", "--quick", "--json", str(numbers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    sides = ["bare aiohttp client", "Conversation", "bare aiohttp server", "gateway"]
    assert [row["side"] for row in json.loads(numbers.read_text())["rows"]] == sides
    for side in sides:
        assert f"| {side} |" in done.stdout
