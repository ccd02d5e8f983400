"""Samples that nobody can have made are refused before they are trained on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlcore.data.sample import Sample
from rlcore.data.sample_checks import check_sample

MakeSample = Callable[..., Sample]


@pytest.mark.parametrize("value", [7, np.int64(7)])
def test_whole_numbers_of_any_kind_are_indices(make_sample: MakeSample, value: int) -> None:
    check_sample(make_sample(draw=value, index=value), vocab_size=31)


@pytest.mark.parametrize("name", ["draw", "index", "group_id", "rollout_id"])
@pytest.mark.parametrize("value", [True, 1.0, -1, np.int64(-1), 1 << 63, None])
def test_what_is_no_index_is_named(make_sample: MakeSample, name: str, value: object) -> None:
    sample = make_sample()
    setattr(sample, name, value)
    with pytest.raises(ValueError, match=f"{name}.* expected a whole number from 0"):
        check_sample(sample, vocab_size=31)


@pytest.mark.parametrize("name", ["rollout_logprobs", "token_rewards"])
def test_a_recorded_number_that_is_too_large_is_infinite_and_refused(
    make_sample: MakeSample, name: str
) -> None:
    record = make_sample().to_record()
    record[name] = [-1e300] * len(record["rollout_logprobs"])
    with pytest.raises(ValueError, match="inf"):
        check_sample(Sample.from_record(record), vocab_size=31)
