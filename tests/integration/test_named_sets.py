"""Two named sets of held-out prompts through the real commands: train, resume, eval, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workspace import LEARNING, Run, Workspace

from rlcore.algorithms import metric_spec
from rlcore.runs.checkpoints import committed_steps, read_best

SAMPLES = "samples_per_prompt: 4, temperature: 1.0, top_p: 0.95, every: 2, k: [1, 2, 4]"
JUDGED = "reward: {parts: {exact: {function: exact_match}}}"


def arguments(workspace: Workspace) -> tuple[str, ...]:
    """One greedy set with the run's reward, and one of four samples with a verdict."""
    paths = f"paths: {workspace.folder / 'data' / 'heldout.jsonl'}, max_prompts: 4"
    return (
        *LEARNING,
        "checkpoint={keep: 1, best: {metric: eval/greedy/score}}",
        f"evaluation.sets.greedy={{{paths}, every: 1, k: [1]}}",
        f"evaluation.sets.sampled={{{paths}, {SAMPLES}, {JUDGED}}}",
        "tracking.show_samples=1",
    )


def evaluations(run: Run) -> dict[int, dict[str, Any]]:
    return {
        step: {name: value for name, value in row.items() if name.startswith("eval/")}
        for step, row in run.rows.items()
    }


@pytest.fixture(scope="module")
def trained(workspace: Workspace) -> Run:
    run = workspace.train("named", *arguments(workspace), "training.steps=5")
    assert run.code == 0, run.err
    return run


@pytest.mark.everyday
def test_each_set_is_scored_when_it_is_due(trained: Run) -> None:
    rows = evaluations(trained)
    assert [step for step, row in rows.items() if "eval/greedy/score" in row] == [0, 1, 2, 3, 4, 5]
    assert [step for step, row in rows.items() if "eval/sampled/pass@4" in row] == [0, 2, 4, 5]
    for step in (0, 2, 4, 5):
        row = rows[step]
        assert row["eval/sampled/pass@1"] == row["eval/sampled/avg@4"]
        assert (
            row["eval/sampled/pass@1"] <= row["eval/sampled/pass@2"] <= row["eval/sampled/pass@4"]
        )
        assert "eval/sampled/maj@4" in row
        assert 0 <= row["eval/sampled/pass@4_low"] < row["eval/sampled/pass@4_high"] <= 1
        assert "eval/greedy/accuracy" not in row, "a reward model says nothing of right or wrong"
    assert all(metric_spec(name) for row in rows.values() for name in row)
    assert len(trained.lines("held-out sample (greedy) of step 0: ")) == 1
    assert len(trained.lines("held-out sample (sampled) of step 4: ")) == 1
    assert "| eval greedy " in trained.lines("step 5/5 ")[0]
    assert trained.lines("eval greedy score")


def test_the_best_checkpoint_is_kept_and_exported(
    workspace: Workspace, trained: Run, tmp_path: Path
) -> None:
    scores = {step: row["eval/greedy/score"] for step, row in trained.rows.items() if step > 0}
    step = max(scores, key=lambda step: scores[step])
    best = read_best(trained.folder / "checkpoints")
    assert best is not None
    assert (best.step, best.value) == (step, scores[step])
    assert committed_steps(trained.folder / "checkpoints") == sorted({step, 5})
    assert trained.result["best"]["step"] == step
    done = workspace.command("export", str(trained.folder), str(tmp_path / "best"), "--best")
    assert done.code == 0, done.err
    for file in (tmp_path / "best").iterdir():
        assert file.read_bytes() == (trained.folder / "hf_best" / file.name).read_bytes()


def test_one_set_of_a_chosen_checkpoint_is_scored_as_in_the_run(
    workspace: Workspace, trained: Run, tmp_path: Path
) -> None:
    best = read_best(trained.folder / "checkpoints")
    assert best is not None
    output = tmp_path / "scores.json"
    command = ("eval", str(trained.folder / "config.yaml"), "--output", str(output))
    for checkpoint, name, step in (
        (f"{trained.folder}@best", "greedy", best.step),
        (trained.folder / "hf_best", "greedy", best.step),
        (f"{trained.folder}@5", "sampled", 5),
    ):
        done = workspace.command(*command, "--checkpoint", str(checkpoint), "--set", name)
        assert done.code == 0, done.err
        found = json.loads(output.read_text())
        answers = found.pop("answers")
        assert found.pop("samples") == len(answers) == (4 if name == "greedy" else 16)
        assert {answer["set"] for answer in answers} == {name}
        scores = [answer["score"] for answer in answers]
        assert np.mean(scores) == pytest.approx(found[f"eval/{name}/score"])
        assert all(answer["prompt"] and answer["row"] and answer["parts"] for answer in answers)
        assert {answer["branches"] for answer in answers} == {1}
        right = [answer["verdict"] == "right" for answer in answers if answer["verdict"]]
        if f"eval/{name}/accuracy" in found:
            assert np.mean(right) == pytest.approx(found[f"eval/{name}/accuracy"])
        logged = evaluations(trained)[step]
        assert found == {key: logged[key] for key in logged if f"/{name}/" in key}


def test_a_resumed_run_has_the_same_evaluations_and_the_same_best(
    workspace: Workspace, trained: Run
) -> None:
    """With checkpoints that are written in the background, too."""
    given = (*arguments(workspace), "checkpoint.async_save=true")
    assert workspace.train("named again", *given, "training.steps=2").code == 0
    again = workspace.train("named again", *given, "training.steps=5", "--resume")
    assert again.code == 0, again.err
    assert evaluations(again) == evaluations(trained)
    assert read_best(again.folder / "checkpoints") == read_best(trained.folder / "checkpoints")
    assert again.result["best"] == trained.result["best"]


def test_evaluation_can_be_switched_off(workspace: Workspace) -> None:
    off = ("checkpoint.best=null", "evaluation=null", "training.steps=1")
    run = workspace.train("not evaluated", *arguments(workspace), *off)
    assert run.code == 0, run.err
    assert list(evaluations(run)) == [1]
    assert evaluations(run)[1] == {}
