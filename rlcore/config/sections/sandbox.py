"""The section `reward.sandbox`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from rlcore.config.sections.base import FolderPath, ProgramPath, Section

SandboxKind = Literal["namespaces", "bubblewrap", "unshare", "fusion", "rlimits"]


class SandboxConfig(Section):
    """Where code that a model wrote runs, for the reward `code`."""

    kind: SandboxKind = "namespaces"
    """`namespaces`: Linux namespaces on this machine, by `bubblewrap` or otherwise by `unshare`;
    `fusion`: a SandboxFusion server; `rlimits`: UNSAFE, limits alone, for machines without
    namespaces: the code can read your files and use the network."""
    url: str | None = None
    """Base URL of the SandboxFusion server, as http://HOST:8080; for `fusion` alone."""
    concurrency: PositiveInt = 4
    """Programs that run at a time."""
    processes: PositiveInt = 64
    """Most processes and threads of one program."""
    files_mb: PositiveInt = 64
    """Most bytes that one program may write into its folder, which is in memory, MiB."""
    output_kb: PositiveInt = 1024
    """Most output of one program, KiB; a program that writes more is ended."""
    python: ProgramPath | None = None
    """Interpreter of the programs, with what they may import; default: rlcore's own."""
    folders: list[FolderPath] = Field(default_factory=list)
    """More folders of this machine that programs may read."""
    retries: NonNegativeInt = 8
    """Attempts after the first, where the SandboxFusion server fails or cannot be reached; with the
    pauses of `reward.parts.NAME.service.retries`."""

    @model_validator(mode="after")
    def _a_server_has_an_address(self) -> SandboxConfig:
        if self.kind == "fusion" and not (self.url or "").startswith(("http://", "https://")):
            raise ValueError("`kind: fusion` needs url: http://HOST:8080, without /run_code")
        if self.kind != "fusion" and self.url is not None:
            raise ValueError(f"url is for a SandboxFusion server, and kind is {self.kind}")
        return self
