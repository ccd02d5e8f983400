"""All checks of `rlcore doctor`, and the cheap ones for the start of a run."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config import Config
from rlcore.launch.doctor import environments, gpus, machine, network, sandbox
from rlcore.launch.doctor.finding import Finding
from rlcore.launch.doctor.needs import Needs


def examine(config: Config | None) -> Iterator[Finding]:
    """Yield a finding for each check, as it is made.

    Args:
        config: what to look for; None: what is there.
    """
    needs = Needs.of(config)
    ours, findings = environments.trainer(needs)
    yield from findings
    theirs, findings = environments.engines(needs)
    yield from findings
    on_gpus = list(gpus.gpus(needs, ours))
    yield from on_gpus
    yield from environments.nccl(needs, ours, theirs)
    yield from environments.toolkit(needs, ours, theirs)
    yield from environments.kernels(needs, ours, gpus=ours.gpus > 0)
    yield from sandbox.sandbox(needs)
    yield from _cheap(needs)


def notes_at_start(config: Config) -> list[str]:
    """What the cheap checks would have changed, for the start of a run; it goes on whatever."""
    needs = Needs.of(config)
    return [one.as_note for one in _cheap(needs) if one.level != "ok"]


def _cheap(needs: Needs) -> Iterator[Finding]:
    """Those that start no process and open no connection."""
    yield from machine.shared_memory(needs)
    yield from machine.open_files(needs)
    yield from machine.threads(needs)
    yield from machine.bytecode()
    yield from machine.run_folder(needs)
    yield from network.network(needs)
    yield from network.clusters(needs)
    yield from network.keys(needs)
