"""Fixtures for every test, and how long each tier took."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

# A call of Ray's outside a cluster fails, where Ray would start or join one that nobody ends.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# The same examples each time; scripts/test.sh --full looks for new ones
# (--hypothesis-profile=default). An example that takes long is no error on a busy machine.
settings.register_profile("default", deadline=None)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# Of the everyday tests, those that take longest begin first once the quick ones are done: the last
# file decides when both workers are.
LONGEST = ("ray", "sglang", "parity")
FOLDERS = (
    *("unit", "fuzz", "nccl_rules", "parity", "checkpoint", "integration", "network", "ray"),
    "sglang",
)


def folder_of(nodeid: str) -> str:
    return Path(nodeid.partition("::")[0]).parts[1]


# What scripts/test.sh runs, and the mark without which a file of tests has none of it to import.
MARK_OF_HALF = {"not rest and not full": "mark.everyday", "rest and not full": "mark.rest"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of tests that has no test of the half that runs."""
    half = config.option.markexpr
    if half not in MARK_OF_HALF or not collection_path.name.startswith("test_"):
        return None
    is_unit = "unit" in collection_path.relative_to(config.rootpath).parts
    if is_unit == (half == "not rest and not full"):
        return None
    return MARK_OF_HALF[half] not in collection_path.read_text() or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in no everyday run: all outside tests/unit that is not marked "everyday"."""
    everyday: dict[pytest.Item, bool] = {}
    for item in items:
        everyday[item] = any(item.iter_markers("everyday"))
        if folder_of(item.nodeid) != "unit" and not everyday[item]:
            item.add_marker(pytest.mark.rest)

    def place(item: pytest.Item) -> int:
        folder = folder_of(item.nodeid)
        if folder == "unit":
            return -1
        return LONGEST.index(folder) if everyday[item] and folder in LONGEST else len(LONGEST)

    items.sort(key=place)


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
