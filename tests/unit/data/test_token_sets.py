"""Keep-sets in samples and batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.data.batch import KeepSets, RolloutBatch
from rlcore.data.sample import Sample
from rlcore.data.token_sets import TokenSets
from rlcore.errors import DataError
from rlcore.runs.replay import ReplaySource
from rlcore.runs.rollouts import read_rollouts, write_rollouts

MakeSample = Callable[..., Sample]


def sets_of(*sets: list[int]) -> TokenSets:
    tokens = np.array([token for one in sets for token in one], dtype=np.int32)
    return TokenSets(tokens, np.array([len(one) for one in sets], dtype=np.int32))


def test_their_counts_are_checked() -> None:
    with pytest.raises(ValueError, match="counts sum up to 3, but there are 2 tokens"):
        TokenSets(np.zeros(2, dtype=np.int32), np.array([1, 2], dtype=np.int32))
    with pytest.raises(ValueError, match="tokens must be one int32 vector, got int64"):
        TokenSets(np.zeros(2, dtype=np.int64), np.array([1, 1], dtype=np.int32))  # type: ignore[arg-type]


def test_turns_are_joined() -> None:
    joined = TokenSets.joined([sets_of([4], []), TokenSets.whole(1), sets_of([1, 2])])
    assert joined.counts.tolist() == [1, 0, 0, 2]
    assert joined.tokens.tolist() == [4, 1, 2]
    assert TokenSets.joined([]).counts.tolist() == []


def test_a_token_must_be_in_its_set(make_sample: MakeSample) -> None:
    make_sample(keep_sets=sets_of([9, 3], [], [2]))
    with pytest.raises(ValueError, match="keep-set of trainable token 2 does not hold the token itself"):
        make_sample(keep_sets=sets_of([9, 3], [], [9, 10]))
    with pytest.raises(ValueError, match="2 keep-sets, expected one for each of 3 trainable tokens"):
        make_sample(keep_sets=sets_of([9, 3], []))


def test_a_record_brings_them_back(make_sample: MakeSample, tmp_path: Path) -> None:
    path = tmp_path / "step.jsonl.zst"
    write_rollouts(path, 1, [make_sample(keep_sets=sets_of([9, 3], [], [2])), make_sample(1)])
    first, second = (Sample.from_record(record) for record in read_rollouts(path))
    assert first.keep_sets is not None
    assert first.keep_sets.counts.dtype == np.int32
    assert first.keep_sets.tokens.tolist() == [9, 3, 2]
    assert second.keep_sets is None


def test_a_replay_has_them_where_they_are_configured_and_only_there(make_sample: MakeSample, tmp_path: Path) -> None:
    path = tmp_path / "step.jsonl.zst"
    write_rollouts(path, 1, [make_sample(keep_sets=TokenSets.whole(3))])
    assert ReplaySource(path, keep_sets=True).samples[0].keep_sets is not None
    with pytest.raises(DataError, match=r"recorded with keep-sets: set policy.logprobs.keep_sets to true"):
        ReplaySource(path)
    write_rollouts(path, 1, [make_sample(keep_sets=TokenSets.whole(3)), make_sample(1)])
    with pytest.raises(DataError, match=r"recorded without keep-sets: set policy.logprobs.keep_sets to false"):
        ReplaySource(path, keep_sets=True)


def test_a_batch_holds_one_set_a_trainable_token_and_keeps_it_when_cut(make_sample: MakeSample) -> None:
    nothing = {"loss_mask": np.zeros(5, dtype=np.uint8), "rollout_logprobs": np.zeros(0, dtype=np.float32), "versions": ()}
    samples = [make_sample(0), make_sample(1, keep_sets=TokenSets.whole(0), **nothing),
               make_sample(2, keep_sets=sets_of([9, 3], [], [2])), make_sample(3, keep_sets=sets_of([9], [10], [1, 2]))]
    batch = RolloutBatch.from_samples(samples)
    assert batch.keep_sets is not None
    assert batch.keep_sets.offsets.tolist() == [0, 0, 0, 0, 2, 2, 3, 4, 5, 7]
    part = batch.select([3, 1, 2]).keep_sets
    assert part is not None
    assert part.offsets.tolist() == [0, 1, 2, 4, 6, 6, 7]
    assert part.tokens.tolist() == [9, 10, 1, 2, 9, 3, 2]
    assert RolloutBatch.from_samples(samples[:1]).keep_sets is None
    with pytest.raises(ValueError, match=r"batch\.keep_sets holds 2 sets, expected one for each of 9 tokens"):
        RolloutBatch(batch.tokens, batch.cu_tokens, batch.loss_mask,
                     keep_sets=KeepSets(torch.zeros(0), torch.zeros(3, dtype=torch.int64)))  # fmt: skip
