"""Sandboxes run model-written code confined and limited, and end it with all its processes.

A `Program` goes in, an `Outcome` comes out. `local.build_sandbox` makes the configured sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Status = Literal["finished", "timeout", "limit", "error"]


@dataclass(frozen=True)
class Program:
    """Code to run, with its input and limits."""

    code: str
    language: str = "python"
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)  # by name, in the code's folder
    timeout_s: float = 5.0
    memory_mb: int = 512  # limit for all its processes together


@dataclass(frozen=True)
class Outcome:
    """The result of a program.

    `finished`: it ended by itself, with any exit code. `limit`: it was ended because it used too
    much. `error`: the sandbox failed, which says nothing about the program.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None  # 128 + the signal's number where a signal ended it
    seconds: float = 0.0
    reason: str = ""  # set for any status but `finished`

    @property
    def succeeded(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.status == "finished" and self.exit_code == 0


class Sandbox(Protocol):
    """Runs isolated programs. Use it from one event loop."""

    async def start(self) -> None:
        """Check that the sandbox works. Raises ConfigError with advice otherwise."""

    async def run(self, program: Program) -> Outcome:
        """Run a program, after waiting for a free slot. Bad programs and failures are outcomes."""

    async def close(self) -> None:
        """Release what `start` acquired."""
