"""Runs programs on a SandboxFusion server, over its `/run_code`."""

from __future__ import annotations

import base64
from typing import Any

from rlcore.deadlines import FUSION_GRACE_S
from rlcore.errors import ConfigError
from rollout.json_client import JsonClient, NoAnswer
from rollout.sandbox import Outcome, Program, Status

COMPILE_S = 30.0
RUN_STATUS: dict[Any, Status] = {"Finished": "finished", "TimeLimitExceeded": "timeout"}
_LANGUAGES = (
    "python cpp nodejs go go_test java php csharp bash typescript sql rust cuda lua R perl D_ut "
    "ruby scala julia pytest junit kotlin_script jest verilog python_gpu lean swift racket"
)
LANGUAGES = frozenset(_LANGUAGES.split())


class FusionSandbox:
    """A `Sandbox` on a SandboxFusion server.

    Args:
        url: address of the server, without /run_code.
        retries: further tries after failures of the server itself.
    """

    def __init__(self, url: str, *, concurrency: int, output_bytes: int, retries: int) -> None:
        self._url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self._output_bytes = output_bytes
        self._tries = f"in {retries + 1} tries" if retries else "in its only try"
        self._started = False
        self._client = JsonClient(
            [self._url],
            where="reward.sandbox.url",
            timeout_s=COMPILE_S + FUSION_GRACE_S,
            retries=retries,
            concurrency=concurrency,
            # JSON writes a control character as six
            answer_bytes=12 * output_bytes + (1 << 20),
        )

    async def start(self) -> None:
        """See `Sandbox`: run a test program."""
        if self._started:
            return
        self._started = True
        outcome = await self.run(Program("print(6 * 7)", timeout_s=10))
        if not outcome.succeeded or outcome.stdout.strip() != "42":
            said = outcome.reason or f"print(6 * 7) gave {outcome.stdout[:80]!r}"
            raise ConfigError(
                f"reward.sandbox.url: {self._url} runs no program: {said}; start a SandboxFusion"
                " server there, or set reward.sandbox.kind: namespaces"
            )

    async def run(self, program: Program) -> Outcome:
        if program.language not in LANGUAGES:
            raise ConfigError(
                f"SandboxFusion has no {program.language}; it has {', '.join(sorted(LANGUAGES))}"
            )
        # longer than the server's own limits, so that it answers first
        limit = COMPILE_S + program.timeout_s + FUSION_GRACE_S
        try:
            outcome: Outcome = await self._client.post(
                self._request(program), timeout_s=limit, read=self._outcome
            )
        except NoAnswer as error:
            if error.kind == "too_long":
                return Outcome("limit", reason="its answer was too long")
            return Outcome("error", reason=f"SandboxFusion failed {self._tries}: {error}"[:400])
        return outcome

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

    def _outcome(self, answer: Any) -> Outcome:
        """The outcome that the server reports. Raises NoAnswer for an invalid report."""
        try:
            status = answer["status"]
            if status == "SandboxError":
                raise NoAnswer(f"SandboxError: {str(answer.get('message'))[:200]}", again=True)
            if status not in ("Success", "Failed"):
                raise ValueError(f"status {str(status)[:40]!r}")
            compiled = answer.get("compile_result")
            failed = compiled is not None and (
                compiled["status"] != "Finished" or compiled.get("return_code") != 0
            )
            outcome = self._result(compiled if failed else answer["run_result"])
            if outcome.status != "limit" and outcome.succeeded != (status == "Success"):
                raise ValueError(f"status {status} of a program that ended with {outcome}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NoAnswer(f"the answer is invalid: {error!r}"[:300], again=True) from error
        return outcome

    def _result(self, result: dict[str, Any]) -> Outcome:
        """The outcome of a step, compilation or run. Raises ValueError for an invalid result."""
        if result["status"] not in RUN_STATUS:
            said = f"{str(result['status'])[:40]}: {str(result.get('stderr'))[:200]}"
            raise NoAnswer(said, again=True)
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
        await self._client.close()


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
