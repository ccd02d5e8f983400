"""Agent programs: how they are run, ended and refused."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import pytest

from rlcore.errors import ConfigError, RolloutFailed
from tests.unit.rollout.conversation.kit import ScriptedModel, make_prompt, make_tokenizer
from tests.unit.rollout.gateway.agents import build, by_turn, client, make_task, play

HERE = __name__


def nothing(task: Any) -> None:
    """Takes no endpoint."""


def with_options(task: Any, endpoint: Any, *, depth: int) -> None:
    """Takes an option."""


async def ask(task: Any, endpoint: Any) -> Any:
    async with client(endpoint) as openai:
        return await openai.chat.completions.create(model="policy", messages=task.messages)


def giving(outcome: Any) -> Any:
    async def run(task: Any, endpoint: Any) -> Any:
        await ask(task, endpoint)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return run


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (KeyError("door"), r"KeyError: 'door' \(.*in"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "was cancelled from within"),
        ("good", "'reward' is no finite number"),
        (float("nan"), "no finite number"),
        ({"right": 1.0, "why": None}, "'why' is no finite number"),
    ],
)
def test_a_program_that_fails_fails_its_rollout(outcome: Any, said: str) -> None:
    with pytest.raises(RolloutFailed, match=said):
        play(giving(outcome), by_turn("3"))


def test_outcomes_may_be_numbers_of_numpy() -> None:
    outcome = MappingProxyType({"right": np.float32(0.5), "steps": np.int64(2)})
    (sample,), _ = play(giving(outcome), by_turn("3"))
    assert sample.outcome == {"right": 0.5, "steps": 2.0}
    (sample,), _ = play(giving(np.float32(0.5)), by_turn("3"))
    assert sample.outcome == {"reward": 0.5}


def test_so_does_one_in_a_thread() -> None:
    def run(task: Any, endpoint: Any) -> None:
        sys.exit("enough")

    with pytest.raises(RolloutFailed, match="SystemExit: enough"):
        play(run, by_turn("3"))


async def spoils(task: Any, endpoint: Any, *, seen: list[int]) -> float:
    await ask(task, endpoint)
    seen.append(task.row["level"].pop())
    task.messages[0]["content"] = "spoiled"
    return len(seen)


def test_a_program_changes_nothing_of_the_rows_and_options_of_others() -> None:
    tokenizer = make_tokenizer()
    built = build(None, tokenizer, {"run": f"{HERE}:spoils", "options": {"seen": []}})
    prompt = make_prompt(tokenizer, "1+2?", {"level": [7]})
    for index in range(2):
        model = ScriptedModel(tokenizer, by_turn("3"))
        (sample,) = asyncio.run(built.rollout(prompt, 0, index, model))
        assert sample.outcome == {"reward": 1.0}
        assert sample.messages[0]["content"] == "1+2?"


def test_and_one_that_asks_nothing() -> None:
    async def run(task: Any, endpoint: Any) -> float:
        return 1.0

    with pytest.raises(RolloutFailed, match="there is no turn of the model to train on"):
        play(run, by_turn())


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        ({"run": f"{HERE}:nowhere"}, r"rollout\.workflow\.run: .* has no 'nowhere'"),
        ({"run": "no_such_module:run"}, r"rollout\.workflow\.run: .*cannot import no_such_module"),
        ({"run": f"{HERE}:nothing"}, r"called as run\(task, endpoint\), but: too many positional"),
        ({"run": f"{HERE}:with_options"}, r"missing a required argument: 'depth'"),
        ({"run": f"{HERE}:ask", "options": {"depth": 1}}, r"run\(task, endpoint, depth=\), but"),
        ({"run": f"{HERE}:ask", "command": ["true"]}, "either run .* or command .*, got both"),
        ({}, "got neither"),
        ({"command": "true"}, r"rollout\.workflow\.command: got 'true', expected a list"),
        ({"command": []}, r"rollout\.workflow\.command: got \[\]"),
        (
            {"command": ["true"], "options": {"a": 1}},
            r"rollout\.workflow\.options: a command takes",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(workflow: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(None, make_tokenizer(), workflow)


def test_prompts_that_are_texts_are_refused() -> None:
    from dataclasses import replace

    tokenizer = make_tokenizer()
    built = build(giving(1.0), tokenizer, {})
    prompt = replace(make_task(tokenizer), messages=None)
    with pytest.raises(ConfigError, match=r"data\.as_chat: true"):
        asyncio.run(built.rollout(prompt, 0, 0, ScriptedModel(tokenizer, by_turn("3"))))


def test_the_server_ends_with_its_event_loop_and_the_next_one_gets_another() -> None:
    urls: list[str] = []

    async def run(task: Any, endpoint: Any) -> None:
        urls.append(endpoint.base_url)
        await ask(task, endpoint)

    tokenizer = make_tokenizer()
    built = build(run, tokenizer, {})
    for _ in range(2):
        model = ScriptedModel(tokenizer, by_turn("3"))
        assert asyncio.run(built.rollout(make_task(tokenizer), 0, 0, model))
        port = int(urls[-1].split(":")[2].split("/")[0])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()


# --- commands -------------------------------------------------------------------------------------

ASK = """
import json, os, sys
import urllib.request
task = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
with urllib.request.urlopen(request) as answer:
    text = json.load(answer)["choices"][0]["message"]["content"]
"""


def play_command(source: str, *arguments: str) -> Any:
    command = [sys.executable, "-c", ASK + source, *arguments]
    (sample,), _ = play(None, by_turn("3"), workflow={"command": command})  # type: ignore[arg-type]
    return sample


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        ('{"right": float(text == task["row"]["label"]), "level": task["row"]["level"]}',
         {"right": 1.0, "level": 7.0}),
        ("0.5", {"reward": 0.5}),
        ("None", {}),
    ],
)  # fmt: skip
def test_a_command_is_given_its_row_and_says_its_outcome_last(
    last: str, outcome: dict[str, float]
) -> None:
    sample = play_command(f"print('talk'); print(json.dumps({last}))")
    assert (sample.outcome, sample.response_text) == (outcome, "3")


def test_a_command_without_output_has_no_outcome() -> None:
    assert play_command("").outcome == {}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print('out'); sys.exit('no such door')", r"exit code 1; the end of its output:\nno such"),
        ("print('out', flush=True); os._exit(3)", r"exit code 3; the end of its output:\nout"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("print('fine')", "last line of its output must be its outcome as JSON .* got 'fine'"),
        ("print('\"fine\"')", "'reward' is no finite number"),
    ],
)
def test_a_command_that_fails_fails_its_rollout(source: str, said: str) -> None:
    with pytest.raises(RolloutFailed, match=said):
        play_command(source)


def test_a_command_that_is_not_there_fails_the_rollout() -> None:
    with pytest.raises(RolloutFailed, match=r"/no/such cannot be started: .*No such file"):
        play(None, by_turn("3"), workflow={"command": ["/no/such"]})  # type: ignore[arg-type]


def test_what_a_command_leaves_behind_is_killed(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    source = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(left)!r}, 'w').write(str(child.pid))\n"
        "print(1.0)"
    )
    assert play_command(source).outcome == {"reward": 1.0}
    gone(int(left.read_text()))


def test_a_command_whose_rollout_is_given_up_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    source = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    tokenizer = make_tokenizer()
    built = build(None, tokenizer, {"command": [sys.executable, "-c", source]})

    async def give_up() -> None:
        model = ScriptedModel(tokenizer, by_turn("3"))
        rollout = asyncio.ensure_future(built.rollout(make_task(tokenizer), 0, 0, model))
        while not (file.exists() and file.read_text()):
            await asyncio.sleep(0.02)
        rollout.cancel()
        await asyncio.wait({rollout})
        assert rollout.cancelled()

    asyncio.run(asyncio.wait_for(give_up(), 60))
    gone(int(file.read_text()))


def gone(pid: int) -> None:
    """Wait until a process has ended; a zombie that nobody reads has."""
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{pid} still runs"
        time.sleep(0.02)


def test_a_command_reaches_the_endpoint_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    sample = play_command("print(json.dumps(os.environ['no_proxy'].count(',')))")
    assert sample.outcome == {"reward": 1.0}
    assert json.dumps(os.environ["no_proxy"]) == '"example.org"'


@pytest.mark.parametrize(
    ("workflow", "said"),
    [
        ('run: "no_such:run"', "rollout.workflow.run (run.yaml:5): 'no_such:run': cannot import"),
        ('run: "m:f", command: [m]', "rollout.workflow (run.yaml:5): agent needs either run"),
        ("max_turns: 3", "rollout.workflow (run.yaml:5): agent needs either run"),
        ("program: f", "rollout.workflow (run.yaml:5): agent: got an unexpected keyword"),
    ],
)
def test_rlcore_validate_refuses_them_too(
    workflow: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlcore import cli

    file = tmp_path / "run.yaml"
    file.write_text(
        "run: {name: x}\nmodel: {path: m}\ndata: {paths: [d.jsonl]}\ntraining: {steps: 1}\n"
        f"rollout: {{workflow: {{name: agent, {workflow}}}}}\n"
    )
    assert cli.main(["validate", "--elsewhere", str(file)]) == 2
    assert said in capsys.readouterr().err.replace(f"{tmp_path}/", "")
