"""The commands of docs/gsm8k.md, shortened: data, a chat model, warm-up, GRPO with `math`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workspace import ROOT, Run, Workspace

from rlcore.runs.rollouts import read_rollouts
from tests.pages import commands

FOLDER = ROOT / "examples" / "word_problems"
PAGE = ROOT / "docs" / "gsm8k.md"
# less of everything than the page takes
SMALLER = {
    "init-model": ["--hidden=64", "--layers=2", "--intermediate=128"],
    "sft": ["training.steps=90", "training.batch_size=32", "run.threads=1"],
    "grpo": ["training.steps=2", "rollout.prompts_per_step=8", "evaluation.max_prompts=16",
             "run.threads=1"],
}  # fmt: skip


def lines_of_the_page(start: str) -> list[list[str]]:
    """The words of the page's commands that begin like this."""
    return [words for _, words in commands(PAGE, start)]


def test_the_page_has_the_commands_that_are_tested() -> None:
    assert len(lines_of_the_page("rlcore init-model")) == 1
    assert len(lines_of_the_page("python examples/word_problems/make_data.py")) == 1
    assert len(lines_of_the_page("rlcore train examples/word_problems")) == 2


@pytest.fixture(scope="module")
def made(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the first commands of the page have been given."""
    folder = tmp_path_factory.mktemp("word_problems")
    (folder / "examples").symlink_to(ROOT / "examples")
    [[_, *arguments]] = lines_of_the_page("python examples/word_problems/make_data.py")
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        [[_, *arguments]] = lines_of_the_page("rlcore init-model")
        assert workspace.command(*arguments, *SMALLER["init-model"]).code == 0
    return folder


def test_rows_have_the_shape_of_gsm8k_and_no_test_problem_is_trained_on(made: Path) -> None:
    asked = {}
    for name in ("train", "test", "warmup"):
        lines = (made / f"build/word_problems/data/{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        asked[name] = {row["question"] for row in rows}
        right = 0
        for row in rows:
            assert row.keys() == {"question", "answer"}
            shown = re.fullmatch(r"(\d([+-])\d)=<<\1=(\d+)>>\3\n#### \3", row["answer"])
            assert shown, row["answer"]
            a, b = map(int, re.findall(r"\d", row["question"]))
            right += int(shown[3]) == (a + b if shown[2] == "+" else a - b)
        assert (right == len(rows)) is (name != "warmup")
    assert not asked["test"] & (asked["train"] | asked["warmup"])


def test_the_page_shortened(
    workspace: Workspace, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    warmup, grpo = lines_of_the_page("rlcore train examples/word_problems")
    [shown] = lines_of_the_page("rlcore data examples/word_problems")
    data = workspace.command(*shown[1:])
    assert data.code == 0, data.err
    assert "format openai, prompt in 'question', label in 'answer'" in data.out
    assert re.search(r"^reward   1 for the label behind ####: '#### \d+'", data.out, re.MULTILINE)
    assert "<|im_start|>assistant" in data.out
    fitted = run(workspace, made, "word-problems-warmup", *warmup[1:], *SMALLER["sft"])
    losses = [row["objective/loss"] for row in fitted.metrics if "objective/loss" in row]
    assert losses[-1] < losses[0] / 5
    trained = run(workspace, made, "word-problems", *grpo[1:], *SMALLER["grpo"])
    assert max(trained.rows) == 2
    assert trained.rows[2]["rollout/reward_errors"] == 0
    assert 0 <= trained.rows[2]["eval/accuracy"] <= 1
    for sample in read_rollouts(trained.rollouts(2)):
        assert sample["prompt_text"].startswith("<|im_start|>user\n")
        assert sample["metadata"]["correct"] is (sample["reward"] == 1.0)


def run(workspace: Workspace, folder: Path, name: str, *arguments: str) -> Run:
    done = workspace.command(*arguments)
    assert done.code == 0, done.err
    return Run(done.code, done.out, done.err, folder / "runs" / name)
