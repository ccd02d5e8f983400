"""Code against tests. The sandbox is a fake that runs the tests' own, harmless programs at once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from rlcore.config.sections.reward import RewardConfig
from rlcore.errors import ConfigError
from rollout.rewards.base import RewardFailure
from rollout.rewards.graders.code import CodePart, code_of, read_tests
from rollout.rewards.scorer import build_scorer
from rollout.sandbox.base import Outcome, Program


class PlainProcess:
    """No sandbox at all: the programs are written here."""

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.broken = False

    async def start(self) -> None:
        pass

    async def run(self, program: Program) -> Outcome:
        self.programs.append(program)
        if self.broken:
            return Outcome("error", reason="no server answers")
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", program.code],
                input=program.stdin,
                capture_output=True,
                text=True,
                timeout=program.timeout_s,
            )
        except subprocess.TimeoutExpired:
            return Outcome("timeout", reason=f"ran longer than {program.timeout_s:g} s")
        return Outcome("finished", done.stdout, done.stderr, done.returncode)

    async def close(self) -> None:
        pass


@pytest.fixture
def sandbox() -> PlainProcess:
    return PlainProcess()


def grade(sandbox: PlainProcess, sample, **options):
    (score,) = asyncio.run(CodePart(sandbox, **options).score([sample]))
    return score


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nThat is all."


SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
ADDS = "a, b = map(int, input().split())\nprint(a + b)"
ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize("label", [SUMS, json.dumps(SUMS)])
def test_output_for_an_input(sample, sandbox, label):
    verdict = grade(sandbox, sample(block(ADDS), label))
    assert (verdict.score, verdict.correct) == (1.0, True)
    assert verdict.info == {"passed": 2, "tests": 2}
    assert [program.stdin for program in sandbox.programs] == ["1 2\n", "3 4\n"]


def test_the_first_failure_ends_it_unless_a_share_is_asked_for(sample, sandbox):
    wrong = sample(block("print(7)"), SUMS)
    verdict = grade(sandbox, wrong)
    assert (verdict.score, verdict.correct, len(sandbox.programs)) == (0.0, False, 1)
    assert verdict.info["why"] == "another result"
    verdict = grade(sandbox, wrong, score="share")
    assert (verdict.score, verdict.correct) == (0.5, False)
    verdict = grade(sandbox, sample(block("print(3)"), SUMS), tests=1)
    assert verdict.correct


@pytest.mark.parametrize(
    ("label", "right"),
    [
        (["assert add(1, 2) == 3", "assert add(0, 0) == 0"], True),
        (["assert add(1, 2) == 4"], False),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, True),
        ({"fn_name": "add", "inputs": [[[1], [2]]], "outputs": [[1, 2]]}, True),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}, True),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [4]}, False),
        ({"fn_name": "missing", "inputs": [[1, 2]], "outputs": [3]}, False),
        ([{"input": "", "output": ""}], True),
    ],
)
def test_functions_and_assertions(sample, sandbox, label, right):
    assert grade(sandbox, sample(block(ADD), label)).correct is right


def test_a_method_of_solution_is_called(sample, sandbox):
    code = "class Solution:\n    def add(self, a, b):\n        print('hello')\n        return a + b"
    label = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    assert grade(sandbox, sample(block(code), label)).correct


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("import sys\nsys.exit(0)", ["assert False"]),
        ("import os\nos._exit(0)", {"fn_name": "f", "inputs": [[]], "outputs": [1]}),
        (
            "def f():\n    print('1')\n    raise SystemExit(0)",
            {"fn_name": "f", "inputs": [[]], "outputs": [1]},
        ),
        ("print('3')\nraise ValueError('after')", {"inputs": ["1 2"], "outputs": ["3"]}),
    ],
)
def test_code_that_leaves_early_has_not_passed(sample, sandbox, code, label):
    assert grade(sandbox, sample(block(code), label)).correct is False


def test_time_is_up_and_no_code_are_wrong_but_a_broken_sandbox_is_a_failure(sample, sandbox):
    slow = grade(sandbox, sample(block("while True: pass"), SUMS), timeout_s=0.5)
    assert slow.correct is False
    assert slow.info["why"] == "ran longer than 0.5 s"
    assert grade(sandbox, sample("I cannot.", SUMS)).info["why"] == "no code"
    sandbox.broken = True
    failure = grade(sandbox, sample(block(ADDS), SUMS))
    assert failure == RewardFailure("error", "the sandbox failed: no server answers")


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nor\n```py\nb\n```", "b\n"),
        ("```python\na\n``` and ```python\nb", "a\n"),
        ("<think>```python\na\n```</think> none", None),
        ("a = 1", None),
    ],
)
def test_the_last_whole_block_counts(response, code):
    assert code_of(response) == code


@pytest.mark.parametrize("label", ["4", None, [], {}, [3], {"inputs": [], "outputs": []}])
def test_a_label_without_tests_is_refused(label):
    with pytest.raises(ValueError, match="the label must be tests"):
        read_tests(label)


def test_code_of_a_configuration_runs_in_its_sandbox(sample):
    config = RewardConfig.model_validate({"parts": {"code": {"function": "code"}}})
    batch = [sample(block(ADDS), SUMS), sample(block("print(7)"), SUMS)]

    async def scenario() -> None:
        scorer = build_scorer(config, vocab_size=31)
        try:
            await scorer.start()
            await scorer.score(batch)
        finally:
            await scorer.close()

    try:
        asyncio.run(scenario())
    except ConfigError as error:
        pytest.skip(f"no program can be confined on this machine: {str(error)[:200]}")
    assert [s.reward for s in batch] == [1.0, 0.0]
    assert [s.metadata["correct"] for s in batch] == [True, False]
