"""Whole runs with a curriculum: killed and resumed they choose the same prompts, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlcore.runs.directory import RunDirectory
from rollout.accounting.audit import audit
from rollout.accounting.journal_reader import read_journal
from tests.integration.resume_runs import STEPS, UPDATES, Runs, assert_same_run, metrics_of

CURRICULUM = ("data.curriculum={name: pass_rate, passes_at: 0.3, floor: 0.2}",)
KILLS: list[dict[str, Any]] = [
    {"point": "update", "call": 2 * UPDATES + 1},  # of step 3, behind the checkpoint of step 2
    {"point": "journal cut", "call": 2},
    {"point": "state", "call": 1, "after": True},
]


def journal_rows(run: Path) -> dict[int, int]:
    rows: dict[int, int] = {}
    for _, entry in read_journal(run / "ledger.jsonl").entries():
        rows |= dict(zip(entry.get("drawn", ()), entry.get("rows", ())))
    return rows


@pytest.fixture(scope="module")
def reference(runs: Runs) -> Path:
    ended = runs.train("reference", *CURRICULUM)
    assert ended.codes == [0], ended.output
    return runs.path("reference")


def test_a_killed_run_chooses_as_the_undisturbed_one(runs: Runs, reference: Path) -> None:
    for number, kill in enumerate(KILLS):
        ended = runs.train("killed", *CURRICULUM, resume=number > 0, at=kill)
        assert ended.killed, (kill, ended.output)
        assert audit(RunDirectory(runs.path("killed"))).contradictions == []
    runs.finish("killed", *CURRICULUM)
    assert_same_run(runs.path("killed"), reference)
    rows = journal_rows(reference)
    assert journal_rows(runs.path("killed")) == rows
    assert len(rows) >= 3 * STEPS
    for name in ("reference", "killed"):
        assert audit(RunDirectory(runs.path(name))).contradictions == []
    last = metrics_of(reference)[-1]
    assert 0 < last["curriculum/seen"] <= 1
    assert last["curriculum/effective_prompts"] <= 10

    # the other order of the same rows is another run
    ended = runs.train("killed", f"training.steps={STEPS + 1}", resume=True)
    assert ended.codes == [2]
    assert "was saved with data.curriculum" in ended.output


@pytest.mark.full  # test_ledger_runs.py kills one without a curriculum
def test_a_run_that_generates_ahead_balances_after_kills(runs: Runs) -> None:
    asynchronous = (*CURRICULUM, "rollout.max_staleness=2", "rollout.oversample=1")
    for number, kill in enumerate(KILLS):
        ended = runs.train("ahead", *asynchronous, resume=number > 0, at=kill)
        assert ended.killed, (kill, ended.output)
        assert audit(RunDirectory(runs.path("ahead"))).contradictions == []
    runs.finish("ahead", *asynchronous)
    found = audit(RunDirectory(runs.path("ahead")))
    assert found.contradictions == []
    assert found.states["consumed"] == 3 * STEPS


def test_a_damaged_choice_is_named(runs: Runs, reference: Path) -> None:
    damaged = runs.path("damaged")
    shutil.copytree(reference, damaged)
    path = damaged / "ledger.jsonl"
    lines = path.read_text().splitlines()
    entry = json.loads(lines[1])
    entry["rows"] = entry["rows"][::-1]
    path.write_text("\n".join([lines[0], json.dumps(entry), *lines[2:]]) + "\n")
    found = audit(RunDirectory(damaged)).contradictions
    assert any("which the ledger says is of row" in line for line in found)
    assert all(" row " in line for line in found)
