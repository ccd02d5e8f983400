"""Runs that stop early, and runs that do not, through the whole loop."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from rank_runs import RankRuns
from safetensors.torch import load_file, save_file
from workspace import LEARNING, Run, Workspace

# k3 is never negative, and the runs are bit-equal up to the step at which they stop.
SHARED = (*LEARNING, "algorithm.kl.reward_kind=k3", "training.steps=6")
ARMED = "early stopping is armed"
TRIPPED = "early stopping: objective/kl"
IGNORED = "is ignored: training.early_stopping is off"


def armed(target: float) -> tuple[str, ...]:
    return (*SHARED, "training.early_stopping=true", f"training.target_kl={target!r}")


@pytest.fixture(scope="module")
def completed(workspace: Workspace) -> Run:
    return workspace.train("armed", *armed(1e6))


@pytest.fixture(scope="module")
def kl(completed: Run) -> dict[int, float]:
    """`objective/kl` of each step of a run that is not stopped."""
    return {step: row["objective/kl"] for step, row in completed.rows.items()}


@pytest.fixture(scope="module")
def stopped(workspace: Workspace, kl: dict[int, float]) -> Run:
    """Stops after step 3: step 2 is exactly at the target."""
    return workspace.train("stopped", *armed(kl[2]), workspace.heldout, "evaluation.max_prompts=4")


def test_below_the_target_a_run_completes(completed: Run, kl: dict[int, float]) -> None:
    assert completed.code == 0
    assert completed.result["status"] == "completed"
    assert completed.result["steps"] == 6
    assert "objective_kl" not in completed.result
    assert kl[1] == 0.0
    assert 0.0 < kl[2] < kl[3] < kl[4]
    assert len(completed.lines(ARMED)) == 1
    assert not completed.lines(IGNORED) + completed.lines(TRIPPED)


@pytest.mark.everyday
def test_equal_goes_on_and_above_stops_as_a_success(stopped: Run, kl: dict[int, float]) -> None:
    assert stopped.code == 0
    assert [row["step"] for row in stopped.metrics] == [0, 1, 2, 3]
    assert stopped.rows[2]["objective/kl"] == kl[2]
    result = stopped.result
    assert (result["status"], result["steps"]) == ("early_stopped", 3)
    assert (result["objective_kl"], result["target_kl"]) == (kl[3], kl[2])
    assert [len(stopped.lines(text)) for text in (ARMED, TRIPPED, IGNORED)] == [1, 1, 0]
    assert "step 3" in stopped.lines(TRIPPED)[0]
    assert stopped.lines("stopped early after step 3/6")
    assert "eval/score" in stopped.rows[3], "the last step of a run is evaluated, however it ends"


def test_the_smallest_number_below_trips(workspace: Workspace, kl: dict[int, float]) -> None:
    run = workspace.train(
        "just above", *armed(math.nextafter(kl[2], 0.0)), "checkpoint.export_hf=false"
    )
    assert (run.code, run.result["status"], run.result["steps"]) == (0, "early_stopped", 2)


def test_an_early_stopped_run_is_saved(stopped: Run, workspace: Workspace) -> None:
    from transformers import AutoModelForCausalLM

    assert stopped.checkpoint(3).is_dir()
    assert stopped.rollouts(3).is_file()
    model = AutoModelForCausalLM.from_pretrained(stopped.folder / "hf")
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    moved = stopped.weights
    assert any(
        not torch.equal(moved[name], tensor)
        for name, tensor in load_file(workspace.model / "model.safetensors").items()
    )


def test_resuming_an_early_stopped_run_says_so_and_touches_nothing(
    workspace: Workspace, stopped: Run, kl: dict[int, float]
) -> None:
    before = snapshot(stopped.folder)
    again = workspace.train("stopped", *armed(kl[2]), "--resume")
    assert again.code == 2
    (line,) = again.err.strip().splitlines()
    assert (
        f"stopped early at step 3 of 6: objective/kl {kl[3]:.6g} is above training.target_kl"
        f" {kl[2]:g}" in line
    )
    assert "training.early_stopping=false" in line
    assert snapshot(stopped.folder) == before


def test_with_a_higher_target_it_goes_on(
    workspace: Workspace, stopped: Run, kl: dict[int, float], completed: Run
) -> None:
    shutil.copytree(stopped.folder, workspace.folder / "runs" / "continued")
    run = workspace.train("continued", *armed(kl[6] * 2), "--resume")
    assert (run.code, run.result["status"], run.result["steps"]) == (0, "completed", 6)
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3, 4, 5, 6]
    assert [run.rows[step]["objective/kl"] for step in (4, 5, 6)] == [kl[4], kl[5], kl[6]]
    assert "objective_kl" not in run.result


def test_killed_before_its_result_it_only_ends(
    workspace: Workspace, stopped: Run, kl: dict[int, float]
) -> None:
    """The checkpoint is written first: a kill behind it must not train on, nor lose the export."""
    shutil.copytree(stopped.folder, workspace.folder / "runs" / "killed")
    (workspace.folder / "runs" / "killed" / "result.json").unlink()
    shutil.rmtree(workspace.folder / "runs" / "killed" / "hf")
    run = workspace.train("killed", *armed(kl[2]), "--resume")
    assert (run.code, run.result["status"], run.result["steps"]) == (0, "early_stopped", 3)
    assert run.result["objective_kl"] == kl[3]
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3]
    assert run.exported.read_bytes() == stopped.exported.read_bytes()


@pytest.mark.parametrize("switch", ["'off'", "0"])
def test_without_the_switch_a_target_is_ignored_in_one_line(
    workspace: Workspace, switch: str
) -> None:
    run = workspace.train(
        "ignored",
        *LEARNING,
        f"training.early_stopping={switch}",
        "training.target_kl=1e-9",
        "--overwrite",
    )
    assert (run.code, run.result["status"]) == (0, "completed")
    assert [len(run.lines(text)) for text in (IGNORED, ARMED, TRIPPED)] == [1, 0, 0]
    assert "objective/kl" not in run.rows[3], (
        "the reference is not loaded for a target that is ignored"
    )


def test_no_positive_target_is_refused_before_anything_starts(workspace: Workspace) -> None:
    run = workspace.train("refused target", "training.early_stopping=yes", "training.target_kl=0")
    assert run.code == 2
    (line,) = run.err.strip().splitlines()
    assert "training.target_kl" in line
    assert "positive" in line
    assert not run.folder.exists()


def test_a_kl_that_is_no_number_fails_the_run(workspace: Workspace) -> None:
    broken = workspace.folder / "broken reference"
    shutil.copytree(workspace.model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    run = workspace.train("nan", *armed(0.1), f"reference.path={broken}")
    assert run.code == 1
    (line,) = [line for line in run.err.splitlines() if line.startswith("rlcore:")]
    assert "objective/kl is NaN" in line
    assert run.result["status"] == "failed"
    assert "objective/kl is NaN" in run.result["reason"]
    assert math.isnan(run.rows[1]["objective/kl"]), "the step that failed is in the log"
    assert not (run.folder / "hf").exists()


def test_max_update_kl_ends_the_updates_of_a_step(workspace: Workspace) -> None:
    several = (*LEARNING, "algorithm.epochs=2", "algorithm.minibatches=2", "training.steps=2")
    free = workspace.train("free", *several)
    assert [row["train/optimizer_steps"] for row in free.metrics] == [4, 4]
    assert max(row["policy/approxkl_avg"] for row in free.metrics) > 1e-6
    limited = workspace.train("limited", *several, "training.max_update_kl=1e-12")
    assert limited.code == 0
    # The first update of a batch sees a ratio of 1; the second one is the first that can exceed the
    # limit.
    assert [row["train/optimizer_steps"] for row in limited.metrics] == [2, 2]


def test_all_ranks_stop_at_the_same_step(rank_runs: RankRuns) -> None:
    """Two data-parallel ranks reach limit and end together, or one would hang."""
    run = rank_runs.train(
        "stopped-ranks", *armed(1e-9), "training.max_update_kl=1e-12", "algorithm.minibatches=2",
        "algorithm.epochs=2", "rollout.service=in_process", "cluster.collective_timeout_s=60",
    )  # fmt: skip
    assert run.code == 0, run.said
    assert (run.result["status"], run.result["steps"]) == ("early_stopped", 2)
    assert [row["train/optimizer_steps"] for row in run.rows] == [2, 2]
    assert [len(run.lines(text)) for text in (ARMED, TRIPPED)] == [1, 1]


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file but logs and the lock."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.parent.name != "logs"
    }
