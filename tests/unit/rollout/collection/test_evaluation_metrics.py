"""avg@n, pass@k and maj@k against exact fractions, enumeration and simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations, count
from typing import Any

import numpy as np
import pytest

from rlcore.config import Config
from rlcore.config.evaluation_sets import EvaluationSet, evaluation_sets
from rlcore.data.sample import Sample
from rollout.collection.evaluation import means
from rollout.collection.evaluation_metrics import (
    Answer,
    judged_answers,
    maj_at_k,
    mean_interval,
    pass_at_k,
    quoted_metrics,
    rollouts_of,
    share_interval,
    voted_text,
)


@pytest.mark.parametrize("n", [1, 2, 5, 32, 256])
def test_pass_at_k_is_the_closed_form(n: int) -> None:
    for k in {1, 2, n // 2 or 1, n - 1 or 1, n} & set(range(1, n + 1)):
        for right in {0, 1, n // 3, n // 2, n - k, n - 1, n}:
            exact = 1 - Fraction(math.comb(n - right, k), math.comb(n, k))
            assert pass_at_k(n, right, k) == pytest.approx(float(exact), rel=1e-12, abs=1e-13)


def test_pass_at_k_of_many_answers_does_not_overflow() -> None:
    n, right, k = 5000, 3, 2000
    exact = 1 - Fraction(math.comb(n - right, k), math.comb(n, k))
    assert pass_at_k(n, right, k) == pytest.approx(float(exact), rel=1e-12)


def test_pass_at_k_has_no_bias_whatever_the_number_of_answers() -> None:
    """Against the truth for a prompt that is solved with probability p, and the naive estimate."""
    random = np.random.default_rng(0)
    p, k = 0.2, 4
    truth = 1 - (1 - p) ** k
    for n in (4, 7, 16):
        right = random.binomial(n, p, size=20_000)
        mean = float(np.mean([pass_at_k(n, int(c), k) for c in right]))
        assert mean == pytest.approx(truth, abs=0.01)
    naive = np.mean(1 - (1 - random.binomial(7, p, size=20_000) / 7) ** k)
    assert abs(naive - truth) > 0.03, "the plug-in estimate is what this is not"


def by_enumeration(answers: Sequence[str | None], right: Sequence[bool], k: int) -> Fraction:
    """The mean over all subsets of k; ties and unequal verdicts by their shares."""
    share = {
        answer: Fraction(
            sum(r for a, r in zip(answers, right) if a == answer), answers.count(answer)
        )
        for answer in set(answers)
    }
    total = Fraction(0)
    for chosen in combinations(answers, k):
        votes = Counter(answer for answer in chosen if answer is not None)
        if votes:
            tied = [answer for answer, n in votes.items() if n == max(votes.values())]
            total += sum((share[answer] for answer in tied), Fraction(0)) / len(tied)
    return total / math.comb(len(answers), k)


@pytest.mark.parametrize("seed", range(8))
def test_maj_at_k_is_the_mean_over_all_subsets(seed: int) -> None:
    random = np.random.default_rng(seed)
    n = int(random.integers(1, 10))
    kinds = ["a", "b", "c", "d", None][: int(random.integers(1, 6))]
    answers = [kinds[i] for i in random.integers(len(kinds), size=n)]
    # some answers are judged unequally
    right = [bool((a == "a") ^ (random.random() < 0.2)) for a in answers]
    for k in range(1, n + 1):
        exact = by_enumeration(answers, right, k)
        assert maj_at_k(answers, right, k) == pytest.approx(float(exact), rel=1e-11, abs=1e-14)


def test_maj_at_k_by_hand() -> None:
    assert maj_at_k(["7", "7", "9"], [True, True, False], 3) == pytest.approx(1.0)
    assert maj_at_k(["7", "9"], [True, False], 2) == pytest.approx(0.5), "a tie"
    assert maj_at_k(["7", None, None], [True, False, False], 3) == pytest.approx(1.0)
    assert maj_at_k([None, None], [False, False], 2) == 0.0
    # one of three answers is right, and two of three subsets of two hold it, in a tie
    assert maj_at_k(["7", "8", "9"], [True, False, False], 2) == pytest.approx(1 / 3)


def test_maj_at_k_of_64_answers_is_what_a_simulation_finds() -> None:
    random = np.random.default_rng(1)
    answers = [str(i) for i in np.minimum(random.geometric(0.25, size=64), 9)]
    right = [answer == "2" for answer in answers]
    hits = []
    for _ in range(20_000):
        votes = Counter(random.choice(answers, size=8, replace=False).tolist())
        tied = [answer for answer, n in votes.items() if n == max(votes.values())]
        hits.append(("2" in tied) / len(tied))
    error = np.std(hits) / math.sqrt(len(hits))
    assert maj_at_k(answers, right, 8) == pytest.approx(np.mean(hits), abs=4 * error)


def test_k_beyond_the_answers_is_refused() -> None:
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"from 1 to the 3 answers, got {k}"):
            pass_at_k(3, 1, k)
        with pytest.raises(ValueError, match=f"from 1 to the 3 answers, got {k}"):
            maj_at_k(["a"] * 3, [True] * 3, k)


# --- intervals ------------------------------------------------------------------------------------


def test_an_interval_of_a_mean_is_two_standard_errors() -> None:
    values = [0.0, 1.0, 2.0, 5.0]
    low, high = mean_interval(values) or (0.0, 0.0)
    assert (low + high) / 2 == pytest.approx(2.0)
    assert high - low == pytest.approx(2 * 1.96 * np.std(values, ddof=1) / 2, rel=1e-4)
    assert mean_interval([1.0]) is None
    assert share_interval([1.0], answers=8) is None


def test_the_interval_of_shares_is_wilsons_where_prompts_are_all_or_nothing() -> None:
    """Against the textbook's 95 % interval of 27 of 30: 0.744 to 0.965."""
    low, high = share_interval([1.0] * 27 + [0.0] * 3, answers=30) or (0, 0)
    assert (low, high) == (pytest.approx(0.744, abs=0.006), pytest.approx(0.965, abs=0.003))
    low, high = share_interval([1.0] * 30, answers=30) or (0, 0)
    assert (low, high) == pytest.approx((0.8865, 1.0), abs=1e-3), "all right is not certainty"


@pytest.mark.parametrize(
    ("prompts", "n", "a", "b"), [(30, 1, 1.0, 1.0), (30, 8, 0.4, 0.6), (100, 16, 8, 1)]
)
def test_an_interval_holds_the_truth_nineteen_times_of_twenty(
    prompts: int, n: int, a: float, b: float
) -> None:
    """Prompts are drawn with a difficulty of their own, beta(a, b), answers given it."""
    random = np.random.default_rng(2)
    truth = a / (a + b)
    held = 0
    for _ in range(2000):
        shares = random.binomial(n, random.beta(a, b, size=prompts)) / n
        low, high = share_interval(shares.tolist(), answers=prompts * n) or (0, 0)
        held += low <= truth <= high
    assert 0.93 <= held / 2000 <= 0.98


# --- of samples -----------------------------------------------------------------------------------


def given(**fields: Any) -> EvaluationSet:
    load = {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"paths": "d"}}
    one = {"paths": "x", "samples_per_prompt": 4, **fields}
    config = Config.model_validate(
        {**load, "training": {"steps": 1}, "evaluation": {"sets": {"a": one}}}
    )
    return evaluation_sets(config)[0]


@pytest.fixture
def sample(make_sample: Callable[..., Sample]) -> Callable[..., Sample]:
    """A sample of a rollout of its own, whose metadata the grader wrote."""
    rollouts = count()

    def make(text: str = "", rollout: int | None = None, **metadata: Any) -> Sample:
        rollout_id = next(rollouts) if rollout is None else rollout
        return make_sample(response_text=text, rollout_id=rollout_id, metadata=metadata)

    return make


def test_a_failed_reward_counts_as_wrong_among_judged_answers(
    sample: Callable[..., Sample],
) -> None:
    prompt = [
        sample(correct=True),
        sample(reward_error="math: slow"),
        sample(),
        sample(correct=True),
    ]
    assert [one.verdict for one in prompt] == [True, False, None, True]
    found = quoted_metrics([prompt, prompt], given(k=[1, 2, 3, 4]))
    assert found["avg@4"] == found["pass@1"] == pytest.approx(2 / 3)
    assert found["pass@2"] == found["pass@3"] == 1.0
    assert "pass@4" not in found, "three answers are judged"
    only_failures = [[sample(reward_error="judge: down")] * 4] * 2
    assert "pass@1" not in quoted_metrics(only_failures, given()), "nothing says right or wrong"


def test_prompts_without_a_verdict_are_left_out(sample: Callable[..., Sample]) -> None:
    """Rewards by source: some rows have a verifier, some have none."""
    right = [sample(correct=True) for _ in range(4)]
    assert quoted_metrics([right, [sample()] * 4], given())["avg@4"] == 1.0


def test_turns_of_a_rollout_are_one_answer(sample: Callable[..., Sample]) -> None:
    turns = [
        sample("a", 7, correct=True),
        sample("b", 7, correct=False),
        sample("c", 8, correct=True),
    ]
    assert judged_answers(turns) == [Answer("b", False), Answer("c", True)]


def test_a_rollout_of_several_samples_counts_once(sample: Callable[..., Sample]) -> None:
    """Score, accuracy, lengths and ends of a conversation in three segments and one in one."""
    cut = [sample(str(i), 7, correct=False) for i in range(3)]
    for part in cut:
        part.reward = 0.0
        part.finish_reason = "length"
    cut[0].measured = {"turns": 3.0, "tool_errors": 1.0}
    whole = sample("x", 8, correct=True)
    whole.measured = {"turns": 1.0, "tool_errors": 0.0}
    found = means(rollouts_of([*cut, whole]))
    assert found == {
        "score": 0.5,
        "accuracy": 0.5,
        "sequence_lengths": 6.0,  # of 3 tokens each
        "stop_token_rate": 0.5,
        "turns": 2.0,
        "tool_errors": 0.5,
    }
    quoted = quoted_metrics([[*cut, whole]] * 2, given(k=[1, 2]))
    assert (quoted["pass@1"], quoted["pass@2"]) == (0.5, 1.0)
    assert quoted["score_low"] == quoted["score_high"] == 0.5


def test_what_votes_is_the_graders_answer_else_the_words(sample: Callable[..., Sample]) -> None:
    told = sample("so it is 7", correct=True, reward_info={"math": {"answer": 7}, "form": {}})
    assert voted_text(told) == "7"
    assert voted_text(sample("x", reward_info={"math": {"answer": None}})) is None, "it abstains"
    assert voted_text(sample(" so  it\nis 7 ", reward_info={"form": {"words": 4}})) == "so it is 7"


def test_without_k_there_are_means_alone(sample: Callable[..., Sample]) -> None:
    assert quoted_metrics([[sample(correct=True)] * 4] * 3, given(k=[])) == {}
