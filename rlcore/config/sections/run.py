"""The section `run`."""

from __future__ import annotations

from rlcore.config.sections.base import OutputPath, Section


class RunConfig(Section):
    """The name of the run and its folder: `<dir>/<name>/`."""

    name: str
    """Name of the run, and of its folder."""
    dir: OutputPath = "runs"
    """Folder that holds the folders of runs."""
    seed: int = 1
    """Seed of every random number: data order, sampling, initial heads."""
    deterministic: bool = False
    """Use torch's deterministic algorithms: bit-equal reruns on one layout."""
    threads: int | None = None
    """Torch's intra-op threads a process; default: OMP_NUM_THREADS, else a share of the cores, or 1
    where that is as fast, as measured at the start."""
