"""Fixtures for every test, and how long each tier took."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples each time; scripts/test.sh --full looks for new ones
# (--hypothesis-profile=default).
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# Of a tier, on two cores.
BUDGET_S = {
    "unit": 300,
    "parity": 360,
    "checkpoint": 240,
    "integration": 600,
    "ray": 240,
    "sglang": 360,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Qwen3, tied, 31 symbols, 2 layers of 32. Read it, do not write into
    it.
    """
    from rlcore.launch.commands.init_model import ModelSpec, init_model

    folder = tmp_path_factory.mktemp("tiny") / "model"
    init_model(folder, ModelSpec(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=64))
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds of each tier beside its budget. Over it is a remark and no failure: the machine may
    be busy.
    """
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[Path(report.nodeid.partition("::")[0]).parts[1]] += report.duration
    if not seconds:
        return
    terminalreporter.section("time by tier")
    for tier, budget in BUDGET_S.items():
        if tier in seconds:
            over = "  OVER BUDGET" if seconds[tier] > budget else ""
            terminalreporter.write_line(f"{tier:<12} {seconds[tier]:6.1f} s of {budget} s{over}")
