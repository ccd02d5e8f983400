"""Which groups the built-in filters keep."""

from __future__ import annotations

import numpy as np
import pytest

from rlcore.data.sample import Sample
from rlcore.errors import ConfigError, RunFailed
from rollout.collection.filters import FilterChain


def group(*judged: tuple[float, bool | None]) -> list[Sample]:
    """Samples of one prompt with these rewards and verdicts."""
    empty = np.zeros(0, np.int32)
    arrays = (empty, empty.astype(np.uint8), empty.astype(np.float32))
    made = []
    for index, (reward, correct) in enumerate(judged):
        said = {} if correct is None else {"correct": correct}
        made.append(Sample(0, index, "p", 0, 0, *arrays, (), "stop", reward=reward, metadata=said))
    return made


@pytest.mark.parametrize(
    ("judged", "by_reward", "by_verdict"),
    [
        ([(2.0, True), (0.0, False)], True, True),
        ([(2.0, True), (2.0, True)], False, False),
        ([(0.0, False), (-0.5, False)], True, False),  # one was too long
        ([(2.0, True), (1.5, True)], True, False),
        ([(2.0, True), (0.0, None)], True, False),
    ],
)
def test_dynamic_sampling_by_reward_and_by_verdict(judged, by_reward, by_verdict) -> None:
    for name, kept in (("zero_variance", by_reward), ("mixed_verdicts", by_verdict)):
        chain = FilterChain([name], samples_per_prompt=2)
        assert chain.refusal(group(*judged)) == (None if kept else name)


def test_rewards_are_compared_as_they_are_trained_on() -> None:
    chain = FilterChain(["zero_variance"], samples_per_prompt=2)
    assert chain.refusal(group((0.1 + 0.2, None), (0.3, None))) == "zero_variance"
    assert chain.refusal(group((0.3 + 1e-6, None), (0.3, None))) is None


def test_verdicts_are_needed_where_they_are_asked_for() -> None:
    chain = FilterChain(["mixed_verdicts"], samples_per_prompt=2)
    with pytest.raises(RunFailed, match="no part of the reward says right or wrong; take zero_var"):
        chain.refusal(group((1.0, None), (0.0, None)))


def test_a_failed_reward_is_no_verdict_and_ends_no_run() -> None:
    """All rewards of one prompt may time out; those that failed are scored 0 and are not wrong."""
    chain = FilterChain(["mixed_verdicts"], samples_per_prompt=2)
    for failed, by_others, kept in (
        (group((0.0, None), (0.0, None)), [], False),  # of a user's function
        (group((0.0, False), (0.0, False)), [], False),  # of a built-in grader
        (group((0.0, False)), group((1.0, True)), False),
        (group((0.0, None)), group((1.0, True), (0.0, False)), True),
    ):
        for sample in failed:
            sample.metadata["reward_error"] = "answer: raised RuntimeError: 503"
        assert chain.refusal([*failed, *by_others]) == (None if kept else "mixed_verdicts")


def keep_spread(samples: list[Sample]) -> object:
    """As a user writes it: numpy's own bool."""
    return np.std([sample.reward for sample in samples]) > 0.1


def test_a_filter_may_return_numpys_bool() -> None:
    chain = FilterChain([f"{__name__}:keep_spread"], samples_per_prompt=2)
    assert chain.refusal(group((1.0, None), (0.0, None))) is None
    assert chain.refusal(group((1.0, None), (1.0, None))) == "keep_spread"


@pytest.mark.parametrize("name", ["zero_variance", "mixed_verdicts"])
def test_groups_of_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} drops every group"):
        FilterChain([name], samples_per_prompt=1)
