"""The version and step of a recording that is trained on again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from rlcore.data.sample import Sample
from rlcore.runs.rollouts import write_rollouts
from rlcore.trainer.sources import ReplaySource


@pytest.mark.parametrize(("version", "expected"), [(9, 9), (None, None)])
def test_a_step_is_recorded_with_the_policy_that_was_trained(
    tmp_path: Path, make_sample: Callable[..., Sample], version: int | None, expected: int | None
) -> None:
    """Its tokens may all be older than that: their age must be the same in a replay."""
    path = tmp_path / "step_000003.jsonl.zst"
    write_rollouts(path, 3, [make_sample(0), make_sample(1)], version=version)
    rollouts = ReplaySource(path).next_step(1)
    assert rollouts.recorded_step == 3
    assert rollouts.recorded_version == expected
    assert [sample.draw for sample in rollouts.samples] == [0, 1]


def test_a_recording_that_does_not_say_counts_from_its_newest_token(
    tmp_path: Path, make_sample: Callable[..., Sample]
) -> None:
    path = tmp_path / "old.jsonl.zst"
    path.write_bytes(zstandard.compress(json.dumps(make_sample().to_record()).encode() + b"\n"))
    assert ReplaySource(path).next_step(1).recorded_version == 5
