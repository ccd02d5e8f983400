"""`rlcore reward-model`: real ranks serve a real run, and end as they are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from workspace import ROOT, Workspace

from rlcore.data.tokenizer import load_tokenizer
from rlcore.runs.rollouts import read_rollouts

START_S = 150.0
END_S = 40.0
TWO_RANKS = ("policy.parallel.tensor=2", "cluster.processes_per_node=2")


@dataclass
class RewardModelServer:
    process: subprocess.Popen[bytes]
    urls_file: Path
    log: Path

    @property
    def url(self) -> str:
        [url] = json.loads(self.urls_file.read_text())
        return str(url)

    @property
    def ranks(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return sorted(children, key=lambda child: int(child.environ()["RANK"]))

    def ended(self) -> int:
        return self.process.wait(END_S)


@contextmanager
def reward_model(workspace: Workspace, folder: Path, *settings: str) -> Iterator[RewardModelServer]:
    urls_file = folder / "urls.json"
    log = folder / "server.log"
    command = [
        *(sys.executable, "-m", "rlcore", "reward-model", f"model.path={workspace.reward_model}"),
        *(f"model.tokenizer={workspace.model}", "model.dtype=fp32", f"run.dir={folder}"),
        *("run.threads=1", *settings, "--port", "0", "--urls-file", str(urls_file)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    server = RewardModelServer(process, urls_file, log)
    try:
        deadline = time.monotonic() + START_S
        while not urls_file.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(END_S)


def by_transformers(workspace: Workspace) -> Callable[[str], float]:
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(workspace.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        workspace.reward_model, dtype=torch.float32
    )

    def score(text: str) -> float:
        ids = torch.tensor(tokenizer(text)["input_ids"])[None]
        with torch.inference_mode():
            return float(model(input_ids=ids, use_cache=False).logits[0, 0])

    return score


def service(url: str, **keys: Any) -> str:
    return json.dumps({"url": url, "format": "sglang", "batch_size": 4, **keys})


def test_a_run_is_scored_by_a_reward_model_on_two_ranks(
    workspace: Workspace, tmp_path: Path
) -> None:
    with reward_model(workspace, tmp_path, *TWO_RANKS) as server:
        run = workspace.train(
            "scored-by-megatron", "training.steps=2", "reward.parts.liked.model=null",
            f"reward.parts.liked.service={service(server.url)}",
            f"reward.parts.chat.service={service(server.url, tokenizer=str(workspace.model))}",
        )  # fmt: skip
        assert run.code == 0, run.err
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0, server.log.read_text()
    assert not server.urls_file.exists()
    assert "rlcore train ... reward.parts.NAME.service.url=http://127.0.0.1:" in (
        server.log.read_text()
    )
    score = by_transformers(workspace)
    tokenizer = load_tokenizer(workspace.model)
    samples = [one for step in (1, 2) for one in read_rollouts(run.rollouts(step))]
    assert len({sample["reward"] for sample in samples}) > 8
    for sample in samples:
        plain = score(sample["prompt_text"] + sample["response_text"])
        chat = tokenizer.apply_chat_template(
            [
                {"role": "user", "content": sample["prompt_text"]},
                {"role": "assistant", "content": sample["response_text"]},
            ],
            tokenize=False,
        )
        want = {"liked": plain, "chat": score(chat)}
        assert sample["reward_parts"] == pytest.approx(want, abs=1e-5)
    assert run.rows[2]["rollout/reward_errors"] == 0


def test_the_end_of_a_rank_ends_the_server(workspace: Workspace, tmp_path: Path) -> None:
    with reward_model(workspace, tmp_path, *TWO_RANKS) as server:
        ranks = server.ranks
        ranks[1].kill()
        assert server.ended() == 1
    assert "rank 1 failed: it was killed by SIGKILL" in server.log.read_text()
    assert not any(rank.is_running() for rank in ranks)


def test_one_process_ends_on_ctrl_c(workspace: Workspace, tmp_path: Path) -> None:
    with reward_model(workspace, tmp_path) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == 0, server.log.read_text()
