"""Tools of MCP servers: real ones, over a pipe and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from workspace import Workspace

from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.errors import ConfigError
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.runs.rollouts import read_rollouts
from rollout.conversation.conversation import Conversation
from rollout.workflows import mcp_tools
from rollout.workflows.mcp_tools import McpFailed, McpTools
from rollout.workflows.registry import build_workflow
from tests.process_facts import command_of
from tests.unit.rollout.conversation.kit import (
    ScriptedModel,
    make_context,
    make_prompt,
    make_tokenizer,
)

PROGRAM = [sys.executable, str(Path(__file__).parent / "mcp_server.py")]
SERVER = {"command": PROGRAM, "environment": ["PYTHONPATH"]}


class Judge:
    """An environment that has a tool of its own and gives the reward."""

    def subtract(self, a: int, b: int) -> int:
        """Subtract two numbers.

        Args:
            a: the first
            b: the second
        """
        return a - b

    def reward(self, conversation: Conversation) -> float:
        return float(conversation.messages[-1]["content"] == "3")


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def workflow(*servers: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    tokenizer = make_tokenizer()
    settings = WorkflowConfig.model_validate({"name": "env", "mcp": [*servers], **options})
    return build_workflow(make_context(tokenizer, settings=settings)), tokenizer


def rollouts(script: dict[int, str], built: tuple[Any, Any], times: int = 1) -> list[Any]:
    """The samples of rollouts, one after the other, and the model that was asked."""
    tokenizer = built[1]
    model = ScriptedModel(tokenizer, lambda _, request: script[request.turn])
    prompt = make_prompt(tokenizer, "1+2?", {"label": 3})

    async def all_of_them() -> list[Any]:
        found = []
        for number in range(times):
            found += await built[0].rollout(prompt, 4, number, model)
        return [*found, model]

    return asyncio.run(all_of_them())


def results(sample: Any) -> list[str]:
    return [message["content"] for message in sample.messages if message["role"] == "tool"]


def gone(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def test_the_policy_calls_tools_of_a_server_and_no_process_is_left() -> None:
    script = {
        0: call("add", a=1, b=2) + call("fail") + call("add", a="x") + call("leak"),
        1: call("subtract", a=5, b=1) + call("multiply"),
        2: "3",
    }
    sample, model = rollouts(script, workflow(SERVER, env=f"{__name__}:Judge"))
    added, failed, wrong, leaked, own, unknown = results(sample)
    assert added == "3"
    assert failed.startswith("error: ")
    assert "no such place" in failed
    assert wrong.startswith("error: ")
    assert gone(int(leaked))
    assert own == "4"
    assert unknown.startswith("error: there is no tool 'multiply'; there is subtract, add, fail")
    assert sample.outcome == {"reward": 1.0}
    assert (sample.measured["tool_calls"], sample.measured["tool_errors"]) == (6, 3)
    seen = model.tokenizer.decode(model.requests[0].prompt.tolist())
    assert '"description": "Add two numbers."' in seen
    assert '"integer"' in seen


def test_a_server_is_of_one_rollout_or_of_all() -> None:
    script = {0: call("count"), 1: "done"}
    first, second, _ = rollouts(script, workflow({**SERVER, "tools": ["count"]}), 2)
    assert results(first) == results(second) == ["call 1"]
    shared = {**SERVER, "shared": True, "tools": ["count"]}
    first, second, model = rollouts(script, workflow(shared), 2)
    assert [*results(first), *results(second)] == ["call 1", "call 2"]
    assert '"add"' not in model.tokenizer.decode(model.requests[0].prompt.tolist())


@pytest.mark.parametrize(
    ("script", "server", "limit_s", "message"),
    [
        ({0: call("die")}, SERVER, 60, r"the MCP server .* a call of 'die'"),
        ({0: call("hang")}, SERVER, 4, r"of 'hang': 4 s \(tool_timeout_s\)"),
        ({}, {**SERVER, "tools": ["sub"]}, 60, "has no tool 'sub'; it has add, fail"),
    ],
)
def test_a_server_that_fails_fails_the_rollout(
    script: dict[int, str], server: dict[str, Any], limit_s: int, message: str
) -> None:
    with pytest.raises(McpFailed, match=message):
        rollouts(script, workflow(server, tool_timeout_s=limit_s))


@pytest.mark.parametrize("end", ["die", "hang"])
def test_a_shared_server_that_does_not_answer_is_started_again_by_the_next_rollout(
    end: str,
) -> None:
    tools = McpTools([{**SERVER, "shared": True}])

    async def ask(name: str, seconds: float = 60) -> str:
        async with tools.connected() as sessions:
            return await sessions[name].call(name, {}, seconds)

    async def scenario() -> None:
        async with tools.connected() as early:
            assert await ask("count") == "call 1"
            with pytest.raises(McpFailed, match=f"call of '{end}'"):
                await ask(end, 2)
            assert await ask("count") == "call 1"
            assert not early["count"].ended  # whoever has it may go on
        assert early["count"].ended
        assert await ask("count") == "call 2"

    asyncio.run(asyncio.wait_for(scenario(), 120))


@pytest.fixture
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*PROGRAM, str(port)], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait(10)


def test_a_server_of_somebody_else_is_asked_by_url(url: str) -> None:
    script = {0: call("add", a=20, b=3) + call("count"), 1: "done"}
    first, second, _ = rollouts(script, workflow({"url": url}), 2)
    assert results(first) == ["23", "call 1"]
    assert results(second) == ["23", "call 2"]  # it runs on


def test_a_result_that_is_too_long_is_an_error_for_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_tools, "MAX_RESULT", 1000)
    script = {0: call("write", characters=1001) + call("write", characters=1000), 1: "done"}
    sample, _ = rollouts(script, workflow({**SERVER, "tools": ["write"]}, max_tool_tokens=2000))
    long, short = results(sample)
    assert long == "error: the result of write has 1,001 characters: too many to read"
    assert short == "x" * 1000


@pytest.mark.parametrize("kind", ["command", "url"])
def test_a_message_is_counted_while_it_is_read(
    kind: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_tools, "MAX_MESSAGE", 200_000)
    server = {**(SERVER if kind == "command" else {"url": url}), "tools": ["write"]}
    fits = {0: call("write", characters=50_000), 1: "done"}
    assert len(rollouts(fits, workflow(server, max_tool_tokens=9))) == 2
    with pytest.raises(McpFailed, match="a call of 'write'"):
        rollouts({0: call("write", characters=300_000)}, workflow(server, tool_timeout_s=20))


def test_two_servers_with_the_same_tool_are_refused() -> None:
    server = {**SERVER, "tools": ["add"]}
    with pytest.raises(ConfigError, match=r"both have a tool 'add': name those"):
        rollouts({}, workflow(server, {**server, "shared": True}))


def test_a_run_calls_a_shared_server_and_leaves_none_behind(workspace: Workspace) -> None:
    """The model is warmed up on conversations with the server's own schema."""

    async def schema() -> dict[str, Any]:
        async with McpTools([SERVER]).connected() as sessions:
            return sessions["add"].schemas["add"]

    model = workspace.folder / "adder"
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128}
    init_model(model, ModelSpec.preset("ascii", chat=True, max_positions=1024, **sizes))
    sums = [(a, b) for a in range(1, 5) for b in range(1, 5)]
    talks = [{"messages": conversation(a, b), "tools": [asyncio.run(schema())]} for a, b in sums]
    for name, rows in {
        "talks": talks,
        "sums": [{"prompt": f"{a}+{b}?", "label": str(a + b)} for a, b in sums],
    }.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (workspace.folder / f"{name}.jsonl").write_text(lines)
    warm = workspace.sft(
        "adder-warmup", f"model.path={model}", f"data.paths={workspace.folder / 'talks.jsonl'}",
        "training.steps=80", "training.batch_size=16", "policy.optimizer.lr=5e-3",
        "policy.max_tokens_per_microbatch=8192",
    )  # fmt: skip
    assert warm.code == 0, warm.err
    servers = [{**SERVER, "tools": ["add"], "shared": True}]
    run = workspace.command(
        "train", f"run.dir={workspace.folder / 'runs'}", "run.name=adder", "run.threads=1",
        f"model.path={warm.folder / 'hf'}", "model.dtype=fp32", "data.as_chat=true",
        f"data.paths={workspace.folder / 'sums.jsonl'}", "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4", "rollout.sampling.max_new_tokens=80",
        "policy.max_tokens_per_microbatch=8192",
        f"rollout.workflow={json.dumps({'name': 'env', 'mcp': servers, 'max_turns': 3})}",
        "reward.parts.right.function=exact_match", "training.steps=2", name="adder",
    )  # fmt: skip
    assert run.code == 0, run.err
    samples = [sample for step in (1, 2) for sample in read_rollouts(run.rollouts(step))]
    told = [text for sample in samples for text in results(SimpleNamespace(**sample))]
    assert any(text.isdigit() for text in told), "the warm-up was too short for calls"
    left = [command_of(child) for child in psutil.Process().children(recursive=True)]
    assert not [command for command in left if "mcp_server.py" in " ".join(command)]


def conversation(a: int, b: int) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": {"a": a, "b": b}}
    return [
        {"role": "user", "content": f"{a}+{b}?"},
        {"role": "assistant", "content": None,
         "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]  # fmt: skip
