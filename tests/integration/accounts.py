"""What a whole run must show whatever happened to its processes: no sample lost or counted twice,
versions that count up.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from rlcore.data.sample import Sample
from rlcore.runs.checkpoints import latest_checkpoint
from rlcore.runs.rollouts import read_rollouts
from rollout.accounting.ledger import Ledger
from tests.integration.lab import Run

# of a step
PROMPTS = 4
SAMPLES = 4


def samples_of(run: Run, step: int) -> list[Sample]:
    return read_samples(run.folder, step)


def read_samples(folder: Path, step: int) -> list[Sample]:
    return [
        Sample.from_record(record)
        for record in read_rollouts(folder / "rollouts" / f"step_{step:06d}.jsonl.zst")
    ]


def check_accounts(run: Run, *, steps: int) -> None:
    """Of a run that was on-policy and complete: every draw was consumed by one step, each token is
    of the version it trains.
    """
    found = latest_checkpoint(run.folder / "checkpoints")
    assert found is not None
    assert found.step == steps
    assert faults_of(run.folder, steps=steps) == []
    ledger = Ledger()
    ledger.restore(found.state["source"]["ledger"])
    assert len(ledger) == PROMPTS * steps


def faults_of(folder: Path, *, steps: int, max_staleness: int = 0) -> list[str]:
    """What is wrong with the books of a run that has trained `steps` steps, in words; killed and
    resumed ones too.
    """
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
    faults = faults_of_versions(versions)
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
        if [[sample.index for sample in group] for group in groups] != [
            list(range(SAMPLES))
        ] * PROMPTS:
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


def faults_of_versions(versions: list[dict[str, Any]]) -> list[str]:
    """They count up by one; steps never go back, but where the trainer was started again."""
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
