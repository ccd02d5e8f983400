"""Sandboxes: model-written code runs apart, with limits, and is ended as a tree.

A program goes in, an outcome comes out. `local.build_sandbox` makes the sandbox of a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Status = Literal["finished", "timeout", "limit", "error"]


@dataclass(frozen=True)
class Program:
    """Code to run, with what it may use."""

    code: str
    language: str = "python"
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)  # by name, next to the code
    timeout_s: float = 5.0
    memory_mb: int = 512  # of all its processes together


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    `finished` means that it ended by itself, whatever its exit code; `limit` that it was ended
    since it used too much; `error` that the sandbox failed, which says nothing about the program.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None  # 128 + the signal's number where a signal ended it
    seconds: float = 0.0
    reason: str = ""  # of any status but `finished`

    @property
    def succeeded(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.status == "finished" and self.exit_code == 0


class Sandbox(Protocol):
    """Runs programs apart from everything else. Use it from one event loop."""

    async def start(self) -> None:
        """Make sure that it works. Raises ConfigError with what to do if it does not."""

    async def run(self, program: Program) -> Outcome:
        """Run a program; waits for a free place first. Bad programs and failures are outcomes."""

    async def close(self) -> None:
        """End what `start` began."""
