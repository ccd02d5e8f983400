"""Tries of a rollout: what is tried again, what is given up, what ends the run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from patient_loop import LOOP_TIME, run_patiently

from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.data.generation import Completion, Generate, GenerateRequest, SamplingParams
from rlcore.data.sample import VersionSpan
from rlcore.errors import ConfigError, DataError, EngineFailed, RolloutFailed, UserError
from rollout.collection import attempts as attempts_module
from rollout.collection.attempts import Aborted, Attempts, GivenUp, PartialRollouts
from rollout.failures import Failure, commonest

SAMPLING = SamplingParams(max_new_tokens=4)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts_module, "RETRY_S", 0.001)
    monkeypatch.setattr(attempts_module, "CLOCK_S", 0.01)


def request(turn: int = 0, prompt: tuple[int, ...] = (1, 2)) -> GenerateRequest:
    return GenerateRequest(np.array(prompt, np.int32), SAMPLING, draw=3, turn=turn)


class Engine:
    """Answers each request with tokens that it never gives again."""

    def __init__(self, *, seconds: float = 0.0, reason: str = "stop") -> None:
        self.seconds = seconds
        self.reason = reason
        self.asked: list[int] = []
        self.error: Exception | None = None

    async def __call__(self, asked: GenerateRequest) -> list[Completion]:
        self.asked.append(asked.turn)
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        made = [] if self.reason == "abort" else [len(self.asked)]
        spans = (VersionSpan(1, 0, len(made)),)
        logprobs = np.zeros(len(made), np.float32)
        return [Completion(np.array(made, np.int32), logprobs, self.reason, spans)]  # type: ignore[arg-type]


def run(
    make: Callable[[Generate], Awaitable[Any]],
    engine: Engine | None = None,
    *,
    check: Callable[[Any, Any], Any] = lambda found, versions: found,
    attempts: Attempts | None = None,
    of: object = None,
    **settings: Any,
) -> Any:
    made = attempts or attempts_of(**settings)
    work = made.run(make, engine or Engine(), check, of=of or make, where="f:1 (draw 3)")
    return run_patiently(asyncio.wait_for(work, 20))


def attempts_of(**settings: Any) -> Attempts:
    config = WorkflowConfig.model_validate({"name": "mine", **settings})
    return Attempts(config, PartialRollouts(None))  # type: ignore[arg-type]


class Flaky:
    """Fails in its first tries as `act` says, behind one turn, then returns what it was told."""

    def __init__(self, act: Callable[[], Any], *, failing: int = 1) -> None:
        self.act = act
        self.failing = failing
        self.tries = 0
        self.told: list[int] = []

    async def __call__(self, generate: Generate) -> list[int]:
        self.tries += 1
        self.told = [int((await generate(request()))[0].tokens[0])]
        if self.tries <= self.failing:
            given = self.act()
            if asyncio.iscoroutine(given):
                await given
            elif given is not None:
                return given  # type: ignore[no-any-return]
        self.told += [int((await generate(request(turn=1)))[0].tokens[0])]
        return self.told


def interrupts() -> None:
    raise KeyboardInterrupt


def raises() -> None:
    raise KeyError("door")


def cancels() -> None:
    raise asyncio.CancelledError


def a_list(found: Any, _: Any = ()) -> Any:
    if not isinstance(found, list):
        raise RolloutFailed("result", f"it returned {found!r}")
    return found


FAILURES = {
    "error": (raises, "KeyError: 'door' (*test_attempts.py:*in raises)"),
    "exit": (lambda: sys.exit(3), "SystemExit: 3 (*test_attempts.py:*in <lambda>)"),
    "interrupt": (interrupts, "KeyboardInterrupt:  (*test_attempts.py:*in interrupts)"),
    "cancelled": (cancels, "it was cancelled from within (*test_attempts.py:*in __call__)"),
    "timeout": (
        lambda: asyncio.sleep(600),
        "it took more than 0.05 s (rollout.workflow.timeout_s) (*test_attempts.py:*in __call__)",
    ),
    "result": (lambda: 7, "it returned 7 (*test_attempts.py:*in __call__)"),
}
KINDS = {"interrupt": "exit", "cancelled": "error"}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_rollout_that_fails_is_tried_again_and_told_the_same(kind: str) -> None:
    engine = Engine()
    flaky = Flaky(FAILURES[kind][0])
    attempts = attempts_of(timeout_s=0.05)
    assert run(flaky, engine, check=a_list, attempts=attempts) == [1, 2]
    assert engine.asked == [0, 1], "what was answered is not asked for again"
    assert attempts.failed == {KINDS.get(kind, kind): 1}


@pytest.mark.parametrize("kind", FAILURES)
def test_after_its_last_try_it_is_given_up(kind: str) -> None:
    import fnmatch

    act, said = FAILURES[kind]
    flaky = Flaky(act, failing=9)
    with pytest.raises(GivenUp) as caught:
        run(flaky, check=a_list, timeout_s=0.05, retries=2)
    failure = caught.value.failure
    assert flaky.tries == 3
    assert failure.kind == KINDS.get(kind, kind)
    assert fnmatch.fnmatch(str(failure), f"workflow mine failed on f:1 (draw 3): {said}"), failure


def test_without_retries_nothing_is_tried_again() -> None:
    flaky = Flaky(raises)
    with pytest.raises(GivenUp):
        run(flaky, retries=0)
    assert flaky.tries == 1


def test_two_policies_asked_the_same_give_answers_of_their_own() -> None:
    engine = Engine()

    async def make(generate: Generate) -> list[int]:
        asked = (request(), replace(request(), policy="earlier"), request())
        return [int((await generate(one))[0].tokens[0]) for one in asked]

    own, other, again = run(make, engine, retries=1)
    assert own == again != other


def test_another_request_under_an_old_address_is_asked_anew() -> None:
    engine = Engine()
    tries = 0

    async def make(generate: Generate) -> list[int]:
        nonlocal tries
        tries += 1
        (found,) = await generate(request(prompt=(tries,)))
        if tries == 1:
            raises()
        return [int(found.tokens[0])]

    assert run(make, engine) == [2]


def test_waits_for_an_engine_are_not_the_workflows() -> None:
    async def make(generate: Generate) -> list[int]:
        found = await asyncio.gather(*(generate(request(turn=turn)) for turn in range(2)))
        return [len(found)]

    assert run(make, Engine(seconds=0.2), timeout_s=0.05) == [2]


def test_its_own_time_adds_up_over_turns() -> None:
    began: list[float] = []

    async def make(generate: Generate) -> None:
        for turn in range(100):
            began.append(LOOP_TIME.monotonic())
            await generate(request(turn))
            await asyncio.sleep(0.02)

    with pytest.raises(GivenUp, match="took more than"):
        run(make, timeout_s=0.1, retries=0)
    assert began[-1] - began[0] < 1.5


@pytest.mark.parametrize("swallowed", [False, True])
def test_the_failure_of_an_engine_is_none_of_the_rollout(swallowed: bool) -> None:
    engine = Engine()
    engine.error = EngineFailed("engine-0 died")

    async def make(generate: Generate) -> list[int]:
        try:
            await generate(request())
        except EngineFailed:
            if not swallowed:
                raise ValueError("lost") from None
        return []

    with pytest.raises(EngineFailed, match="engine-0 died"):
        run(make, engine)
    assert engine.asked == [0]


def test_a_wrong_configuration_is_none_either() -> None:
    async def make(generate: Generate) -> None:
        raise ConfigError("rollout.workflow.history: choose")

    with pytest.raises(ConfigError, match="choose"):
        run(make)


def test_what_a_tool_says_ends_no_run() -> None:
    """A web page that the tokenizer cannot encode, say."""
    tries: list[int] = []

    async def make(generate: Generate) -> None:
        tries.append(1)
        raise DataError("rollout.workflow: the tokenizer cannot encode a lone surrogate")

    with pytest.raises(GivenUp, match="cannot encode a lone surrogate"):
        run(make, retries=1)
    assert len(tries) == 2


def test_a_request_that_no_engine_takes_is_no_failure_of_the_engine() -> None:
    """A workflow that goes on without the answer may, as the gateway does; else the run ends."""
    engine = Engine()
    engine.error = UserError("draw 0: SGLang takes 32 stop strings, got 40")
    found: list[int] = []

    async def make(generate: Generate) -> list[int]:
        with suppress(UserError):
            await generate(request())
        return found

    assert run(make, engine) is found

    async def gives_it_on(generate: Generate) -> None:
        await generate(request())

    with pytest.raises(UserError, match="32 stop strings"):
        run(gives_it_on, engine)


def test_what_fails_behind_an_aborted_turn_is_made_again() -> None:
    flaky = Flaky(raises, failing=9)
    with pytest.raises(Aborted):
        run(flaky, Engine(reason="abort"))
    assert flaky.tries == 1


def test_a_try_that_resists_its_end_gets_no_answer_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts_module, "CANCEL_S", 0.01)
    engine = Engine()
    said: list[str] = []
    tries = 0

    async def make(generate: Generate) -> list[int]:
        nonlocal tries
        tries += 1
        if tries > 1:
            await asyncio.sleep(0.05)
            return [tries]
        for _ in range(2):  # deaf to the cancellation
            try:
                await asyncio.sleep(0.08)
            except asyncio.CancelledError:
                continue
        try:
            await generate(request())
        except RolloutFailed as error:
            said.append(str(error))
        return []

    async def main() -> Any:
        attempts = attempts_of(timeout_s=0.06)
        found = await attempts.run(make, engine, a_list, of=make, where="f:1 (draw 3)")
        while not said:
            await asyncio.sleep(0.01)
        return found

    assert run_patiently(asyncio.wait_for(main(), 20)) == [2]
    assert (said, engine.asked) == (["this try of the rollout has ended"], [])


def test_a_failure_of_a_workflow_of_ours_names_no_line_of_it() -> None:
    """Such failures are alike by their reason, since no place in a user's code tells them apart."""

    async def make(generate: Generate) -> None:
        raise RolloutFailed("error", "the program ended with exit code 1")

    class Ours:
        rollout = make

    with pytest.raises(GivenUp) as given_up:
        run(make, of=Ours(), retries=0)
    assert given_up.value.failure.place == ""


def test_a_group_that_is_given_up_ends_its_tries() -> None:
    ended: list[str] = []

    async def make(generate: Generate) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("cleaned up")

    async def main() -> None:
        attempts = attempts_of()
        work = attempts.run(make, Engine(), a_list, of=make, where="f:1 (draw 3)")
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not attempts.failed

    run_patiently(asyncio.wait_for(main(), 20))
    assert ended == ["cleaned up"]


def test_the_commonest_failure_is_that_of_a_place() -> None:
    def failure(reason: str, place: str) -> Failure:
        return Failure("error", "mine", "f:1 (draw 3)", reason, place)

    here, there = failure("KeyError: 1", " (a.py:3 in f)"), failure("no", " (a.py:9 in f)")
    other = failure("KeyError: 2", " (a.py:3 in f)")
    assert commonest([there, here, other]) == (other, 2), "the newest of them"
