"""An audit finds what a reward pays for, and leaves honest rewards and the run in peace."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.sections.reward import RewardConfig
from rlcore.data.prompts import PromptSet
from rlcore.launch.commands.init_model import ALPHABETS, char_tokenizer
from rollout.rewards import audit
from rollout.rewards.audit import Finding, RewardAudit
from rollout.rewards.audit_answers import (
    EMPTY,
    EXPRESSION,
    KINDS,
    LISTED,
    NOTHING,
    NUMBER,
    PROMPT,
    REFUSED,
    RIGHT,
    THOUGHT,
    Kind,
)
from rollout.rewards.scorer import Scorer, build_scorer
from tests.unit.data.prompt_sets import load_set

SUMS = [
    ([{"role": "user", "content": f"What is {a}+{b}? Answer with the number only."}], str(a + b))
    for a, b in zip(range(11, 41), range(57, 87), strict=True)
]


def prompts(folder: Path, rows: list[tuple[Any, Any]]) -> PromptSet:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "label": a}) + "\n" for p, a in rows))
    tokenizer = char_tokenizer(ALPHABETS["ascii"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return load_set([str(path)], tokenizer)


def audited(folder: Path, reward: dict[str, Any], rows: list[tuple[Any, Any]]) -> list[Finding]:
    config = RewardConfig.model_validate(reward)
    tried = RewardAudit(config, prompts(folder, rows), char_tokenizer(ALPHABETS["ascii"]))

    async def run() -> list[Finding]:
        scorer = build_scorer(tried.reward, max_new_tokens=100)
        await scorer.start()
        try:
            return tried.findings(await tried.score(scorer, tried.rows, 240))
        finally:
            await scorer.close()

    return asyncio.run(run())


def part(function: str, **args: Any) -> dict[str, Any]:
    return {"parts": {"own": {"function": function, "args": args}}, "workers": 1}


def paid(found: list[Finding]) -> set[Kind]:
    return {one.kind for one in found if one.pays}


CHEAP = {kind for kind in KINDS if kind.verdict == "wrong"}


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        ("contains", {LISTED, THOUGHT}),
        ("evaluates", {PROMPT, EXPRESSION}),
        ("polite", {REFUSED}),
        ("wordy", {PROMPT}),
        ("shaped", {EMPTY}),
        ("generous", CHEAP),
    ],
)
def test_each_hole_is_found(function: str, kinds: set[Kind], tmp_path: Path) -> None:
    found = audited(tmp_path, part(f"gamed_rewards:{function}"), SUMS)
    assert kinds <= paid(found)
    if function != "wordy":
        assert paid(found) == kinds
    one = next(one for one in found if one.kind in kinds)
    assert (one.tried, one.paid) == (8, 8)
    text = one.describe(RewardConfig())
    assert text.startswith(f"{one.kind.name} scores on 8 of 8 rows (")
    assert "rows.jsonl:" in text


def test_a_number_that_any_row_has_is_found(tmp_path: Path) -> None:
    found = paid(audited(tmp_path, part("gamed_rewards:number"), SUMS))
    assert found >= {NUMBER, EXPRESSION, PROMPT, LISTED}
    assert found.isdisjoint({NOTHING, REFUSED, EMPTY})


STORIES = [
    (f"Tom has {a} apples, and buys {b} more. How many has he?", str(a + b))
    for a, b in zip(range(11, 41), range(57, 87), strict=True)
]
CHOICES = [(f"Pick the {a}th letter. A) a B) b C) c D) d", "ABCD"[a % 4]) for a in range(24)]
CONSTRAINTS = {"func_name": "verify_bullet_points", "N": 3}
TESTS = {"inputs": ["1 2"], "outputs": ["3"]}
BOXED = {"answer": "boxed", "strict": True}


@pytest.mark.parametrize(
    ("reward", "rows"),
    [
        (part("exact_match"), SUMS),
        (part("exact_match", answer="tagged"), SUMS),
        (part("math"), STORIES),
        (part("math"), SUMS),
        (part("math", **BOXED), STORIES),
        (part("f1"), STORIES),
        (part("choice"), CHOICES),
        (part("ifeval"), [("Write three points.", json.dumps(CONSTRAINTS))] * 9),
        (part("code"), [("Add two numbers.", json.dumps(TESTS))] * 9),
        (part("gamed_rewards:penalises"), SUMS),
        (part("gamed_rewards:shifted"), SUMS),
        (part("exact_match") | {"non_stop_penalty": -2.0}, SUMS),
    ],
    ids=lambda given: str(given)[:60],
)
def test_an_honest_reward_pays_for_nothing_cheap(
    reward: dict[str, Any], rows: list[tuple[Any, Any]], tmp_path: Path
) -> None:
    found = audited(tmp_path, reward, rows)
    assert paid(found) == set(), [
        one.describe(RewardConfig.model_validate(reward)) for one in found
    ]
    assert {NOTHING, PROMPT, REFUSED, EMPTY} <= {one.kind for one in found}
    right = [one for one in found if one.kind is RIGHT]
    assert all(one.paid == one.tried for one in right)
    assert bool(right) == (reward["parts"]["own"]["function"] not in ("ifeval", "code"))


def test_a_part_that_pays_little_is_no_hole_and_the_one_that_pays_is_named(tmp_path: Path) -> None:
    both = {
        "own": {"function": "gamed_rewards:shaped", "weight": 0.2},
        "right": {"function": "gamed_rewards:contains"},
    }
    found = audited(tmp_path, {"parts": both}, SUMS)
    assert paid(found) == {LISTED, THOUGHT}
    best = next(one for one in found if one.kind is LISTED)
    assert "by reward.parts.right" in best.example(RewardConfig.model_validate({"parts": both}))


def test_a_constant_answer_that_is_often_right_is_chance(tmp_path: Path) -> None:
    """The prompts end in B, which a copy of the prompt picks, and half the labels are B."""
    rows = [(f"Is {n} even? A) yes B) no\nB", "AB"[n % 2]) for n in range(40)]
    found = audited(tmp_path, part("choice"), rows)
    assert next(one for one in found if one.kind is PROMPT).paid > 0
    assert paid(found) == set()


def test_parts_that_need_more_than_text_are_left_out_by_name(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    reward = {
        "parts": {
            "right": {"function": "exact_match"},
            "long": {"function": "overlong", "args": {"buffer": 4}},
            "env": {"source": "workflow"},
            "asked": {"judge": {"url": url, "model": "m"}},
            "remote": {"service": {"url": url, "format": "slime"}},
        }
    }
    config = RewardConfig.model_validate(reward)
    data = prompts(tmp_path, SUMS)
    tokenizer = char_tokenizer(ALPHABETS["ascii"])
    made = RewardAudit(config, data, tokenizer)
    assert set(made.left_out) == {"long", "env", "asked", "remote"}
    assert set(made.reward.parts) == {"right"}
    told = RewardAudit(config, data, tokenizer, ask_services=True)
    assert set(told.reward.parts) == {"right", "asked", "remote"}
    alone = RewardConfig.model_validate({"parts": {"env": reward["parts"]["env"]}})
    assert RewardAudit(alone, data, tokenizer).rows == []


def warnings_of(
    reward: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> tuple[list[str], Scorer]:
    config = RewardConfig.model_validate(reward)
    made = RewardAudit(config, prompts(folder, SUMS), char_tokenizer(ALPHABETS["ascii"]))
    scorer = build_scorer(config)

    async def run() -> None:
        try:
            await made.start(scorer)
        finally:
            await scorer.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    return [record.getMessage() for record in caplog.records], scorer


def test_a_run_is_warned_by_name_with_rows_and_an_example(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (text,), _ = warnings_of(part("gamed_rewards:evaluates"), tmp_path, caplog)
    assert "an expression of the prompt scores on 8 of 8 rows (1 for '11+57', " in text
    assert "rows.jsonl:1" in text
    assert "docs/rewards.md" in text


@pytest.mark.parametrize(
    "reward",
    [
        part("exact_match"),
        part("gamed_rewards:fails"),
        part("gamed_rewards:generous") | {"audit_rows": 0},
    ],
    ids=["honest", "failing", "off"],
)
def test_a_run_is_left_in_peace(
    reward: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A reward that fails here fails in step 1 too, which counts and names it."""
    said, _ = warnings_of(reward, tmp_path, caplog)
    assert said == []


def test_a_reward_that_hangs_ends_the_audit_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "AUDIT_S", 2.0)
    began = time.monotonic()
    said, _ = warnings_of(part("gamed_rewards:hangs") | {"timeout_s": 300}, tmp_path, caplog)
    assert said == []
    assert time.monotonic() - began < 120


def test_an_audit_that_breaks_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("places")

    monkeypatch.setattr(audit, "_sample", broken)
    said, _ = warnings_of(part("exact_match"), tmp_path, caplog)
    assert said == ["the reward was not audited: KeyError: 'places'"]
