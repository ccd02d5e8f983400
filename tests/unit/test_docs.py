"""Pages that are made from code are current."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore import cli

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_metrics_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics", "--markdown"]) == 0
    assert (DOCS / "metrics.md").read_text() == capsys.readouterr().out, "run: rlcore metrics --markdown > docs/metrics.md"
