"""What a whole run must show whatever happened to its engines: no sample lost or counted twice, versions that never go back."""

from __future__ import annotations

import json

from rlcore.data.sample import Sample
from rlcore.runs.rollouts import read_rollouts
from rollout.ledger import Ledger
from tests.integration.lab import Run

PROMPTS, SAMPLES = 4, 4         # of a step


def samples_of(run: Run, step: int) -> list[Sample]:
    return [Sample.from_record(record) for record in read_rollouts(run.rollouts(step))]


def check_accounts(run: Run, *, steps: int) -> None:
    """Every draw was consumed by one step, and every token was made by the version that its step trains."""
    ledger = Ledger()
    state = json.loads((run.checkpoint(steps) / "state.json").read_text())
    ledger.restore(state["source"]["ledger"])
    assert ledger.balance()["consumed"] == len(ledger) == PROMPTS * steps
    versions = [json.loads(line) for line in (run.folder / "versions.jsonl").read_text().splitlines()]
    assert [one["version"] for one in versions] == list(range(1, len(versions) + 1))
    assert [one["step"] for one in versions] == sorted(one["step"] for one in versions)
    draws: list[int] = []
    for step in range(1, steps + 1):
        samples = samples_of(run, step)
        trained = {one["version"] for one in versions if one["step"] == step - 1}
        assert {version for sample in samples for version in sample.token_versions().tolist()} <= trained
        assert [sample.index for sample in samples] == list(range(SAMPLES)) * PROMPTS
        draws += [sample.draw for sample in samples[::SAMPLES]]
    assert sorted(draws) == list(range(PROMPTS * steps))
