"""Draws of a curriculum: weights by hand, odds by their definition, and what a resume continues."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.data.curriculum import PromptHistory, build_curriculum
from rlcore.data.curriculum.history import CHUNK, Outcome, Results, num_results
from rlcore.data.curriculum.stream import CurriculumStream
from rlcore.data.loading import MixtureStream, Share
from rlcore.data.prompts import PromptStream
from rlcore.data.sample import verdict_in
from rlcore.errors import DataError, RunFailed


def stream_of(
    base: PromptStream | int = 8, curriculum: Any = "pass_rate", seed: int = 3, **options: Any
) -> CurriculumStream:
    base = PromptStream(base, seed=seed, fingerprint="x") if isinstance(base, int) else base
    keywords = {"memory": 0.5, "passes_at": None, **options}
    return CurriculumStream(
        base,
        build_curriculum(curriculum) if isinstance(curriculum, str) else curriculum,
        lengths=np.ones(base.size, dtype=np.int64),
        sources=np.zeros(base.size, dtype=np.int64),
        **keywords,
    )


def fixed(*weights: float) -> Any:
    return lambda history: np.array(weights)


ROLLOUTS = itertools.count()


def sample(correct: Any = None, reward: float = 0.0, **metadata: Any) -> Any:
    said = {} if correct is None else {"correct": correct}
    found = {**said, **metadata}
    verdict = verdict_in(found, reward)
    return SimpleNamespace(
        metadata=found, reward=reward, verdict=verdict, rollout_id=next(ROLLOUTS)
    )


def step(
    stream: CurriculumStream, count: int, rates: dict[int, Outcome] | None = None
) -> list[int]:
    """Draw, finish and hand over as a step does; returns the rows."""
    draws = stream.take(count)
    for draw in draws:
        stream.finished(draw, (rates or {}).get(stream.row(draw), Outcome(1, 2)))
        stream.finish(draw)
    stream.handed_over()
    return [stream.row(draw) for draw in draws]


def test_another_seed_may_go_on_with_the_results() -> None:
    stream = stream_of(seed=3)
    step(stream, 4)
    other = stream_of(seed=4)
    other.restore(stream.snapshot())
    assert other.snapshot()["curriculum"] == stream.snapshot()["curriculum"]


# --- results and weights --------------------------------------------------------------------------


def test_a_sample_passes_by_its_verdict_or_by_its_reward() -> None:
    group = [sample(True, 0.9), sample(False, 0.2), sample(None, 0.5), sample("yes", 1.0)]
    assert Outcome.of(group, None) == Outcome(right=1, judged=2)
    assert Outcome.of(group, 0.5) == Outcome(right=3, judged=4)
    failed = sample(False, 0.0, reward_error="timeout")  # which says nothing about the prompt
    assert Outcome.of([*group, failed], None) == Outcome(1, 2)
    assert Outcome.of([failed], 0.5) == Outcome(0, 0)
    assert str(Outcome(3, 8)) == "3/8"


def test_a_rollout_in_several_samples_counts_once() -> None:
    """Else the long ones, which are often wrong, would make a prompt harder than it is."""
    group = [sample(True, 1.0), *(sample(False, 0.0) for _ in range(3))]
    for one in group[1:]:
        one.rollout_id = group[1].rollout_id
    assert Outcome.of(group, None) == Outcome.of(group, 0.5) == Outcome(right=1, judged=2)


def test_earlier_groups_count_by_memory() -> None:
    results = Results(3, memory=0.5)
    for row, outcome in ((0, Outcome(8, 8)), (2, Outcome(0, 0)), (0, Outcome(2, 8))):
        results.add(row, outcome)
    history = results.history(np.zeros(3, np.int64), np.zeros(3, np.int64))
    assert history.seen.tolist() == [2, 0, 1]
    assert history.right.tolist() == [6.0, 0.0, 0.0]  # 8 / 2 + 2
    assert history.judged.tolist() == [12.0, 0.0, 0.0]
    assert history.last.tolist() == [2, -1, 1]
    np.testing.assert_array_equal(history.pass_rate, [0.5, math.nan, math.nan])
    assert (history.results, len(history)) == (3, 3)
    with pytest.raises(ValueError, match="read-only"):
        history.seen[0] = 9
    results.add(1, Outcome(1, 1))
    assert history.seen.tolist() == [2, 0, 1], "a history does not change any more"


def test_weights_of_pass_rates_by_hand() -> None:
    results = Results(5, memory=1.0)
    for row, right in ((0, 0), (1, 4), (2, 8), (3, 2)):
        results.add(row, Outcome(right, 8))
    history = results.history(np.zeros(5, np.int64), np.zeros(5, np.int64))
    # 4 p (1 - p) over a floor of 0.1; nothing is known of the last
    expected = [0.1, 1.0, 0.1, 0.1 + 0.9 * 0.75, 1.0]
    np.testing.assert_allclose(build_curriculum("pass_rate")(history), expected)
    hard = build_curriculum("pass_rate", target=0.25, floor=0.2)(history)
    # (p / t)^1/2 ((1 - p) / (1 - t))^3/2: the most at p = 1/4
    middle = 0.2 + 0.8 * 2**0.5 * (0.5 / 0.75) ** 1.5
    np.testing.assert_allclose(hard, [0.2, middle, 0.2, 1.0, 1.0])


def test_a_prompt_whose_newest_group_failed_has_the_weight_of_the_floor() -> None:
    """Else one that can never work would keep the largest weight, and all draws would fail soon."""
    results = Results(3, memory=1.0)
    results.add(0, Outcome(4, 8))
    for row in (0, 0, 1):
        results.add_failure(row)
    again = Results(3, memory=1.0)
    again.restore(json.loads(json.dumps(results.snapshot())))
    for one in (results, again):
        history = one.history(np.zeros(3, np.int64), np.zeros(3, np.int64))
        assert history.failed.tolist() == [2, 1, 0]
        assert (history.seen.tolist(), history.results) == ([1, 0, 0], 1), "failures are no results"
        np.testing.assert_allclose(build_curriculum("pass_rate")(history), [0.1, 0.1, 1.0])
        one.add(0, Outcome(4, 8))
        after = one.history(np.zeros(3, np.int64), np.zeros(3, np.int64))
        assert after.failed.tolist() == [0, 1, 0], "it works again"


def test_prompts_that_never_work_do_not_crowd_out_the_others() -> None:
    """3 of 60 prompts fail, the others are solved by and by."""
    stream = stream_of(60)
    undisturbed: list[int] = []
    drawn: Counter[bool] = Counter()
    for number in range(60):
        if number == 30:  # a resume
            state = json.loads(json.dumps(stream.snapshot()))
            resumed = stream_of(60)
            resumed.restore(state)
            undisturbed = [stream.row(draw) for draw in stream.take(6)]
            stream = resumed
        draws = stream.take(6)
        if undisturbed:
            assert [stream.row(draw) for draw in draws] == undisturbed
            undisturbed = []
        for draw in draws:
            broken = stream.row(draw) < 3
            drawn[broken] += number >= 30
            if broken:
                stream.failed(draw)
            else:
                stream.finished(draw, Outcome(7 + (number > 10), 8))
                stream.finish(draw)
        stream.handed_over()
    assert drawn[True] < 0.1 * drawn.total(), "rollout.max_failed"


def test_the_log_is_packed_and_summed_up_again() -> None:
    random = np.random.default_rng(0)
    results = Results(50, memory=0.7)
    for _ in range(2 * CHUNK + 17):
        told = int(random.integers(0, 9))
        results.add(int(random.integers(50)), Outcome(int(random.integers(told + 1)), told))
    state = json.loads(json.dumps(results.snapshot()))
    assert len(state["chunks"]) == 2
    assert num_results(state) == results.count == 2 * CHUNK + 17
    again = Results(50, memory=0.7)
    again.restore(state)
    for name in ("seen", "right", "judged", "last"):
        assert np.array_equal(getattr(again, name), getattr(results, name)), name
    assert again.snapshot() == results.snapshot()
    assert sum(map(len, state["chunks"])) < 4 * 2 * CHUNK, "few bytes a result"


# --- odds -----------------------------------------------------------------------------------------


def test_a_draw_has_the_odds_of_its_weight() -> None:
    weights = [1.0, 0.0, 5.0, 2.0]
    stream = stream_of(4, fixed(*weights))
    count = 4000
    found = Counter(step(stream, 1)[0] for _ in range(count))
    for row, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(found[row] - count * share) <= 4 * math.sqrt(count * share * (1 - share))


def test_several_draws_are_without_replacement() -> None:
    """The first two of a step against w_a / sum times w_b / (sum - w_a)."""
    weights = [1.0, 3.0, 10.0, 0.5]
    count = 4000
    found = Counter(tuple(step(stream_of(4, fixed(*weights), seed), 2)) for seed in range(count))
    for a, b in itertools.permutations(range(4), 2):
        share = weights[a] / sum(weights) * weights[b] / (sum(weights) - weights[a])
        assert abs(found[a, b] - count * share) <= 4 * math.sqrt(count * share * (1 - share)) + 1


def test_no_prompt_comes_twice_before_a_hand_over_while_there_are_others() -> None:
    for seed in range(20):
        stream = stream_of(8, fixed(*([1e6] + [1.0] * 7)), seed)
        first = stream.take(5)
        rows = [stream.row(draw) for draw in [*first, *stream.take(3)]]
        assert sorted(rows) == list(range(8))
        assert 0 <= stream.row(stream.take(1)[0]) < 8, "all are drawn: again by weight"
    stream = stream_of(8)
    held = stream.take(3)
    for draw in stream.take(5):
        stream.finish(draw)
    stream.handed_over()
    busy = {stream.row(draw) for draw in held}
    assert busy.isdisjoint(stream.row(draw) for draw in stream.take(5)), "of draws under way"


def test_prompts_without_weight_are_left_out_while_there_are_others() -> None:
    stream = stream_of(4, fixed(0.0, 1.0, 0.0, 1.0))
    for _ in range(50):
        assert set(step(stream, 2)) == {1, 3}
    assert set(step(stream, 3)) == {1, 3}, "twice, since no other has a weight"


def test_a_result_counts_from_the_next_hand_over_on() -> None:
    asked: list[int] = []

    def curriculum(history: PromptHistory) -> np.ndarray[Any, Any]:
        asked.append(history.results)
        return np.ones(len(history))

    stream = stream_of(8, curriculum)
    draws = stream.take(2)
    stream.finished(draws[0], Outcome(1, 2))
    stream.take(1)
    assert asked == [0]
    stream.handed_over()
    stream.finished(draws[1], Outcome(1, 2))
    stream.take(1)
    assert asked == [0, 1]


def test_weights_of_sources_decide_before_the_curriculum() -> None:
    shares = [Share("a", 0, 3, 3.0), Share("b", 3, 5, 1.0)]
    base = MixtureStream(shares, seed=4)
    stream = stream_of(base, fixed(1, 0, 9, 0, 0, 0, 0, 0))
    rows = [row for _ in range(400) for row in step(stream, 1)]
    sources = [base.source(draw) for draw in range(400)]
    assert [0 if row < 3 else 1 for row in rows] == sources
    of_a = Counter(row for row in rows if row < 3)
    assert of_a[1] == 0
    assert of_a[2] > 4 * of_a[0] > 0
    of_b = Counter(row for row in rows if row >= 3)
    assert set(of_b) == {3, 4, 5, 6, 7}, "a source without weights is drawn from evenly"


# --- state ----------------------------------------------------------------------------------------


def solves(row: int, time: int) -> Outcome:
    """How a policy that learns does: the harder the row, the later."""
    return Outcome(min(8, max(0, time // 3 - row)), 8)


def run(stream: CurriculumStream, steps: range) -> tuple[list[list[int]], dict[str, Any]]:
    """The rows of each step, of which each gives one draw back; and the last snapshot."""
    rows = []
    for time in steps:
        draws = stream.take(4)
        rows.append([stream.row(draw) for draw in draws])
        for draw in draws[:-1]:
            stream.finished(draw, solves(stream.row(draw), time))
            stream.finish(draw)
        stream.requeue(draws[-1])
        stream.handed_over()
    return rows, json.loads(json.dumps(stream.snapshot()))


def test_a_resumed_run_draws_on_as_the_undisturbed_one() -> None:
    whole, end = run(stream_of(12), range(30))
    for cut in (1, 2, 13, 29):
        before, saved = run(stream_of(12), range(cut))
        after = stream_of(12)
        after.restore(saved)
        assert after.snapshot() == saved
        behind, last = run(after, range(cut, 30))
        assert before + behind == whole
        assert last == end


def test_a_draw_that_comes_back_keeps_its_row() -> None:
    stream = stream_of(8)
    draws = stream.take(3)
    rows = [stream.row(draw) for draw in draws]
    stream.requeue(draws[1])
    stream.handed_over()
    assert stream.take(2)[0] == draws[1]
    assert [stream.row(draw) for draw in draws] == rows
    assert stream.chosen(draws[1]) == rows[1]
    with pytest.raises(ValueError, match="draw 99 does not exist: 4 draws were made"):
        stream.row(99)


def test_keywords_may_change_at_a_resume_and_prompts_may_not() -> None:
    _, saved = run(stream_of(12), range(5))
    other = stream_of(12, build_curriculum("pass_rate", target=0.2), memory=0.0)
    other.restore(saved)
    assert num_results(other.snapshot()["curriculum"]["results"]) == 15
    assert other._results.judged.max() == 8, "memory holds from the first result on"
    with pytest.raises(DataError, match="saved with 12 prompts"):
        stream_of(13).restore(saved)
    with pytest.raises(DataError, match=r"was saved with data\.curriculum"):
        PromptStream(12, seed=3, fingerprint="x").restore(saved)
    with pytest.raises(DataError, match=r"was saved without data\.curriculum"):
        stream_of(12).restore(PromptStream(12, seed=3, fingerprint="x").snapshot())


def test_the_beginning_is_the_state_before_the_first_draw() -> None:
    stream = stream_of(12)
    first, _ = run(stream, range(6))
    assert stream.beginning() == stream_of(12).snapshot()
    stream.restore(stream.beginning())
    stream.move(0, [])
    assert run(stream, range(6))[0] == first


# --- what is said ---------------------------------------------------------------------------------


def test_a_reward_that_says_neither_right_nor_wrong_is_refused() -> None:
    stream = stream_of(8)
    stream.check_results()
    draws = stream.take(2)
    stream.finished(draws[0], Outcome(0, 0))
    with pytest.raises(
        RunFailed, match=r"none of the 1 groups so far .* set data\.curriculum\.pas"
    ):
        stream.check_results()
    stream.finished(draws[1], Outcome(0, 2))
    stream.check_results()


def test_metrics_by_hand() -> None:
    stream = stream_of(4, memory=0.0)
    assert stream.metrics() == {
        "curriculum/seen": 0.0,
        "curriculum/most_seen": 0.0,
        "curriculum/effective_prompts": 4.0,
    }
    rates = {0: Outcome(8, 8), 1: Outcome(0, 8), 2: Outcome(4, 8), 3: Outcome(0, 0)}
    step(stream, 4, rates)
    stream.take(1)
    weights = np.array([0.1, 0.1, 1.0, 1.0])
    assert stream.metrics() == pytest.approx(
        {
            "curriculum/seen": 1.0,
            "curriculum/most_seen": 1.0,
            "curriculum/effective_prompts": weights.sum() ** 2 / (weights**2).sum(),
            "curriculum/pass_rate": 0.5,
            "curriculum/always_right": 1 / 3,
            "curriculum/never_right": 1 / 3,
        }
    )
