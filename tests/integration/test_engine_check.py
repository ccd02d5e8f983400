"""A run whose engine does not sample from the trained policy: refused, or warned of later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from workspace import LEARNING, Workspace, learned

from rlcore.data.generation import Completion, GenerateRequest
from rollout.engines.embedded.engine import EmbeddedEngine

GAP = "rollout/train_rollout_logprob_diff"
SEVERAL = (
    "algorithm.minibatches=2",
    "algorithm.old_logprobs=rollout",
    "checkpoint.export_hf=false",
)


def falsify(monkeypatch: pytest.MonkeyPatch, *, from_call: int) -> None:
    """Log-probs as of another temperature, from that call on."""
    generate = EmbeddedEngine.generate
    calls = [0]

    async def falsified(
        self: EmbeddedEngine, requests: Sequence[GenerateRequest]
    ) -> list[list[Completion]]:
        calls[0] += 1
        groups = await generate(self, requests)
        if calls[0] < from_call:
            return groups
        return [[replace(one, logprobs=one.logprobs * 0.7) for one in group] for group in groups]

    monkeypatch.setattr(EmbeddedEngine, "generate", falsified)


def test_log_probs_of_another_temperature_end_the_run_before_anything_is_trained(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    falsify(monkeypatch, from_call=1)
    run = workspace.train("falsified", *LEARNING)
    assert run.code == 1
    assert run.result["status"] == "failed"
    (said,) = [line for line in run.err.splitlines() if line.startswith("rlcore: ")]
    assert said.startswith(
        "rlcore: step 1: log-probs differ from the trainer's: those of engine embedded by "
    )
    assert "rollout.sampling.temperature" in said
    assert not run.metrics
    monkeypatch.undo()
    assert workspace.train("falsified", *LEARNING, "--overwrite").code == 0


def test_what_goes_wrong_later_is_a_warning_in_the_steps_that_are_compared(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    falsify(monkeypatch, from_call=2)
    run = workspace.train(
        "falsified later",
        *LEARNING,
        *SEVERAL,
        "training.steps=4",
        "rollout.engine.logprobs_every=2",
    )
    assert run.code == 0, run.err
    assert [line.partition(": ")[0] for line in run.lines("log-probs differ from")] == [
        "WARNING step 2",
        "WARNING step 4",
    ]
    # Where a batch gets several updates and no pass, only steps that are compared measure the
    # difference.
    assert {step for step, row in run.rows.items() if GAP in row} == {1, 2, 4}
    assert run.rows[1][GAP] < 1e-5 < 0.5 < run.rows[2][GAP]
    assert {f"{GAP}_max", f"{GAP}_kl"} < set(run.rows[2])


def test_a_resumed_run_compares_its_first_step(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (*LEARNING, *SEVERAL, "checkpoint.every=2")
    assert workspace.train("falsified on resume", *given, "training.steps=2").code == 0
    falsify(monkeypatch, from_call=1)
    again = workspace.train("falsified on resume", *given, "training.steps=4", "--resume")
    assert again.code == 1
    assert "step 3: log-probs differ from the trainer's: those of engine embedded" in again.err


def test_the_comparison_changes_no_bit(workspace: Workspace) -> None:
    """It may cost a pass, which no step of the optimizer sees."""
    often, never = (
        workspace.train(
            f"compared every {steps}", *LEARNING, f"rollout.engine.logprobs_every={steps}"
        )
        for steps in (1, 0)
    )
    assert learned(often.metrics) == learned(never.metrics)
