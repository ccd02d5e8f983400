"""What cannot work is refused before step 1, and what never works ends the run at once."""

from __future__ import annotations

import inspect

import pytest
import user_rewards
from reward_kit import score

from rlcore.errors import ConfigError
from rollout.failures import commonest
from rollout.rewards.worker import load_function


def part(function: str, **args) -> dict:
    parts = {"mine": {"function": f"user_rewards:{function}", "args": args}}
    return {"parts": parts, "workers": 1, "on_error": -1.0}


def line_of(function, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        ("two_arguments", {}, r"as two_arguments\(sample\).*'label'.*user_rewards.py:\d"),
        ("scaled", {"faktor": 2}, r"is called as scaled\(sample, faktor=2\).*'faktor'"),
        ("coroutine", {}, "is `async def`"),
        ("NotCallable", {}, "give it a method __call__"),
        ("Picky", {}, r"is called as Picky\(\).*'length'"),
        ("Picky", {"length": -1}, r"ValueError: length -1 is .* at its construction \(.*\.py:"),
        ("TwoCalls", {}, r"__call__\(self, sample\), but takes \(self, sample, label\)"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_by_name(function, args, message):
    with pytest.raises(ConfigError, match=rf"reward.parts.m.function: 'user_rewards.*{message}"):
        load_function(f"user_rewards:{function}", args, key="reward.parts.m.function")


def test_a_wrong_signature_is_refused_when_workers_start():
    with pytest.raises(
        ConfigError, match=r"reward\.parts\.mine\.function.*two_arguments\(sample\)"
    ):
        score(part("two_arguments"))


def test_arguments_go_to_functions_and_to_constructors(sample):
    batch = [sample("abc"), sample("ab")]
    score(part("scaled", factor=2.0), batch)
    assert [s.reward for s in batch] == [6.0, 4.0]
    score(part("Picky", length=3, reward=5.0), batch)
    assert [s.reward for s in batch] == [5.0, 0.0]
    assert [s.metadata["correct"] for s in batch] == [True, False]
    assert batch[1].reward_parts == {"mine": 0.0, "mine.calls": 2.0}, "constructed once"
    assert batch[1].metadata["reward_info"] == {"mine": {"length": 2}}


def test_a_failure_names_part_function_prompt_and_line(sample):
    batch = [sample("abc", index=i) for i in range(4)]
    line = line_of(user_rewards.on_a_line, 'response["score"]')
    (counts,) = score(part("on_a_line"), batch)
    assert (counts.samples, counts.failed, len(counts.unscored)) == (4, 4, 4)
    failure, count = commonest(counts.unscored)
    assert count == 4
    assert str(failure).startswith(
        "reward.parts.mine (user_rewards:on_a_line) failed on sample 3 of draw 4 (book.jsonl:7):"
        " raised TypeError: string indices must be integers"
    )
    assert f"user_rewards.py:{line} in on_a_line)" in failure.place


def test_a_function_that_returns_nothing_is_named_too(sample):
    line = line_of(user_rewards.nothing, "def nothing")
    (counts,) = score(part("nothing"), [sample("abc")])
    (failure,) = counts.unscored
    assert failure.reason == "returned NoneType 'None', expected a number"
    assert failure.place.endswith(f".py:{line} in nothing)")


def test_another_part_that_works_does_not_hide_a_broken_one(sample):
    config = part("nothing")
    config["parts"]["right"] = {"function": "exact_match"}
    (counts,) = score(config, [sample("2")])
    assert [failure.what for failure in counts.unscored] == [
        "reward.parts.mine (user_rewards:nothing)"
    ]
