"""Checks of an asynchronous run: its accounting balances, and no token is too stale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from rlcore.data.sample import Sample, VersionSpan
from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import read_rollouts
from rlcore.runs.versions import read_versions
from rollout.accounting.audit import audit
from tests.integration.hf_logprobs import gaps_by_version
from tests.integration.workspace import Run, Workspace


def sample_staleness(folder: Path, step: int) -> list[list[int]]:
    """Return the staleness of the parts of each sample of `step`.

    It is taken from the samples and, independently, from versions.jsonl.
    """
    step_of = {
        version.version: version.step for version in read_versions(folder / "versions.jsonl")
    }
    found = []
    for record in read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet"):
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


def of_two_versions(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with a turn that several versions made."""
    return [
        sample
        for sample in samples
        for versions in [sample.token_versions()]
        if any(len({*versions[t.start : t.end]}) > 1 for t in sample.turn_spans)
    ]


def check_versions_of_turns(workspace: Workspace, run: Run, samples: Sequence[Sample]) -> None:
    """Assert that some turns of conversations were made by two versions, and are recorded so.

    Every token has the log-prob that transformers gives it with the weights of its version, and
    those in such turns have another one with the weights that began the turn.
    """
    for sample in samples:
        assert all(a <= b for a, b in pairwise(sample.token_versions()))
        assert {turn.start for turn in sample.turn_spans} <= {s.start for s in sample.versions}
    mixed = of_two_versions(samples)
    assert mixed, "no publication came in the middle of a turn"
    gaps = gaps_by_version(workspace, run, samples)
    assert max(gaps.values()) < 1e-4, gaps
    first = [replace(s, versions=(VersionSpan(int(s.token_versions()[0]), 0, s.num_trainable),))
             for s in mixed]  # fmt: skip
    assert max(gaps_by_version(workspace, run, first).values()) > 1e-3
