"""Commands as a user calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore import cli
from tests.unit.launch.commands.plan_kit import CONFIG, EXAMPLES


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`command("plan", ...)`: exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = cli.main([*map(str, arguments)])
        except SystemExit as caught:  # argparse
            code = int(caught.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def plan(command) -> Callable[..., tuple[int, str, str]]:
    """`plan("--trainer-gpus", "8", model="Qwen2.5-7B")` of the example's configuration."""

    def run(*arguments: str, model: str | Path = "Qwen2.5-7B") -> tuple[int, str, str]:
        return command("plan", CONFIG, f"model.path={EXAMPLES / model}", *arguments)

    return run


@pytest.fixture
def dry_run(command) -> Callable[..., tuple[int, str, str]]:
    """`dry_run(folder, "--world", "16")` of the example's configuration."""

    def run(model: Path, *arguments: str) -> tuple[int, str, str]:
        return command("dryrun", CONFIG, f"model.path={model}", *arguments)

    return run


@pytest.fixture
def compare(command) -> Callable[..., tuple[int, str]]:
    """`compare(a, b)`: exit code and standard output."""
    return lambda *runs: command("compare", *runs)[:2]
