"""No exception of a grader leaves the scorer, wherever the grader runs and whoever wrote it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from reward_kit import score, score_by
from user_rewards import EXCEPTIONS

from rlcore.config.sections.reward_services import JudgeConfig, RewardServiceConfig
from rlcore.data.sample import Sample
from rollout.rewards import scorer as scorers
from rollout.rewards.base import LocalPart, RewardPart, Score, Verdict, each, workflow_outcome
from rollout.rewards.graders import code
from rollout.rewards.graders.code import CodePart
from rollout.rewards.services import JudgePart, ServicePart

BAD = "bad"
URL = "http://127.0.0.1:9"
NAMES = [*EXCEPTIONS]


def raises(name: str) -> Any:
    raise EXCEPTIONS[name]()


def local(name: str, monkeypatch: pytest.MonkeyPatch) -> RewardPart:
    return LocalPart(lambda one: raises(name) if one.response_text == BAD else Verdict(1.0, True))


class Outcome(float):
    """An environment's reward that raises when it is read as a number."""

    name = ""

    def __float__(self) -> float:
        return float(raises(self.name))


def workflow(name: str, monkeypatch: pytest.MonkeyPatch) -> RewardPart:
    monkeypatch.setattr(Outcome, "name", name)
    return LocalPart(partial(workflow_outcome, "p"))


def judge(name: str, monkeypatch: pytest.MonkeyPatch) -> RewardPart:
    made = JudgePart("p", JudgeConfig(url=[URL], model="m"))
    return asking(made, {"choices": [{"message": {"content": "[[10]]"}}]}, name, monkeypatch)


def service(name: str, monkeypatch: pytest.MonkeyPatch) -> RewardPart:
    return asking(ServicePart("p", RewardServiceConfig(url=[URL])), 1.0, name, monkeypatch)


def asking(made: RewardPart, answer: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> RewardPart:
    async def post(body: Any, *_: Any) -> Any:
        return raises(name) if BAD in str(body) else answer

    monkeypatch.setattr(made, "_client", SimpleNamespace(post=post, close=_closed))
    return made


async def _closed() -> None:
    pass


PARTS: dict[str, tuple[Callable[..., RewardPart], dict[str, Any], bool]] = {
    # of a built-in grader the answer is wrong, of any other part it is not known
    "local": (local, {"function": "exact_match"}, True),
    "workflow": (workflow, {"source": "workflow"}, False),
    "judge": (judge, {"judge": {"url": URL, "model": "m"}}, False),
    "service": (service, {"service": {"url": URL}}, False),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", PARTS)
def test_an_exception_in_the_process_of_the_service_is_a_failure_of_its_sample(
    where: str, name: str, monkeypatch: pytest.MonkeyPatch, sample: Any
) -> None:
    make, config, wrong = PARTS[where]
    samples = [sample("2", index=0), sample(BAD, index=1), sample("2", index=2)]
    for one in samples:
        one.outcome = {"p": Outcome(1.0) if one.response_text == BAD else 1.0}
    counts = score_by(make(name, monkeypatch), config, samples)
    assert [s.reward for s in samples[::2]] == [1.0, 1.0]
    assert (counts.samples, counts.errors, counts.timeouts) == (3, 1, 0)
    said = samples[1].metadata["reward_error"]
    kind = type(EXCEPTIONS[name]())
    # a value or an answer that is none has words of its own
    assert f"raised {kind.__name__}" in said or issubclass(kind, ValueError | OverflowError)
    assert samples[1].is_scored is wrong
    assert len(counts.unscored) == (not wrong)
    if wrong:
        assert (samples[1].reward, samples[1].metadata["correct"]) == (0.0, False)
    else:
        assert "correct" not in samples[1].metadata


@pytest.mark.parametrize("name", NAMES)
def test_an_exception_while_code_is_judged(
    name: str, monkeypatch: pytest.MonkeyPatch, sample: Any
) -> None:
    async def run(_: Any) -> Any:
        return SimpleNamespace(status="finished", exit_code=0, stdout="")

    async def nothing() -> None:
        pass

    monkeypatch.setattr(code, "passed", lambda *_: raises(name))
    sandbox: Any = SimpleNamespace(start=nothing, run=run, close=nothing)
    samples = [sample("```python\nprint(1)\n```", {"inputs": [""], "outputs": ["1"]})]
    counts = score_by(CodePart(sandbox), {"function": "code"}, samples)
    assert (counts.errors, counts.unscored) == (1, [])
    assert (samples[0].reward, samples[0].metadata["correct"]) == (0.0, False)


@pytest.mark.parametrize("name", NAMES)
def test_an_exception_of_a_whole_part(name: str, sample: Any) -> None:
    """What no part took itself: the last guard."""

    class Broken(RewardPart):
        async def score(self, samples: Sequence[Sample]) -> list[Score]:
            return list(raises(name))

    counts = score_by(Broken(), {"source": "workflow"}, [sample("2"), sample("3")])
    assert len(counts.unscored) == 2


def test_exceptions_in_a_worker(sample: Any) -> None:
    samples = [sample(name, index=index) for index, name in enumerate([*NAMES, "fine"])]
    parts = {"f": {"function": "user_rewards:raises_what_the_response_says"}}
    (counts,) = score({"parts": parts, "workers": 1}, samples)
    assert (counts.errors, len(counts.unscored)) == (len(NAMES), len(NAMES))
    for one, name in zip(samples, NAMES):
        assert f"raised {EXCEPTIONS[name]().__class__.__name__}" in one.metadata["reward_error"]
    assert samples[-1].reward == 1.0


def test_a_cancelled_score_is_cancelled_all_the_same() -> None:
    async def scenario() -> None:
        async def forever(_: Sample) -> Score:
            await asyncio.sleep(3600)
            return Verdict(1.0)

        task = asyncio.ensure_future(each([None], forever))  # type: ignore[list-item]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [1, 9, 10, 37])
def test_a_cause_is_logged_at_powers_of_ten(
    count: int, sample: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = LocalPart(lambda one: raises("RecursionError"))
    score_by(part, {"function": "exact_match"}, [sample("2", index=i) for i in range(count)])
    said = [record.getMessage() for record in caplog.records if record.name == scorers.__name__]
    assert len(said) == len(str(count))
    assert said[0].endswith("more such failures are only counted")
    assert all("10 so far" in line for line in said[1:])
