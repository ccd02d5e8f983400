"""Environments: a class with tools, a class with `step`."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.errors import ConfigError, RolloutFailed
from rollout.asyncio_utils import within
from rollout.conversation.conversation import Conversation
from rollout.conversation.reply import Reply
from rollout.workflows.env import CUT, Step, ToolError, tools_of
from rollout.workflows.registry import build_workflow
from tests.unit.rollout.conversation.kit import (
    ScriptedModel,
    make_context,
    make_prompt,
    make_tokenizer,
)

HERE = __name__
closed: list[str] = []


class Calculator:
    """Tools of every kind."""

    def __init__(self, *, offset: int = 0) -> None:
        self.offset = offset
        self.asked: dict[str, Any] = {}

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked = row
        return [{"role": "user", "content": f"limit {row['limit']}"}]

    async def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        await asyncio.sleep(0.01 * a)  # the first call is the slowest
        return str(a + b + self.offset)

    def divide(self, a: int, b: int) -> float:
        """Divide two numbers, in a thread.

        Args:
            a: the first
            b: the second
        """
        if b == 0:
            raise ToolError("division by zero")
        return a / b

    def digits(self, n: int) -> str:
        """Return many digits.

        Args:
            n: how many
        """
        return "7" * n

    async def reward(self, conversation: Conversation) -> dict[str, float]:
        last = conversation.messages[-1]["content"]
        return {"right": float(last == str(self.asked["label"])), "turns": conversation.turns}

    async def close(self) -> None:
        closed.append("calculator")


class Guess:
    """Turns without tools."""

    def reset(self, row: dict[str, Any]) -> None:
        self.left = 2

    def step(self, reply: Reply) -> Step:
        self.left -= 1
        right = reply.text == "7"
        told = [{"role": "user", "content": "higher"}]
        return Step(told, reward=1.0 if right else -0.5, done=right or not self.left)

    def close(self) -> None:
        closed.append("guess")


class Broken(Guess):
    def step(self, reply: Reply) -> Step:
        raise KeyError("door")


def call(name: str, **arguments: Any) -> str:
    import json

    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def run(script: dict[int, str], **workflow: Any) -> tuple[list[Any], ScriptedModel]:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, lambda _, request: script[request.turn])
    settings = WorkflowConfig.model_validate({"name": "env", **workflow})
    built: Any = build_workflow(make_context(tokenizer, settings=settings))
    prompt = make_prompt(tokenizer, "1+2?", {"limit": 9, "label": 3})
    closed.clear()
    return asyncio.run(built.rollout(prompt, 4, 0, model)), model


def test_tools_run_together_and_are_answered_in_order() -> None:
    turns = {
        0: call("add", a=5, b=2) + call("divide", a=6, b=4) + call("divide", a=1, b=0),
        1: call("subtract", a=1) + call("add", a=1) + "<tool_call>{</tool_call>",
        2: call("digits", n=30),
        3: "3",
    }
    (sample,), model = run(turns, env=f"{HERE}:Calculator", max_tool_tokens=12)
    results = [m["content"] for m in sample.messages if m["role"] == "tool"]
    assert results[:4] == [
        "7",
        "1.5",
        "error: division by zero",
        "error: there is no tool 'subtract'; there is add, digits, divide",
    ]
    assert results[4] == "error: add: 'b' is a required property"
    assert results[5].startswith("error: a call must be JSON")
    # what a tool refuses is recorded as the model wrote it, though it is not run
    said = [m["tool_calls"] for m in sample.messages if m.get("tool_calls")]
    written = [(one["function"]["name"], one["function"]["arguments"]) for one in said[1]]
    assert written == [("subtract", {"a": 1}), ("add", {"a": 1})]
    assert results[6] == "7" * 12 + CUT
    assert sample.outcome == {"right": 1.0, "turns": 4.0}
    assert (sample.measured["tool_calls"], sample.measured["tool_errors"]) == (7, 4)
    assert sample.measured["tool_s"] >= 0.05  # the slowest call of the first turn
    assert sample.response_text == "3"
    first = model.tokenizer.decode(model.requests[0].prompt.tolist())
    assert "limit 9" in first
    assert '"name": "divide"' in first
    assert closed == ["calculator"]


class Typed:
    def take(
        self,
        n: int | str = 0,
        *,
        x: float = 0.0,
        sure: bool = True,
        way: Literal["up", "down"] = "up",
        of: list[int] | None = None,
        what: Any = None,
        either: list[int] | int = 0,
    ) -> str:
        """Take anything.

        Args:
            n: a number or a name
            x: a number
            sure: or not
            way: where to
            of: numbers
            what: anything
            either: one or many
        """
        return "taken"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"n": "a", "x": 1, "sure": False, "way": "down", "of": [1], "either": [2]}, ""),
        ({"n": 10**30, "x": 0.5, "of": None, "what": {"a": None}, "either": 2}, ""),
        ({"n": 3.0}, ""),  # a whole number to JSON schema
        ({"n": True}, 'n: got true, expected type: ["integer", "string"]'),
        ({"n": 1.5}, 'n: got 1.5, expected type: ["integer", "string"]'),
        ({"x": "two"}, 'x: got "two", expected type: "number"'),
        ({"x": None}, 'x: got null, expected type: "number"'),
        ({"sure": 1}, 'sure: got 1, expected type: "boolean"'),
        ({"way": "left"}, 'way: got "left", expected enum: ["up", "down"]'),
        ({"of": {"a": 1}}, 'of: got {"a": 1}, expected anyOf: [{"type": "array"'),
        ({"of": ["a"]}, 'of.0: got "a", expected type: "integer"'),
        ({"either": "x"}, 'either: got "x", expected anyOf: [{"type": "array"'),
        ({"other": 1}, "Additional properties are not allowed ('other' was unexpected)"),
    ],
)
def test_an_argument_of_another_type_is_told_to_the_model(
    arguments: dict[str, Any], said: str
) -> None:
    (sample,), _ = run({0: call("take", **arguments), 1: "done"}, env=f"{HERE}:Typed")
    expected = f"error: take: {said}" if said else "taken"
    told = sample.messages[2]["content"]
    assert told.startswith(expected)
    assert bool(said) or told == "taken"


class Loose(dict[str, int]):
    """Its tools need no object; methods of its base class are none."""

    def __init__(self) -> None:
        super().__init__()

    @staticmethod
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: the first
            b: the second
        """
        return a + b

    @classmethod
    def double(cls, a: int) -> int:
        """Double.

        Args:
            a: a number
        """
        return cls.add(a, a)


def test_methods_without_an_object_are_tools_too() -> None:
    assert {
        name: tool["function"]["parameters"]["required"] for name, tool in tools_of(Loose).items()
    } == {"add": ["a", "b"], "double": ["a"]}
    turns = {0: call("add", a=1, b=2) + call("double", a=2) + call("add", a=1), 1: "done"}
    (sample,), _ = run(turns, env=f"{HERE}:Loose")
    assert [m["content"] for m in sample.messages if m["role"] == "tool"] == [
        "3",
        "4",
        "error: add: 'b' is a required property",
    ]


class Cards:
    def __init__(self, used: list[int]) -> None:
        self.used = used

    def reset(self, row: dict[str, Any]) -> None:
        self.cards, self.label = row["cards"], row["label"]

    def draw(self) -> str:
        """Draw a card."""
        self.used.append(self.cards.pop())
        self.label["drawn"] = True
        return str(self.cards)

    def reward(self, conversation: Conversation) -> dict[str, float]:
        return {"used": len(self.used), "left": len(self.cards)}


def test_rollouts_share_neither_row_nor_options() -> None:
    tokenizer = make_tokenizer()
    options = {"env": f"{HERE}:Cards", "options": {"used": []}}
    settings = WorkflowConfig.model_validate({"name": "env", **options})
    built: Any = build_workflow(make_context(tokenizer, settings=settings))
    prompt = make_prompt(tokenizer, "draw", {"cards": [1, 2], "label": {}})
    model = ScriptedModel(tokenizer, lambda _, request: "no" if request.turn else call("draw"))

    async def play() -> list[list[Any]]:
        return await asyncio.gather(*(built.rollout(prompt, 0, i, model) for i in range(2)))

    for (sample,) in asyncio.run(play()):
        assert sample.outcome == {"used": 1.0, "left": 1.0}
    assert prompt.row == {"cards": [1, 2], "label": {}}


def test_step_rewards_turns_until_it_is_done() -> None:
    (sample,), _ = run({0: "5", 1: "7"}, env=f"{HERE}:Guess")
    assert sample.token_rewards.tolist() == [0, -0.5, 0, 1.0]
    assert [m["content"] for m in sample.messages] == ["1+2?", "5", "higher", "7"]
    assert (sample.finish_reason, closed) == ("stop", ["guess"])


def test_an_environment_that_fails_is_closed() -> None:
    with pytest.raises(KeyError):
        run({0: "5"}, env=f"{HERE}:Broken")
    assert closed == ["guess"]


class Hostile(Calculator):
    """Tools that fail in every way but ToolError."""

    over = threading.Event()

    def hangs(self) -> str:
        """Hang in a thread."""
        self.over.wait(20)
        return "late"

    async def waits(self) -> str:
        """Hang in the loop."""
        await asyncio.sleep(600)
        return "late"

    def exits(self) -> str:
        """Exit in a thread."""
        sys.exit(3)

    async def exits_too(self) -> str:
        """Exit in the loop."""
        sys.exit(3)

    async def breaks(self) -> str:
        """Lose the sandbox."""
        raise ConnectionError("sandbox down")


def only_these_are_late(monkeypatch: pytest.MonkeyPatch, *methods: str) -> None:
    """Give every other call of an environment a minute, on a machine that is busy."""

    def patient(seconds: float, work: Any, late: Callable[[], str]) -> Any:
        return within(seconds if late().startswith(methods) else 60.0, work, late)

    monkeypatch.setattr("rollout.workflows.env.within", patient)


@pytest.mark.parametrize(
    ("tool", "error", "message"),
    [
        ("hangs", RolloutFailed, r"Hostile\.hangs took more than 0.05 s \(rollout\.workflow\.tool"),
        (
            "waits",
            RolloutFailed,
            r"Hostile\.waits took more than 0.05 s .*test_env\.py:\d+ in wait",
        ),
        ("exits", RolloutFailed, r"SystemExit: 3 \(.*test_env\.py:\d+ in exits\)"),
        ("exits_too", RolloutFailed, r"SystemExit: 3 .* in exits_too\)"),
        ("breaks", ConnectionError, "sandbox down"),
    ],
)
def test_what_is_no_tool_error_voids_the_rollout(
    tool: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the environment is closed."""
    only_these_are_late(monkeypatch, "Hostile.hangs", "Hostile.waits")
    both = call("add", a=0, b=1) + call(tool)
    with pytest.raises(error, match=message):
        run({0: both}, env=f"{HERE}:Hostile", tool_timeout_s=0.05)
    assert closed == ["calculator"]
    Hostile.over.set()


class ClosesBadly(Guess):
    over = threading.Event()

    def close(self) -> None:
        closed.append("guess")
        raise ConnectionError("gone")


class HangsAtItsEnd(Guess):
    async def close(self) -> None:
        await asyncio.sleep(600)


@pytest.mark.parametrize(
    ("name", "said"),
    [("ClosesBadly", "failed: gone"), ("HangsAtItsEnd", "HangsAtItsEnd.close took more than")],
)
def test_a_close_that_fails_is_a_warning(
    name: str, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_these_are_late(monkeypatch, "HangsAtItsEnd.close")
    (sample,), _ = run({0: "5", 1: "7"}, env=f"{HERE}:{name}", tool_timeout_s=0.05)
    assert sample.finish_reason == "stop"
    assert said in caplog.text


class ClosesBadlyBehindAnError(ClosesBadly):
    def step(self, reply: Reply) -> Step:
        raise KeyError("door")


def test_a_close_that_fails_hides_no_error() -> None:
    with pytest.raises(KeyError, match="door"):
        run({0: "5"}, env=f"{HERE}:ClosesBadlyBehindAnError")


class NoStep(Guess):
    def step(self, reply: Reply) -> Any:
        return "go on"


def test_a_step_that_is_none_voids_the_rollout() -> None:
    with pytest.raises(
        RolloutFailed, match=r"step\(\) returned 'go on', expected a Step \(.*:\d+ in"
    ):
        run({0: "5"}, env=f"{HERE}:NoStep")


class Graded(Guess):
    outcome: Any = None

    def reward(self, conversation: Conversation) -> Any:
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "found"),
    [
        (1, {"reward": 1.0}),
        (np.float32(0.5), {"reward": 0.5}),
        (True, {"reward": 1.0}),
        ({"a": np.float32(0.5), "b": 1}, {"a": 0.5, "b": 1.0}),
        (None, {}),
    ],
)
def test_an_environment_rewards_with_numbers(
    monkeypatch: pytest.MonkeyPatch, outcome: Any, found: dict[str, float]
) -> None:
    monkeypatch.setattr(Graded, "outcome", outcome)
    (sample,) = run({0: "7"}, env=f"{HERE}:Graded")[0]
    assert sample.outcome == found


@pytest.mark.parametrize("outcome", ["good", (1.0, 0.0), {"right": 1.0, "short": "x"}])
def test_any_other_reward_is_named_with_its_place(
    monkeypatch: pytest.MonkeyPatch, outcome: Any
) -> None:
    monkeypatch.setattr(Graded, "outcome", outcome)
    kind = type(outcome).__name__
    said = rf"reward\(\) returned {kind} .* expected a number or .*test_env\.py:\d+ in"
    with pytest.raises(RolloutFailed, match=said):
        run({0: "7"}, env=f"{HERE}:Graded")


class Untyped:
    def look(self, place):  # type: ignore[no-untyped-def]
        """Look."""


class Both(Guess):
    def look(self, place: str) -> str:
        """Look.

        Args:
            place: where
        """
        return place


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        ({"env": f"{HERE}:Untyped"}, r"rollout\.workflow\.env: Untyped\.look is a public method"),
        ({"env": f"{HERE}:Both"}, r"has both tools \(look\) and step\(\)"),
        ({"env": f"{HERE}:Nowhere"}, r"rollout\.workflow\.env: .*has no 'Nowhere'"),
        ({}, r"rollout\.workflow\.env: missing: name a class, .* or give `mcp`"),
        ({"env": f"{HERE}:Guess", "tools": 3}, r"got an unexpected keyword argument 'tools'"),
        (
            {"env": f"{HERE}:Calculator", "options": {"ofset": 1}},
            r"rollout\.workflow\.options: .*unexpected keyword argument 'ofset'",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(workflow: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run({}, **workflow)
