from __future__ import annotations

from rlcore.config.sections.base import Section


class RunConfig(Section):
    """Who this run is and where it writes: `<dir>/<name>/`."""

    name: str
    dir: str = "runs"
    seed: int = 1
    deterministic: bool = False  # torch deterministic algorithms: bit-equal reruns on one layout
    threads: int | None = None  # torch intra-op threads a process; None leaves torch's choice
