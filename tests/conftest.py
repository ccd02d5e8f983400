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

FOLDERS = ("unit", "fuzz", "nccl_rules", "parity", "checkpoint", "integration", "ray", "sglang")


def folder_of(nodeid: str) -> str:
    return Path(nodeid.partition("::")[0]).parts[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in no everyday run: all outside tests/unit that is not marked "everyday"."""
    for item in items:
        if folder_of(item.nodeid) != "unit" and not any(item.iter_markers("everyday")):
            item.add_marker(pytest.mark.rest)


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
    """Seconds of the tests of each folder, of all workers together."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[folder_of(report.nodeid)] += report.duration
    if seconds:
        terminalreporter.section("time by folder")
    for folder in FOLDERS:
        if folder in seconds:
            terminalreporter.write_line(f"{folder:<12} {seconds[folder]:6.1f} s")
