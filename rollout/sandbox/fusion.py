"""Runs programs on a SandboxFusion server, over its `/run_code`."""

from __future__ import annotations

import asyncio
import base64
import logging
import random
from typing import Any

import aiohttp
import orjson

from rlcore.deadlines import FUSION_GRACE_S
from rlcore.errors import ConfigError, DeadlineExceeded
from rollout.asyncio_utils import within
from rollout.sandbox.base import Outcome, Program, Status

logger = logging.getLogger(__name__)

COMPILE_S = 30.0
FIRST_PAUSE_S = 0.5  # before the first further try; twice as long before each next one
LONGEST_PAUSE_S = 10.0
RUN_STATUS: dict[Any, Status] = {"Finished": "finished", "TimeLimitExceeded": "timeout"}
LANGUAGES = frozenset(
    (
        "python",
        "cpp",
        "nodejs",
        "go",
        "go_test",
        "java",
        "php",
        "csharp",
        "bash",
        "typescript",
        "sql",
        "rust",
        "cuda",
        "lua",
        "R",
        "perl",
        "D_ut",
        "ruby",
        "scala",
        "julia",
        "pytest",
        "junit",
        "kotlin_script",
        "jest",
        "verilog",
        "python_gpu",
        "lean",
        "swift",
        "racket",
    )
)


class ServerFailed(Exception):
    """The server gave no answer that says anything about the program."""


class FusionSandbox:
    """A `Sandbox` on a SandboxFusion server.

    Args:
        url: the server's, without /run_code.
        retries: further tries where the server fails, which the program cannot help.
    """

    def __init__(self, url: str, *, concurrency: int, output_bytes: int, retries: int) -> None:
        self._url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self._output_bytes = output_bytes
        # JSON writes a control character as six
        self._answer_bytes = 12 * output_bytes + (1 << 20)
        self._retries = retries
        self._places = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """See `Sandbox`: run a program."""
        if self._session is not None:
            return
        self._session = aiohttp.ClientSession()
        outcome = await self.run(Program("print(6 * 7)", timeout_s=10))
        if not outcome.succeeded or outcome.stdout.strip() != "42":
            said = outcome.reason or f"print(6 * 7) gave {outcome.stdout[:80]!r}"
            raise ConfigError(
                f"reward.sandbox.url: {self._url} runs no program: {said}; start a SandboxFusion"
                " server there, or set reward.sandbox.kind: namespaces"
            )

    async def run(self, program: Program) -> Outcome:
        """See `Sandbox`."""
        if program.language not in LANGUAGES:
            raise ConfigError(
                f"SandboxFusion has no {program.language}; it has {', '.join(sorted(LANGUAGES))}"
            )
        request = orjson.dumps(self._request(program))
        # a server that keeps its own limits answers before
        limit = COMPILE_S + program.timeout_s + FUSION_GRACE_S
        problem = ""
        async with self._places:
            for attempt in range(self._retries + 1):
                if attempt:
                    pause = min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S)
                    # not all at once, on a server that has too much to do
                    await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                try:
                    return await self._try(request, limit)
                except (ServerFailed, aiohttp.ClientError, OSError) as error:
                    problem = str(error) or type(error).__name__
                    logger.debug("SandboxFusion, try %d: %s", attempt + 1, problem)
        tries = f"in {self._retries + 1} tries" if self._retries else "in its only try"
        return Outcome("error", reason=f"SandboxFusion failed {tries}: {problem[:300]}")

    def _request(self, program: Program) -> dict[str, Any]:
        return {
            "code": _text(program.code),
            "language": program.language,
            "stdin": _text(program.stdin),
            "compile_timeout": COMPILE_S,
            "run_timeout": program.timeout_s,
            "memory_limit_MB": program.memory_mb,
            "files": {
                name: base64.b64encode(data).decode() for name, data in program.files.items()
            },
            "fetch_files": [],
        }

    async def _try(self, request: bytes, limit: float) -> Outcome:
        try:
            status, body = await within(limit, self._post(request), lambda: "")
        except DeadlineExceeded as error:
            raise ServerFailed(f"no answer in {limit:g} s") from error
        if body is None:
            return Outcome("limit", reason="its answer was too long")
        if status != 200:
            raise ServerFailed(f"HTTP {status}: {body[:200].decode('utf-8', 'replace')}")
        return self._outcome(body)

    async def _post(self, request: bytes) -> tuple[int, bytes | None]:
        assert self._session is not None, "start it first"
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=request, headers=headers) as response:
            return response.status, await self._body(response)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes | None:
        """Read the body; None if it is longer than any answer of ours."""
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > self._answer_bytes:
                return None
        return bytes(body)

    def _outcome(self, body: bytes) -> Outcome:
        try:
            answer = orjson.loads(body)
            status = answer["status"]
            if status == "SandboxError":
                raise ServerFailed(f"SandboxError: {str(answer.get('message'))[:200]}")
            if status not in ("Success", "Failed"):
                raise ValueError(f"status {str(status)[:40]!r}")
            compiled = answer.get("compile_result")
            failed = compiled is not None and not _went_well(compiled)
            outcome = self._result(compiled if failed else answer["run_result"])
            if outcome.status != "limit" and outcome.succeeded != (status == "Success"):
                raise ValueError(f"status {status} of a program that ended with {outcome}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerFailed(f"nonsense was answered: {error!r}"[:300]) from error
        return outcome

    def _result(self, result: dict[str, Any]) -> Outcome:
        """Return the outcome of a step, compilation or run. Raises ValueError for nonsense."""
        if result["status"] not in RUN_STATUS:
            raise ServerFailed(f"{str(result['status'])[:40]}: {str(result.get('stderr'))[:200]}")
        status = RUN_STATUS[result["status"]]
        code = result.get("return_code")
        stdout = result.get("stdout") or ""
        stderr = result.get("stderr") or ""
        if not isinstance(stdout, str) or not isinstance(stderr, str):
            raise ValueError("output that is no text")
        if status == "finished" and (not isinstance(code, int) or isinstance(code, bool)):
            raise ValueError(f"return_code {str(code)[:40]!r}")
        seconds = float(result.get("execution_time") or 0.0)
        if len(stdout) + len(stderr) > self._output_bytes:
            reason = f"wrote more than {self._output_bytes >> 10} KiB"
            return Outcome("limit", seconds=seconds, reason=reason)
        if status == "timeout":
            return Outcome(status, stdout, stderr, None, seconds, "had not ended at its time limit")
        return Outcome(status, stdout, stderr, code, seconds)

    async def close(self) -> None:
        """See `Sandbox`."""
        session = self._session
        self._session = None
        if session is not None:
            await session.close()


def _went_well(result: dict[str, Any]) -> bool:
    return result["status"] == "Finished" and result.get("return_code") == 0


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
