"""The commands of pages, given as they are printed in a new folder; runs are one step long."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workspace import ROOT

from rlcore.runs.metrics import read_metrics
from tests.pages import blocks

README = ROOT / "README.md"
TORCHRUN = "python -m rlcore.launch.torchrun"
# what is less than the pages take
SMALLER = "training.steps=1 run.threads=1 checkpoint.export_hf=false"
OF_GRPO = f"{SMALLER} rollout.prompts_per_step=2 rollout.samples_per_prompt=2"


def shown(page: Path, heading: str) -> list[str]:
    """The command lines of a section, without comments."""
    text = page.read_text(encoding="utf-8")
    first = text[: text.index(f"## {heading}\n")].count("\n")
    last = first + text[text.index(f"## {heading}\n") + 3 :].partition("\n## ")[0].count("\n")
    return [
        re.sub(r"  +#.*", "", line)
        for block in blocks(page)
        if block.language == "shell" and first < block.line <= last + 1
        for line in block.text.splitlines()
    ]


def follow(folder: Path, lines: list[str], *pages: Path, smaller: str) -> None:
    """Save the files of the README and of `pages`, and run the lines, shortened."""
    for page in (README, *pages):
        for block in blocks(page):
            if block.name is not None:
                (folder / block.name).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.name).write_text(block.text)
    script = [
        "set -e",
        f'rlcore() {{ "{sys.executable}" -m rlcore "$@"; }}',
        *(f"{line} {smaller}" if " train " in line else line for line in lines),
    ]
    bin_folder = Path(sys.executable).parent
    ended = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}:{ROOT}",  # as if rlcore were installed
        },
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_readmes_task(tmp_path: Path) -> None:
    lines = shown(README, "A task of your own")[1:]
    assert [line.split()[1] for line in lines] == [
        "PYTHONPATH=$PWD",
        "init-model",
        "doctor",
        "validate",
        "train",
    ]
    lines[0] = lines[0].replace("$PWD", f"$PWD:{ROOT}")
    follow(tmp_path, lines, smaller="training.steps=2")
    rows = read_metrics(tmp_path / "runs" / "repeat" / "metrics.jsonl")
    assert rows[-1]["step"] == 2
    assert rows[-1]["rollout/reward_errors"] == 0
    assert (tmp_path / "runs" / "repeat" / "hf" / "config.json").is_file()


def test_the_calculator_of_the_page_on_workflows(tmp_path: Path) -> None:
    page = ROOT / "docs" / "workflows.md"
    lines = [line for line in shown(page, "An environment with tools") if "run.sh" not in line]
    assert [line.split()[0] for line in lines] == ["export", "rlcore", "python", "rlcore"]
    lines[0] = lines[0].replace("$PWD", f"$PWD:{ROOT}")
    follow(tmp_path, ["rlcore init-model tiny", *lines], page, smaller=OF_GRPO)
    [row] = read_metrics(tmp_path / "runs" / "repeat" / "metrics.jsonl")
    assert row["step"] == 1
    assert row["conversation/turns"] >= 1
    assert row["rollout/reward_errors"] == 0


def test_calls_of_tools_on_the_page_on_fine_tuning(tmp_path: Path) -> None:
    page = ROOT / "docs" / "sft.md"
    lines = shown(page, "Calls of tools")
    assert [line.split()[1] for line in lines] == ["init-model", "tool_rows.py", "data", "train"]
    follow(tmp_path, lines, page, ROOT / "docs" / "workflows.md",
           smaller=f"{SMALLER} training.batch_size=8")  # fmt: skip
    [row] = read_metrics(tmp_path / "runs" / "calls-sft" / "metrics.jsonl")
    assert row["step"] == 1


@pytest.mark.parametrize("started", [pytest.param(TORCHRUN, marks=pytest.mark.full), "torchrun"])
def test_torchrun_on_one_machine(tmp_path: Path, started: str) -> None:
    page = ROOT / "docs" / "multinode.md"
    [line] = [one for one in shown(page, "torchrun") if "--standalone" in one]
    assert line.startswith(TORCHRUN)
    line = line.replace(TORCHRUN, started)
    prepare = ["python repeat_task.py", "rlcore init-model tiny"]
    follow(tmp_path, [*prepare, line], page, smaller=OF_GRPO)
    rows = read_metrics(tmp_path / "runs" / "repeat" / "metrics.jsonl")
    assert rows[-1]["step"] == 1
    assert (tmp_path / "runs" / "repeat" / "logs" / "rank_1.log").is_file()
