"""Named parts, weights, penalties, and a defined score for every way in which a reward fails."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import yaml
from pydantic import ValidationError
from reward_kit import parts, score

from rlcore.config.sections.reward import RewardConfig
from rlcore.errors import ConfigError


def test_exact_match_strips_and_compares(sample):
    batch = [sample(" 2\n"), sample("3"), sample("2", label=2), sample("2", label=" 2")]
    score(parts(right="exact_match"), batch)
    assert [s.reward for s in batch] == [1.0, 0.0, 1.0, 1.0]
    assert [s.metadata["correct"] for s in batch] == [True, False, True, True]
    assert batch[0].reward_parts == {"right": 1.0}


def test_a_column_that_is_called_like_a_verdict_is_none(sample):
    batch = [sample("a", correct=True, reward_error="no", reward_info={"x": 1})]
    score(parts(length="user_rewards:length"), batch)
    assert batch[0].metadata == {}, "nothing says right or wrong, and nothing failed"
    read = [sample("a", correct="kept"), sample("2", correct=False)]
    score(parts(right="exact_match", own="user_rewards:knows_the_column"), read)
    assert [s.reward for s in read] == [1.0, 1.0], "functions find the column"
    assert [s.metadata["correct"] for s in read] == [False, True]


def test_named_parts_are_weighted_and_summed(sample):
    config = {
        "parts": {
            "right": {"function": "exact_match", "weight": 2.0},
            "length": {"function": "user_rewards:length", "weight": -0.1},
            "row": {"function": "user_rewards:from_row"},
        }
    }
    batch = [sample("2", bonus=1.0), sample("abc", bonus=0.0)]
    score(config, batch)
    assert batch[0].reward == pytest.approx(2.0 - 0.1 + 1.5)
    assert batch[1].reward == pytest.approx(0.0 - 0.3 + 0.5)
    assert batch[1].reward_parts == {"right": 0.0, "length": 3.0, "row": 0.5}


def test_non_stop_penalty_replaces_the_score(sample):
    batch = [sample("2"), sample("2", finish_reason="length"), sample("2", finish_reason="abort")]
    score({**parts(right="exact_match"), "non_stop_penalty": -5.0}, batch)
    assert [s.reward for s in batch] == [1.0, -5.0, 1.0]
    assert batch[1].reward_parts == {"right": 1.0}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("nan", "returned nan, expected a finite number"),
        ("raise", "raised RuntimeError: no such book"),
        ("die", "its worker process died with exit code 3"),
    ],
)
def test_a_failing_reward_has_a_defined_score_and_is_named(
    sample, caplog, response, reason, monkeypatch
):
    monkeypatch.setattr("rollout.rewards.pool.WORKER_ENDS_S", 60.0)
    batch = [sample("fine", index=0), sample(response, index=1), sample("fine", index=2)]
    with caplog.at_level(logging.WARNING):
        first, second = score(
            {**parts(f="user_rewards:fickle"), "on_error": -1.0, "workers": 1},
            batch,
            [sample("fine")],
        )
    assert [s.reward for s in batch] == [1.0, -1.0, 1.0]
    assert reason in batch[1].metadata["reward_error"]
    assert (first.errors, first.timeouts, second.errors) == (1, 0, 0)
    assert "sample 1 of draw 4 (book.jsonl:7)" in caplog.text
    assert reason in caplog.text


def test_a_hanging_reward_is_killed_at_its_deadline_and_replaced(sample, only_what_hangs_is_late):
    only_what_hangs_is_late("hang")
    batch = [sample("hang"), sample("fine"), sample("fine"), sample("bool")]
    start = time.monotonic()
    (counts,) = score(
        {**parts(f="user_rewards:fickle"), "on_error": -1.0, "timeout_s": 0.5, "workers": 1}, batch
    )
    assert time.monotonic() - start < 120
    assert [s.reward for s in batch] == [-1.0, 1.0, 1.0, 1.0]
    assert (counts.errors, counts.timeouts) == (0, 1)
    assert "reward.timeout_s" in batch[0].metadata["reward_error"]
    assert psutil.Process().children() == []


def test_a_sum_beyond_float32_is_a_failure(sample):
    config = {"parts": {"length": {"function": "user_rewards:length", "weight": 3e38}}}
    batch = [sample("1"), sample("12")]
    (counts,) = score({**config, "on_error": -1.0, "workers": 1}, batch)
    assert [s.reward for s in batch] == [3e38, -1.0]
    assert counts.errors == 1
    assert "the weighted sum: returned 6e+38" in batch[1].metadata["reward_error"]


def test_a_function_may_return_a_mapping(sample):
    batch = [sample("mapping")]
    score({**parts(f="user_rewards:fickle"), "workers": 1}, batch)
    assert batch[0].reward == 0.5
    assert batch[0].reward_parts == {"f": 0.5, "f.style": 1.0}


def test_functions_run_in_other_processes_side_by_side(sample):
    batch = [sample("x", index=i) for i in range(40)]
    score({**parts(pid="user_rewards:process_id"), "workers": 2}, batch)
    used = {int(s.reward) for s in batch}
    assert len(used) == 2
    assert os.getpid() not in used


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nowhere:score", "cannot import nowhere"),
        ("user_rewards:missing", "has no 'missing'"),
        ("user_rewards:not_a_function", "is a int, expected something callable"),
    ],
)
def test_an_unknown_function_is_refused_before_any_rollout(sample, function, message):
    with pytest.raises(ConfigError, match=rf"reward.parts.mine.function.*{message}"):
        score(parts(mine=function))


MATH = [
    ("The answer is 42", "42", 1.0),
    ("so $x = \\frac{1}{2}$, hence \\boxed{0.5}", "\\frac{1}{2}", 1.0),
    ("I think it is 41", "42", 0.0),
    ("7", 7, 1.0),
]


def test_math_scores_are_right_off_the_main_thread(sample):
    batch = [sample(text, label) for text, label, _ in MATH]
    config = {**parts(math="math"), "workers": 1, "timeout_s": 30}
    with ThreadPoolExecutor(1) as thread:
        (counts,) = thread.submit(score, config, batch).result(240)
    assert [s.reward for s in batch] == [expected for *_, expected in MATH]
    assert counts.errors == counts.timeouts == 0
    assert [s.metadata["correct"] for s in batch] == [expected > 0 for *_, expected in MATH]


# --- samples without a score ----------------------------------------------------------------------


def test_a_sample_without_a_score_is_dropped_by_default(sample):
    config = {"parts": {"f": {"function": "user_rewards:fickle"}, "right": {"function": "f1"}}}
    batch = [sample("raise"), sample("fine", "fine")]
    (counts,) = score({**config, "workers": 1}, batch)
    assert [s.is_scored for s in batch] == [False, True]
    assert "correct" not in batch[0].metadata, "it says nothing of right and wrong"
    assert batch[0].reward_parts == {"right": 0.0}, "what is known is recorded"
    assert (counts.errors, len(counts.unscored)) == (1, 1)


def test_an_answer_that_a_verifier_fails_over_is_wrong(sample, only_what_hangs_is_late):
    only_what_hangs_is_late("$9^{9^{9^{9}}}!$")
    config = {
        "parts": {
            "math": {"function": "math", "args": {"form": "any"}},
            "short": {"function": "user_rewards:length", "weight": 0.5},
        }
    }
    batch = [sample("$9^{9^{9^{9}}}!$", "2"), sample("2", "2")]
    (counts,) = score({**config, "workers": 1, "timeout_s": 2.0}, batch)
    assert [s.metadata["correct"] for s in batch] == [False, True]
    assert [s.reward for s in batch] == [0.5 * len(batch[0].response_text), 1.5]
    assert batch[0].reward_parts["math"] == 0.0
    assert (counts.timeouts, counts.unscored) == (1, [])


@pytest.mark.parametrize("function", ["exact_match", "math", "choice"])
def test_a_label_that_cannot_be_read_says_nothing_of_the_answer(sample, function):
    batch = [sample("2", {"no": "label"})]
    (counts,) = score({**parts(right=function), "workers": 1}, batch)
    assert not batch[0].is_scored
    assert len(counts.unscored) == 1


def test_the_penalty_of_an_unfinished_response_needs_no_score(sample):
    batch = [sample("raise", finish_reason="length"), sample("raise")]
    config = {**parts(f="user_rewards:fickle"), "non_stop_penalty": -5.0, "workers": 1}
    score(config, batch)
    assert batch[0].reward == -5.0
    assert not batch[1].is_scored


@pytest.mark.parametrize("value", [".nan", ".inf", "mean", None, True])
def test_on_error_is_drop_or_a_number(value):
    with pytest.raises(ValidationError):
        RewardConfig.model_validate({"on_error": yaml.safe_load(str(value)) if value else value})
