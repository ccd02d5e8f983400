"""Whole runs on SGLang: a server given by URL, and one that the run starts itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from server_kit import START_S, Served

from rlcore.data.tokenizer import load_tokenizer
from rollout.engines.factories import ADMIN_KEY, API_KEY
from tests.integration.accounting_checks import check_accounting, samples_of
from tests.integration.workspace import LEARNING, Run, Workspace
from tests.timeline_checks import check_timeline

GAP = "rollout/train_rollout_logprob_diff"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Workspace]:
    yield Workspace(tmp_path_factory.mktemp("workspace"), tiny_model)
    torch.set_num_threads(1)


@pytest.fixture
def by_url(served: Served, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Overrides that make a run use the session's server."""
    monkeypatch.setenv(API_KEY, served.keys.api)
    monkeypatch.setenv(ADMIN_KEY, served.keys.admin)
    return (
        "rollout.engine.kind=sglang",
        f"rollout.engine.urls=[{served.url}]",
        "rollout.engine.start_timeout_s=60",
    )


def check_ends(run: Run, model: Path, *, steps: int) -> None:
    """A response that stopped holds one eos, its last token; any other none."""
    eos = load_tokenizer(model).eos_token_id
    samples = [sample for step in range(1, steps + 1) for sample in samples_of(run, step)]
    for sample in samples:
        response = sample.tokens[sample.loss_mask == 1].tolist()
        assert response.count(eos) == (sample.finish_reason == "stop")
        assert (response[-1] == eos) == (sample.finish_reason == "stop")
        assert sample.finish_reason == "stop" or len(response) == 6
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}


@pytest.mark.everyday
def test_a_run_on_a_server_given_by_url(workspace: Workspace, by_url: tuple[str, ...]) -> None:
    """Trained, evaluated, resumed, scored; the server outlives them all."""
    given = (
        *LEARNING,
        *by_url,
        workspace.heldout,
        "evaluation.max_prompts=8",
        "evaluation.every=2",
        "evaluation.sets.sampled={max_prompts: 2, samples_per_prompt: 4, k: [1, 4],"
        " temperature: 1, top_p: 0.9,"
        f" paths: {workspace.folder / 'data' / 'heldout.jsonl'},"
        " reward: {parts: {exact: {function: exact_match}}}}",
        "checkpoint.every=1",
    )
    run = workspace.train("by url", *given, "training.steps=3")
    assert run.code == 0, run.err
    assert all(
        row[GAP] < 1e-5 and row["rollout/staleness_max"] == 0 for row in run.metrics if row["step"]
    )
    assert {f"{GAP}_max", f"{GAP}_kl", "time/engine", "time/publish"} < set(run.rows[1])
    assert [step for step, row in run.rows.items() if "eval/score" in row] == [0, 2, 3]
    assert run.rows[0]["eval/sampled/pass@1"] <= run.rows[0]["eval/sampled/pass@4"]
    check_accounting(run, steps=3)
    check_ends(run, workspace.model, steps=3)
    check_timeline(run.folder, run.rows, lockstep=True)

    resumed = workspace.train("by url", *given, "training.steps=4", "--resume")
    assert resumed.code == 0, resumed.err
    assert resumed.rows[4][GAP] < 1e-5
    check_accounting(resumed, steps=4)

    done = workspace.command(
        "eval", str(workspace.base), "run.name=scored", *given, "--model", str(run.folder / "hf")
    )
    assert done.code == 0, done.err
    score = float(done.lines("eval/score")[0].split()[1])
    assert score == pytest.approx(resumed.rows[4]["eval/score"], rel=1e-5)


def test_the_tokens_that_top_p_left_reach_the_trainer(
    workspace: Workspace, by_url: tuple[str, ...]
) -> None:
    """Engine and trainer normalize log-probs over the same sampling masks."""
    run = workspace.train(
        "keep-sets",
        *by_url,
        "rollout.sampling={top_p: 0.8, top_k: 12}",
        "policy.logprobs.keep_sets=true",
        "training.steps=1",
    )
    assert run.code == 0, run.err
    assert run.rows[1][GAP] < 1e-5
    sets = [sample.sampling_mask for sample in samples_of(run, 1)]
    assert all(one is not None and 0 < one.counts.max(initial=0) <= 12 for one in sets)


def test_a_run_with_another_key_is_refused(
    workspace: Workspace, by_url: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "wrong-key-of-this-test")
    run = workspace.train("wrong key", *by_url)
    assert run.code == 2
    assert API_KEY in run.err
    assert "wrong-key-of-this-test" not in run.err


def test_two_ranks_and_a_server_of_their_own(workspace: Workspace, tmp_path: Path) -> None:
    """With tensor parallelism: no server process is left behind, and the key is in no file."""
    name = "managed"
    secret = "secret-of-this-test"
    model = tmp_path / "model"
    shutil.copytree(workspace.model, model)
    command = [
        sys.executable,
        "-m",
        "rlcore",
        "train",
        str(workspace.base),
        f"run.name={name}",
        f"model.path={model}",
        *LEARNING,
        "training.steps=2",
        "policy.parallel.tensor=2",
        "cluster.processes_per_node=2",
        "checkpoint.every=1",
        f"cluster.start_timeout_s={START_S}",
        "rollout.engine={kind: sglang, threads: 1, device: cpu}",
    ]
    environment = {**os.environ, API_KEY: secret, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "terminal").open("w") as terminal:
        code = subprocess.run(
            command, env=environment, stdout=terminal, stderr=terminal, timeout=START_S + 180
        ).returncode
    said = (tmp_path / "terminal").read_text()
    assert code == 0, said
    run = Run(code, said, "", workspace.folder / "runs" / name)
    assert all(row[GAP] < 1e-5 for row in run.metrics)
    check_accounting(run, steps=2)
    # It read no weights: all that it computes with was published.
    log = (run.folder / "logs" / "engine_0.log").read_text()
    assert "'load_format': 'dummy'" in log
    assert all(
        secret.encode() not in path.read_bytes() for path in run.folder.rglob("*") if path.is_file()
    )
    assert secret not in said
    running = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    assert not [line for line in running if str(model) in line]
