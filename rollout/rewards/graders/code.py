"""The reward `code`: the response's last code block passes the tests of the label.

Every test is a program of its own in the sandbox (`reward.sandbox`), and never runs here.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.data.sample import Sample
from rollout.rewards.base import RewardFailure, RewardPart, Score, Verdict
from rollout.rewards.graders.ifeval import json_of
from rollout.rewards.graders.places import after_thinking
from rollout.sandbox.base import Outcome, Program, Sandbox

_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)

# A function is called with JSON arguments and its result printed as JSON, behind a mark: what the
# code prints itself does not count.
_CALL = """
import json as _json
_made = globals().get("Solution")
_function = getattr(_made(), {name!r}) if _made is not None else globals()[{name!r}]
_result = _function(*_json.loads({args!r}))
print()
print({mark!r} + _json.dumps(_result))
"""


@dataclass(frozen=True)
class CodeTest:
    """One test: of the output for an input, of a function's result, or by an assertion."""

    stdin: str = ""
    output: Any = None
    function: str | None = None
    args: Sequence[Any] = ()
    assertion: str | None = None


def read_tests(label: Any) -> list[CodeTest]:
    """The tests in a label, an object or its JSON text.

    - `{inputs: [...], outputs: [...]}`, texts for standard input and output; with `fn_name`, lists
      of arguments and results (APPS, TACO, verl's PRIME code)
    - a list of `{input, output}` (LiveCodeBench)
    - a list of assertions, as `assert add(1, 2) == 3` (MBPP, open-instruct)

    Raises:
        ValueError: the label is none of these, or has no test.
    """
    given = json_of(label)
    tests: list[CodeTest] = []
    if isinstance(given, Mapping) and "inputs" in given and "outputs" in given:
        name = given.get("fn_name")
        for put_in, out in zip(given["inputs"], given["outputs"], strict=True):
            tests.append(
                CodeTest(stdin=_text(put_in), output=_text(out))
                if name is None
                else CodeTest(function=str(name), args=put_in, output=out)
            )
    elif isinstance(given, list) and all(isinstance(one, str) for one in given):
        tests = [CodeTest(assertion=one) for one in given]
    elif isinstance(given, list) and all(
        isinstance(one, Mapping) and {"input", "output"} <= set(one) for one in given
    ):
        if any(one.get("testtype", "stdin") != "stdin" for one in given):
            raise ValueError("tests of the type functional need {inputs, outputs, fn_name}")
        tests = [CodeTest(stdin=_text(one["input"]), output=_text(one["output"])) for one in given]
    if not tests:
        raise ValueError(
            "the label must be tests: {inputs, outputs}, a list of {input, output}, or a list of"
            f" assertions; got {type(given).__name__} {str(label)[:80]!r}"
        )
    return tests


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def code_of(response: str) -> str | None:
    """The last whole code block of a response, fenced by ``` with or without `python`."""
    blocks = _BLOCK.findall(after_thinking(response))
    return str(blocks[-1]) if blocks else None


class CodePart(RewardPart):
    """Runs the tests of samples in a sandbox, as many at a time as the sandbox takes.

    Args:
        score: `all` (1 where every test passes; stops at the first that fails) or `share`.
        tests: at most so many, the first ones.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        score: str = "all",
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
        """See `RewardPart`."""
        await self._sandbox.start()

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """See `RewardPart`."""
        return list(await asyncio.gather(*(self._score(sample) for sample in samples)))

    async def close(self) -> None:
        """See `RewardPart`."""
        await self._sandbox.close()

    async def _score(self, sample: Sample) -> Score:
        try:
            tests = read_tests(sample.label)[: self._most]
        except ValueError as error:
            return RewardFailure("error", str(error))
        code = code_of(sample.response_text)
        if code is None:
            return Verdict(0.0, False, info={"passed": 0, "tests": len(tests), "why": "no code"})
        passed = 0
        why = ""
        for test in tests:
            failed = await self._failed(code, test)
            if isinstance(failed, RewardFailure):
                return failed
            passed += not failed
            why = why or failed
            if failed and not self._share:
                break
        right = passed == len(tests)
        score = passed / len(tests) if self._share else float(right)
        info = {"passed": passed, "tests": len(tests), **({"why": why} if why else {})}
        return Verdict(score, right, info=info)

    async def _failed(self, code: str, test: CodeTest) -> str | RewardFailure:
        """Why the test is not passed; empty where it is."""
        # drawn anew for each test: code that ends early with exit code 0 has not passed
        mark = secrets.token_hex(16)
        outcome = await self._sandbox.run(
            Program(
                code=_program(code, test, mark),
                stdin=test.stdin,
                timeout_s=self._timeout_s,
                memory_mb=self._memory_mb,
            )
        )
        if outcome.status == "error":
            return RewardFailure("error", f"the sandbox failed: {outcome.reason}")
        if not outcome.succeeded:
            return (outcome.reason or outcome.stderr.strip()[-200:] or "failed")[:200]
        return "" if _passed(outcome, test, mark) else "another result"


def _program(code: str, test: CodeTest, mark: str) -> str:
    if test.function is not None:
        args = json.dumps(list(test.args))
        return f"{code}\n{_CALL.format(name=test.function, args=args, mark=mark)}"
    if test.assertion is not None:
        return f"{code}\n{test.assertion}\nprint()\nprint({mark!r})\n"
    return code


def _passed(outcome: Outcome, test: CodeTest, mark: str) -> bool:
    if test.function is None and test.assertion is None:
        return _lines(outcome.stdout) == _lines(str(test.output))
    last = outcome.stdout.rstrip("\n").rpartition("\n")[2]
    if not last.startswith(mark):
        return False
    if test.function is None:
        return True
    try:
        result = json.loads(last.removeprefix(mark))
    except ValueError:
        return False
    # APPS wraps some results in a list
    return bool(result == test.output or [result] == test.output)


def _lines(text: str) -> list[list[str]]:
    """The words of every line; white space and empty lines at the end do not count."""
    return [line.split() for line in text.rstrip().splitlines()]
