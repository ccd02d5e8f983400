"""SandboxFusion's client against a server that is right, slow, down, lying or huge."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from patient_loop import run_steadily

import rollout.sandbox.fusion as fusion
from rlcore.config.sections.sandbox import SandboxConfig
from rlcore.errors import ConfigError
from rollout import json_client
from rollout.sandbox import Outcome, Program
from rollout.sandbox.local import build_sandbox

Handler = Callable[[dict[str, Any]], Awaitable[web.StreamResponse] | web.StreamResponse]


def result(**changes: Any) -> dict[str, Any]:
    good = {
        "status": "Finished",
        "execution_time": 0.25,
        "return_code": 0,
        "stdout": "42\n",
        "stderr": "",
    }
    return {**good, **changes}


def answer(status: str = "Success", **changes: Any) -> dict[str, Any]:
    """An answer as the server writes it."""
    return {
        "status": status,
        "message": "",
        "compile_result": None,
        "run_result": result(),
        "executor_pod_name": None,
        "files": {},
        **changes,
    }


def ask(
    handle: Handler, *programs: Program, start: bool = False, **config: Any
) -> tuple[list[Outcome], list[dict[str, Any]]]:
    """Run programs on a server that `handle`s them; the outcomes, and the requests it got."""
    requests: list[dict[str, Any]] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        requests.append(await request.json())
        found = handle(requests[-1])
        return await found if isinstance(found, Awaitable) else found

    async def scenario() -> list[Outcome]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/run_code", serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        section = SandboxConfig(kind="fusion", url=f"http://127.0.0.1:{port}/", **config)
        sandbox = build_sandbox(section)
        try:
            if start:
                await sandbox.start()
            return list(await asyncio.gather(*map(sandbox.run, programs)))
        finally:
            await sandbox.close()
            await runner.cleanup()

    return run_steadily(asyncio.wait_for(scenario(), 60)), requests


def says(value: Any) -> Handler:
    return lambda _: web.json_response(value)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_client, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(fusion, "FUSION_GRACE_S", 0.2)
    monkeypatch.setattr(fusion, "COMPILE_S", 0.2)


PROGRAM = Program("print(6 * 7)", timeout_s=20, memory_mb=300)


def test_a_request_has_the_servers_fields() -> None:
    program = Program(
        "int main() {}", "cpp", "in\ud800", {"a.txt": b"\x00\xff"}, timeout_s=2.5, memory_mb=300
    )
    (found,), (request,) = ask(says(answer()), program)
    assert found == Outcome("finished", "42\n", "", 0, 0.25)
    assert request == {
        "code": "int main() {}",
        "language": "cpp",
        "stdin": "in?",
        "compile_timeout": 0.2,
        "run_timeout": 2.5,
        "memory_limit_MB": 300,
        "files": {"a.txt": base64.b64encode(b"\x00\xff").decode()},
        "fetch_files": [],
    }


FAILED = result(return_code=1, stdout="", stderr="Traceback")
NOT_COMPILED = result(return_code=1, stdout="", stderr="expected ;")
LATE = {"status": "TimeLimitExceeded", "execution_time": 1.0, "return_code": None}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (answer("Failed", run_result=FAILED), Outcome("finished", "", "Traceback", 1, 0.25)),
        (
            answer("Failed", run_result={**LATE, "stdout": "so far", "stderr": None}),
            Outcome("timeout", "so far", "", None, 1.0, "had not ended at its time limit"),
        ),
        (
            answer("Failed", compile_result=NOT_COMPILED, run_result=None),
            Outcome("finished", "", "expected ;", 1, 0.25),
        ),
        (answer(compile_result=result(stdout="")), Outcome("finished", "42\n", "", 0, 0.25)),
        (
            answer(run_result=result(stdout="x" * 2000)),
            Outcome("limit", seconds=0.25, reason="wrote more than 1 KiB"),
        ),
    ],
)
def test_outcomes(value: Any, expected: Outcome) -> None:
    (found,), requests = ask(says(value), PROGRAM, output_kb=1)
    assert found == expected
    assert len(requests) == 1  # the program's doing, so not tried again


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (answer("SandboxError", message="no cgroup"), "SandboxError: no cgroup"),
        (answer("Failed", run_result=result(status="Error", stderr="fork")), "Error: fork"),
        ([], "the answer is invalid"),
        ({}, "the answer is invalid"),
        ("ok", "the answer is invalid"),
        (answer("Wonderful"), "the answer is invalid.*Wonderful"),
        (answer(run_result=None), "the answer is invalid"),
        (answer(run_result="good"), "the answer is invalid"),
        (answer(run_result=result(stdout=7)), "output that is no text"),
        (answer(run_result=result(return_code="0")), "return_code '0'"),
        (answer(run_result=result(return_code=True)), "return_code 'True'"),
        (answer(run_result=result(execution_time="soon")), "the answer is invalid"),
        # its two words must agree
        (answer("Success", run_result=FAILED), "status Success of a program that ended"),
        (answer("Failed"), "status Failed of a program that ended"),
    ],
)
def test_a_server_that_fails_or_lies_is_asked_again_and_then_an_error(
    value: Any, reason: str
) -> None:
    (found,), requests = ask(says(value), PROGRAM, retries=2)
    assert found.status == "error"
    assert "SandboxFusion failed in 3 tries" in found.reason
    assert re.search(reason, found.reason), found.reason
    assert len(requests) == 3


def test_no_json_is_an_error() -> None:
    (found,), _ = ask(lambda _: web.Response(text="<html>"), PROGRAM, retries=0)
    assert found.status == "error"
    assert re.search("in its only try: http.* answered no JSON", found.reason)


def test_a_slow_server_is_given_up() -> None:
    async def handle(_: Any) -> web.Response:
        await asyncio.sleep(30)
        return web.json_response(answer())

    begin = time.monotonic()
    (found,), _ = ask(handle, Program("x", timeout_s=0.1), retries=1)
    assert (found.status, "no answer in 0.5 s" in found.reason) == ("error", True)
    assert time.monotonic() - begin < 25


def test_a_huge_answer_is_not_read_to_its_end() -> None:
    def handle(_: Any) -> web.Response:
        return web.Response(body=b"x" * (8 << 20))

    (found,), requests = ask(handle, PROGRAM, output_kb=1)
    assert (found.status, found.reason) == ("limit", "its answer was too long")
    assert len(requests) == 1


def test_the_start_tries_a_program() -> None:
    (found,), requests = ask(says(answer()), PROGRAM, start=True)
    assert found.succeeded
    assert [request["code"] for request in requests] == ["print(6 * 7)"] * 2
    with pytest.raises(ConfigError, match=r"reward.sandbox.url: http.*gave 'no'.*start a Sandbox"):
        ask(says(answer(run_result=result(stdout="no"))), start=True)


def test_so_many_at_a_time() -> None:
    now = 0
    most = 0

    async def handle(_: Any) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.05)
        now -= 1
        return web.json_response(answer())

    found, _ = ask(handle, *[PROGRAM] * 9, concurrency=3)
    assert all(outcome.succeeded for outcome in found)
    assert most == 3


def test_a_language_that_it_has_not() -> None:
    with pytest.raises(ConfigError, match="SandboxFusion has no cobol; it has"):
        ask(says(answer()), Program("x", "cobol"))
