"""Secrets planted wherever a user may put one are in nothing that a run leaves or shows."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from tests.integration.json_server import answering
from tests.integration.workspace import Workspace

MARK = "planted"
STEPS = 2
RUN_S = 400.0
# of the shell that starts the run; none may reach a child that is not the run itself
SHELL = {
    "WANDB_API_KEY": f"{MARK}-tracker-key",
    "HF_TOKEN": f"{MARK}-hub-token",
    "GITHUB_PAT": f"{MARK}-git-pat",
    "RLCORE_ENGINE_API_KEY": f"{MARK}-engine-key-000",
    "RLCORE_ENGINE_ADMIN_KEY": f"{MARK}-admin-key-0000",
    "RAY_AUTH_TOKEN": f"{MARK}-ray-token",
    "AWS_SECRET_ACCESS_KEY": f"{MARK}-cloud-key",
    "HTTPS_PROXY": f"http://user:{MARK}-proxy@127.0.0.1:9",
}
JUDGE = {"JUDGE_LOGIN": f"{MARK}-judge-login"}
GIVEN = {"AGENT_API_KEY": f"{MARK}-agent-login"}
AGENT = """
import json, os, sys, urllib.request

row = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": row["messages"]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
with urllib.request.urlopen(request) as answer:
    text = json.load(answer)["choices"][0]["message"]["content"] or ""
if hash(text) % 3 == 0:
    print(sys.argv, os.environ.get("AGENT_API_KEY"), file=sys.stderr)
    sys.exit(1)
print(len(text))
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of rewards that fails half of the time, and quotes what it was asked with."""
    calls = count(1)

    def answer(path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
        if next(calls) % 2:
            return 400, f"{path} {headers.get('Authorization')}"
        if "chat/completions" in path:
            return 200, {"choices": [{"message": {"content": "[[5]]"}}]}
        return 200, {"score": 1.0}

    with answering(answer) as url:
        yield url


@dataclass
class Seen:
    """What `ps` and /proc show of a run's processes, by their number."""

    commands: dict[int, list[str]] = field(default_factory=dict)
    variables: dict[int, dict[str, str]] = field(default_factory=dict)

    def look(self, pid: int) -> None:
        for process in psutil.Process(pid).children(recursive=True):
            try:
                command = process.cmdline()
                variables = process.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            # between fork and exec a child shows its parent's
            if command:
                self.commands[process.pid] = command
                self.variables[process.pid] = variables

    def of(self, words: str) -> list[dict[str, str]]:
        """The variables of every process whose command line has these words."""
        return [
            self.variables[pid]
            for pid, command in self.commands.items()
            if words in " ".join(command)
        ]


@dataclass
class Left:
    """What a run left and showed."""

    folder: Path
    printed: bytes
    seen: Seen


def settings(workspace: Workspace, model: Path, agent: Path, url: str) -> dict[str, Any]:
    secret_url = (
        f"http://user:{MARK}-password@{url.removeprefix('http://')}/hooks/{MARK}9a8b7c6d5e4f/"
        f"?api_key={MARK}-parameter&sig={MARK}-signature"
    )
    extra_body = {
        "authorization": f"Bearer {MARK}-header",
        "nested": [{"client_secret": f"{MARK}-nested"}, f"--token={MARK}-word"],
    }
    judge = {"url": url, "model": "m", "api_key_env": "JUDGE_LOGIN"}
    judge |= {"extra_body": extra_body}
    return {
        "run": {"name": "planted", "dir": str(workspace.folder / "runs"), "threads": 1},
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"paths": str(workspace.folder / "data" / "train.jsonl"), "as_chat": True},
        "policy": {"optimizer": {"lr": 1e-3}, "max_tokens_per_microbatch": 512},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "max_failed": 1.0,
            "sampling": {"max_new_tokens": 6},
            "engine": {"environment": {"PLAIN_NAME": f"{MARK}0a1b2c3d4e5f", "NCCL_DEBUG": "WARN"}},
            "workflow": {
                "name": "agent",
                "command": [sys.executable, str(agent), "--api-key", f"{MARK}-argument"],
                "environment": [*GIVEN],
            },
        },
        "reward": {
            "workers": 1,
            "max_failed": 1.0,
            "on_error": 0.0,
            "parts": {
                "asked": {"service": {"url": secret_url, "retries": 0}},
                "judged": {"judge": {**judge, "retries": 0}},
                "own": {"function": "tests.integration.resume_rewards:share_of_digits"},
            },
        },
        "training": {"steps": STEPS},
        "tracking": {
            "wandb": {"enabled": True, "mode": "offline"},
            "tensorboard": True,
            "show_samples": 2,
            "show_every": 1,
        },
    }


@pytest.fixture(scope="module")
def left(workspace: Workspace, url: str, tmp_path_factory: pytest.TempPathFactory) -> Left:
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp(MARK[:5])
    model = folder / "model"
    done = workspace.command("init-model", str(model), "--preset=ascii", "--chat")
    assert done.code == 0, done.err
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings(workspace, model, agent, url)))
    places = {
        name: str(folder / name.lower())
        for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")
    }
    environment = {**os.environ, **SHELL, **JUDGE, **GIVEN, **places, "WANDB_DISABLE_GIT": "true"}
    seen = Seen()
    rlcore = [sys.executable, "-m", "rlcore"]
    with (folder / "printed").open("w+b") as printed:
        both: dict[str, Any] = {"stdout": printed, "stderr": printed, "env": environment}
        for words in (["validate", str(config)], ["train", str(config)]):
            process = subprocess.Popen(
                [*rlcore, *words], env=environment, stdout=printed, stderr=printed
            )
            deadline = time.monotonic() + RUN_S
            while process.poll() is None:
                assert time.monotonic() < deadline
                seen.look(process.pid)
                time.sleep(0.1)
            assert process.returncode == 0, (folder / "printed").read_text()[-3000:]
        run = workspace.folder / "runs" / "planted"
        page = [*rlcore, "view", str(run), "--export", str(run / "page.html")]
        subprocess.run(page, check=True, **both)
        printed.seek(0)
        return Left(run, printed.read(), seen)


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield what each file says; tables decompressed, wandb's folder beside the run's too."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "hf" not in path.relative_to(folder).parts:
            yield path, path.read_bytes()
            if path.suffix == ".parquet":
                yield path, json.dumps(pq.read_table(path).to_pylist(), default=repr).encode()


def secrets_in(content: bytes) -> bool:
    marks = [f"{MARK}-", f"{MARK}9a8b7c6d5e4f", f"{MARK}0a1b2c3d4e5f"]
    login = base64.b64encode(f"user:{MARK}-password".encode())
    return any(mark in content for mark in (login, *map(str.encode, marks)))


def test_no_file_of_the_run_has_a_secret(left: Left) -> None:
    assert not {str(path) for path, content in contents(left.folder) if secrets_in(content)}
    tables = [content for path, content in contents(left.folder) if path.suffix == ".parquet"]
    assert any(b"answered 400" in content for content in tables), "failures were recorded"
    logs = b"".join(content for path, content in contents(left.folder) if path.suffix == ".log")
    assert b"--api-key" in logs, "a failed agent was quoted"
    assert (left.folder / "wandb").is_dir()
    assert (left.folder / "tensorboard").is_dir()


def test_nothing_printed_has_a_secret(left: Left) -> None:
    assert not secrets_in(left.printed)
    assert b"(masked)" in left.printed


def test_no_command_line_has_a_secret(left: Left) -> None:
    """An agent's own arguments are what its user has written."""
    shown = [words for words in left.seen.commands.values() if MARK + "-" in " ".join(words)]
    assert all(words[-2:] == ["--api-key", f"{MARK}-argument"] for words in shown)


def test_children_get_their_variables_by_list(left: Left) -> None:
    planted = {**SHELL, **JUDGE, **GIVEN}
    agents = left.seen.of("agent.py")
    engines = left.seen.of("rollout.engines.embedded.server")
    workers = left.seen.of("rollout.rewards.worker")
    [service] = left.seen.of("rlcore.launch.service.child")
    for group, allowed in ((agents, {*GIVEN}), (engines, set()), (workers, set())):
        assert group
        for variables in group:
            assert planted.keys() & variables.keys() <= allowed
            assert set(variables.values()).isdisjoint(
                value for name, value in planted.items() if name not in allowed
            )
            assert "PATH" in variables
    assert all(GIVEN.items() <= variables.items() for variables in agents)
    assert {"WANDB_API_KEY", "RAY_AUTH_TOKEN"}.isdisjoint(service)
    known = (
        "agent.py",
        "embedded.server",
        "rewards.worker",
        "service.child",
        "wandb",
        "rlcore train",
    )
    strangers = {
        pid: left.seen.commands[pid]
        for pid, variables in left.seen.variables.items()
        if planted.keys() & variables.keys()
        and not any(words in " ".join(left.seen.commands[pid]) for words in known)
    }
    assert not strangers, "a child that the list of children does not have"
