"""An environment of `verifiers`, in its own interpreter, plays the rollouts of a real run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from workspace import ROOT, Workspace

from rlcore.runs.rollouts import read_rollouts
from rollout.workflows.verifiers_env import PYTHON

RUNNER = ROOT / "rollout" / "workflows" / "verifiers_runner.py"
ENV = {"taskset": {"id": "verifiers_words"}, "agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The rows of the toy taskset; programs find it, and none of our packages."""
    assert PYTHON.exists(), "run scripts/install_verifiers.sh"
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "integration"))
    path = tmp_path / "rows.jsonl"
    command = [str(PYTHON), str(RUNNER), "rows", json.dumps(ENV), "2"]
    path.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return path


def test_a_taskset_is_trained_on(workspace: Workspace, rows: Path) -> None:
    given = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["verifiers"]["word"] for row in given] == ["ab", "ba"]
    assert given[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    model = workspace.chat_model()
    run = workspace.command(
        "train", f"run.dir={workspace.folder / 'runs'}", "run.name=words", "run.threads=1",
        f"model.path={model}", "model.dtype=fp32", f"data.paths={rows}",
        "policy.max_tokens_per_microbatch=1024", "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2", "rollout.sampling.max_new_tokens=4",
        f"rollout.workflow={json.dumps({'name': 'verifiers', 'env': ENV, 'history': 'keep'})}",
        "reward.parts={said: {source: workflow}, length: {source: workflow, weight: 0.1}}",
        "training.steps=1", name="words",
    )  # fmt: skip
    assert run.code == 0, run.err
    samples = list(read_rollouts(run.rollouts(1)))
    assert len(samples) == 4
    for sample in samples:
        assert sample["turns"] == 2, "the program asks whole, then streaming"
        roles = [message["role"] for message in sample["messages"]]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        last = sample["messages"][-1]["content"]
        word = sample["metadata"]["verifiers"]["word"]
        assert sample["reward_parts"] == {"said": float(word in last), "length": len(last)}


def test_an_episode_that_fails_fails_the_rollout(rows: Path) -> None:
    """Nobody listens at the URL: no reward may be made of that."""
    row = {**json.loads(rows.read_text().splitlines()[0]), "verifiers_env": ENV}
    endpoint = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [str(PYTHON), str(RUNNER), "run"], input=json.dumps({"row": row}),
        env={**os.environ, **endpoint, "OPENAI_MODEL": "policy"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "the episode failed: " in done.stderr
