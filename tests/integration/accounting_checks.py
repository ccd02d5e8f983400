"""Checks of a whole run: no sample is lost or counted twice, and versions count up."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from rlcore.data.sample import Sample
from rlcore.runs.checkpoints import latest_checkpoint
from rlcore.runs.rollouts import read_rollouts
from rollout.accounting.ledger import Ledger
from tests.integration.workspace import Run

PROMPTS = 4  # of a step
SAMPLES = 4  # of a prompt


def samples_of(run: Run, step: int) -> list[Sample]:
    return read_samples(run.folder, step)


def read_samples(folder: Path, step: int) -> list[Sample]:
    return [
        Sample.from_record(record)
        for record in read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet")
    ]


def check_accounting(run: Run, *, steps: int) -> None:
    """Assert that an on-policy run is complete.

    Each draw was consumed by one step, and each token is of the version that trained on it.
    """
    found = latest_checkpoint(run.folder / "checkpoints")
    assert found is not None
    assert found.step == steps
    assert accounting_faults(run.folder, steps=steps) == []
    ledger = Ledger()
    ledger.restore(found.state["source"]["ledger"])
    assert len(ledger) == PROMPTS * steps


def accounting_faults(folder: Path, *, steps: int, max_staleness: int = 0) -> list[str]:
    """Say what is wrong with the accounting of a run of `steps` steps, resumed or not."""
    found = latest_checkpoint(folder / "checkpoints")
    if found is None or found.step != steps:
        return [
            f"the newest checkpoint is {'none' if found is None else found.folder.name}, expected"
            f" one of step {steps}"
        ]
    versions = [json.loads(line) for line in (folder / "versions.jsonl").read_text().splitlines()]
    ledger = Ledger()
    ledger.restore(found.state["source"]["ledger"])
    balance = ledger.balance()
    faults = version_faults(versions)
    if balance["consumed"] != PROMPTS * steps:
        faults.append(
            f"{balance['consumed']} draws are consumed, expected {PROMPTS} in each of {steps}"
            f" steps: {balance}"
        )
    policy_step = {one["version"]: one["step"] for one in versions}
    for step in range(1, steps + 1):
        groups = [
            list(group)
            for _, group in groupby(read_samples(folder, step), key=lambda sample: sample.draw)
        ]
        # A rollout may have several segments.
        rollouts = [len({sample.rollout_id for sample in group}) for group in groups]
        whole = all([s.index for s in group] == list(range(len(group))) for group in groups)
        if rollouts != [SAMPLES] * PROMPTS or not whole:
            faults.append(f"step {step} was not trained on {PROMPTS} whole groups of {SAMPLES}")
        for group in groups:
            if (state := ledger.state(group[0].draw)) != f"consumed by step {step}":
                faults.append(
                    f"step {step} was trained on draw {group[0].draw}, which the ledger calls"
                    f" {state}"
                )
            made_by = {
                policy_step.get(version)
                for sample in group
                for version in sample.token_versions().tolist()
            }
            if not made_by <= set(range(step - 1 - max_staleness, step)):
                faults.append(
                    f"step {step} was trained on tokens of policy steps {made_by}, max_staleness"
                    f" {max_staleness}"
                )
    return faults


def version_faults(versions: list[dict[str, Any]]) -> list[str]:
    """Say what is wrong with versions: they count by one; steps go back at a new start alone."""
    faults = []
    if [one["version"] for one in versions] != list(range(1, len(versions) + 1)):
        faults.append(f"versions do not count up by one: {[one['version'] for one in versions]}")
    if [one["incarnation"] for one in versions] != sorted(one["incarnation"] for one in versions):
        faults.append("an incarnation came back")
    for incarnation, lines in groupby(versions, key=lambda one: one["incarnation"]):
        steps = [one["step"] for one in lines]
        if steps != sorted(steps):
            faults.append(f"steps went back in incarnation {incarnation}: {steps}")
    return faults
