"""The reward `code`: the response's last code block passes the tests of the label.

The code runs in the sandbox of `reward.sandbox`, in a separate run for each test.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Literal

from rlcore.data.sample import Sample
from rollout.rewards.base import RewardFailure, RewardPart, Score, Verdict, attempted, each
from rollout.rewards.graders.code_tests import CodeTest, last_block, passed, program_of, read_tests
from rollout.sandbox import Sandbox


class CodePart(RewardPart):
    """Scores code; for its arguments see `rlcore.config.sections.graders.CodeArgs`."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        score: Literal["all", "share"] = "all",
        timeout_s: float = 5.0,
        memory_mb: int = 512,
        tests: int | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._share = score == "share"
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._most = tests

    async def start(self) -> None:
        await self._sandbox.start()

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return await each(samples, self._score)

    async def _score(self, sample: Sample) -> Score:
        try:
            tests = read_tests(sample.label, sample.metadata, sample.prompt_text)[: self._most]
        except ValueError as error:
            return RewardFailure("error", str(error), external=True)
        code = last_block(sample.response_text)
        if code is None:
            return self._verdict(0, tests, "no block of Python between ``` in the response")
        problems = await self._problems(tests, code)
        if isinstance(problems, RewardFailure):
            return problems
        first = next((f"test {at + 1}: {problem}" for at, problem in problems), None)
        return self._verdict(len(tests) - len(problems), tests, first)

    def _verdict(self, count: int, tests: list[CodeTest], problem: str | None) -> Verdict:
        right = problem is None
        score = count / len(tests) if self._share else float(right)
        if self._share:
            info = {"passed": count, "tests": len(tests)}
        else:
            # a failed test ended the wait for the others
            info = {"tests": len(tests)}
        return Verdict(score, right, info=info if right else {**info, "problem": problem})

    async def _problems(
        self, tests: list[CodeTest], code: str
    ) -> list[tuple[int, str]] | RewardFailure:
        """The failed tests with reasons; unless `all`, only the first known failure.

        Without an outcome of the sandbox, the code stays unjudged.
        """
        runs = {
            asyncio.ensure_future(attempted(self._problem(test, code))): at
            for at, test in enumerate(tests)
        }
        waiting = set(runs)
        problems: list[tuple[int, str]] = []
        try:
            while waiting and (self._share or not problems):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for run in done:
                    problem = run.result()
                    if isinstance(problem, RewardFailure):
                        return problem
                    if problem is not None:
                        problems.append((runs[run], problem))
        finally:
            for run in waiting:
                run.cancel()
            if waiting:
                await asyncio.wait(waiting)
        return sorted(problems)

    async def _problem(self, test: CodeTest, code: str) -> str | RewardFailure | None:
        token = secrets.token_hex(16)
        program = program_of(
            test, code, token, timeout_s=self._timeout_s, memory_mb=self._memory_mb
        )
        outcome = await self._sandbox.run(program)
        if outcome.status == "error":
            return RewardFailure("error", f"reward.sandbox: {outcome.reason}", external=True)
        if outcome.status != "finished":
            return outcome.reason
        if outcome.exit_code != 0:
            last = outcome.stderr.strip().rpartition("\n")[2][:200]
            return f"exit code {outcome.exit_code}: {last}"
        return None if passed(test, outcome.stdout, token) else "wrong answer"

    async def close(self) -> None:
        await self._sandbox.close()
