"""scripts/debug.sh: a recipe for many GPUs as one process, under Python's debugger."""

from __future__ import annotations

import os
import subprocess
import sys

from workspace import ROOT, Workspace

from rlcore.runs.metrics import read_metrics

RANK = ROOT / "rlcore" / "launch" / "rank.py"
# TP 2 x CP 2 on 8 GPUs, engines on others
RECIPE = ROOT / "examples" / "recipes" / "qwen2.5-7b-grpo-2nodes.yaml"


def test_a_recipe_runs_in_one_process_under_the_debugger(workspace: Workspace) -> None:
    smaller = [
        f"model.path={workspace.model}", f"data.paths={workspace.folder / 'data' / 'train.jsonl'}",
        "data.label_key=label", "rollout.sampling.max_new_tokens=4", "rollout.filters=[]",
        "reward.parts={correct: {function: exact_match}}", "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2", "training.steps=1", "checkpoint.export_hf=false",
        f"run.dir={workspace.folder / 'runs'}", "run.name=debugged",
    ]  # fmt: skip
    place = [line.strip() for line in RANK.read_text().splitlines()].index(
        "objective, credit = build_algorithm(config)"
    ) + 1
    done = subprocess.run(
        [str(ROOT / "scripts" / "debug.sh"), "--pdb", str(RECIPE), *smaller],
        input=f"tbreak {RANK}:{place}\ncontinue\nprint(process.sync.world_size)\ncontinue\nquit\n",
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=150,
    )  # fmt: skip
    assert f"> {RANK}({place})run_rank()" in done.stdout, done.stdout + done.stderr
    assert "1 cpu rank" in done.stdout
    assert [
        row["step"]
        for row in read_metrics(workspace.folder / "runs" / "debugged" / "metrics.jsonl")
    ] == [1]
