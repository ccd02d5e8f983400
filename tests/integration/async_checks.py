"""Checks of an asynchronous run: its accounting balances, and no token is too stale."""

from __future__ import annotations

from pathlib import Path

from rlcore.data.sample import Sample
from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import read_rollouts
from rlcore.runs.versions import read_versions
from rollout.accounting.audit import audit


def sample_staleness(folder: Path, step: int) -> list[list[int]]:
    """Return the staleness of the parts of each sample of `step`.

    It is taken from the samples and, independently, from versions.jsonl.
    """
    step_of = {
        version.version: version.step for version in read_versions(folder / "versions.jsonl")
    }
    found = []
    for record in read_rollouts(folder / "rollouts" / f"step_{step:06d}.jsonl.zst"):
        spans = Sample.from_record(record).versions
        assert [step_of[span.version] for span in spans] == record["policy_steps"]
        found.append([step - 1 - policy_step for policy_step in record["policy_steps"]])
    return found


def check_async_run(folder: Path, *, steps: int, staleness: int) -> list[int]:
    """Assert balanced accounting, whole steps, and no token above the bound.

    Returns the staleness of every part of a sample.
    """
    found = audit(RunDirectory(folder))
    assert found.contradictions == []
    assert found.steps == found.recorded == steps
    everything = [
        age
        for step in range(1, steps + 1)
        for parts in sample_staleness(folder, step)
        for age in parts
    ]
    assert 0 <= min(everything) <= max(everything) <= staleness
    return everything
