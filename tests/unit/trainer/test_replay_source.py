"""The version and step of a recording that is trained on again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.data.sample import Sample
from rlcore.errors import DataError
from rlcore.runs.rollouts import write_rollouts
from rlcore.trainer.sources import ReplaySource


@pytest.mark.parametrize(("version", "expected"), [(9, 9), (None, None)])
def test_a_step_is_recorded_with_the_policy_that_was_trained(
    tmp_path: Path, make_sample: Callable[..., Sample], version: int | None, expected: int | None
) -> None:
    """Its tokens may all be older than that: their age must be the same in a replay."""
    path = tmp_path / "step_000003.parquet"
    write_rollouts(path, 3, [make_sample(0), make_sample(1)], version=version)
    rollouts = ReplaySource(path, vocab_size=64).next_step(1)
    assert rollouts.recorded_step == 3
    assert rollouts.recorded_version == expected
    assert [sample.draw for sample in rollouts.samples] == [0, 1]


def test_the_policy_steps_of_a_recording_are_those_of_its_versions(
    tmp_path: Path, make_sample: Callable[..., Sample]
) -> None:
    """The age of a token follows from them, and with it what is corrected and dropped."""
    path = tmp_path / "step_000003.parquet"
    write_rollouts(path, 3, [make_sample(0)], version=9, policy_steps={4: 1, 5: 2, 9: 3})
    assert ReplaySource(path, vocab_size=64).next_step(1).policy_steps == {4: 1, 5: 2}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": [7, 8, 9, 64, 2]}, "token 3 is 64, expected ids from 0 to 63"),
        ({"tokens": [7, 8, 9, 1 << 40, 2]}, "not a readable recording"),
        ({"rollout_logprobs": [-0.1, None, -3.3]}, "not a readable recording"),
        ({"rollout_logprobs": [-0.1, float("nan"), -3.3]}, "log-prob of trainable token 1 is nan"),
        ({"loss_mask": [0, 0, 2, 1, 0]}, "loss_mask has 2, expected 0 and 1"),
        ({"versions": [[5, 0]]}, "not a readable recording"),
    ],
)
def test_what_no_policy_can_have_made_is_not_trained_on_again(
    tmp_path: Path, make_sample: Callable[..., Sample], change: dict[str, object], said: str
) -> None:
    table = tmp_path / "step_000003.parquet"
    write_rollouts(table, 3, [make_sample()])
    columns = pq.read_table(table)
    for name, value in change.items():
        at = columns.column_names.index(name)
        columns = columns.set_column(at, name, pa.array([value]))  # in whatever type it needs
    pq.write_table(columns, table)
    with pytest.raises(DataError, match=said):
        ReplaySource(table, vocab_size=64)
