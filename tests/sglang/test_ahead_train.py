"""Runs that generate ahead of their trainer on a real SGLang server, which batches continuously."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from server_kit import Served

from rollout.engines.factories import ADMIN_KEY, API_KEY
from tests.integration.accounting_checks import samples_of
from tests.integration.async_checks import (
    check_async_run,
    check_versions_of_turns,
    of_two_versions,
    sample_staleness,
)
from tests.integration.workspace import LEARNING, Run, Workspace

STEPS = 6


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Workspace]:
    yield Workspace(tmp_path_factory.mktemp("ahead"), tiny_model)
    torch.set_num_threads(1)


def train(
    workspace: Workspace,
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *arguments: str,
) -> Run:
    """Run to the end on the session's server, up to two steps ahead."""
    monkeypatch.setenv(API_KEY, served.keys.api)
    monkeypatch.setenv(ADMIN_KEY, served.keys.admin)
    run = workspace.train(
        name,
        *LEARNING,
        "rollout.engine.kind=sglang",
        f"rollout.engine.urls=[{served.url}]",
        f"training.steps={STEPS}",
        "rollout.max_staleness=2",
        "rollout.sampling.max_new_tokens=32",
        "algorithm.correction={name: tis}",
        "rollout.engine.max_in_flight=4",
        *arguments,
    )
    assert run.code == 0, run.err
    return run


@pytest.mark.parametrize(
    "mode",
    [
        "retract",
        *(pytest.param(mode, marks=pytest.mark.full) for mode in ("drain", "in_place", "abort")),
    ],
)
def test_a_run_two_steps_ahead(
    workspace: Workspace, served: Served, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    run = train(workspace, served, monkeypatch, mode, f"rollout.on_update={mode}")
    assert max(check_async_run(run.folder, steps=STEPS, staleness=2)) > 0
    crossed = [
        parts
        for step in range(1, STEPS + 1)
        for parts in sample_staleness(run.folder, step)
        if len(parts) > 1
    ]
    if mode == "drain":
        assert crossed == []
    assert all(parts == sorted(parts, reverse=True) for parts in crossed)
    assert (sum(row["rollout/resumed_responses"] for row in run.metrics) > 0) <= (mode == "abort")
    print(f"{mode}: {len(crossed)} of {STEPS * 16} responses were made by several versions")


def test_a_publication_in_the_middle_of_a_turn(
    workspace: Workspace, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is of the version that made it, and has the log-prob of that version's weights.

    Turns are short and the server is quick: a run may have no publication in the middle of one.
    """
    for attempt in range(5):
        run = train(
            workspace,
            served,
            monkeypatch,
            f"conversations{attempt}",
            "rollout.on_update=abort",
            "checkpoint.every=1",
            f"checkpoint.keep={STEPS}",
            f"run.seed={attempt}",
            "rollout.workflow={name: 'tests.integration.failing_environments:Faulty', how: never}",
        )
        check_async_run(run.folder, steps=STEPS, staleness=2)
        samples = [sample for step in range(1, STEPS + 1) for sample in samples_of(run, step)]
        if of_two_versions(samples):
            break
    check_versions_of_turns(workspace, run, samples)
