from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from rlcore.errors import DataError
from rlcore.runs.metrics import MetricsFile, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in range(1, 6):
        metrics.append(step, {"rollout/reward": step / 10, "episode": 32 * step})
    return path


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_one_object_a_step(path: Path) -> None:
    assert read_metrics(path)[0] == {"step": 1, "rollout/reward": 0.1, "episode": 32.0}
    assert steps(path) == [1, 2, 3, 4, 5]


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_numbers_come_back_exactly(path: Path) -> None:
    values = {"a": 0.1 + 0.2, "b": float("nan"), "c": float("-inf"), "d": 5e-324}
    MetricsFile(path).append(6, values)
    row = read_metrics(path)[-1]
    assert (row["a"], row["c"], row["d"]) == (0.1 + 0.2, float("-inf"), 5e-324)
    assert math.isnan(row["b"])


def test_rewind_forgets_later_steps(path: Path) -> None:
    metrics = MetricsFile(path)
    before = len(steps(path))
    assert metrics.rewind(3) == before - 3
    assert steps(path) == [1, 2, 3]
    metrics.append(4, {"x": 1.0})
    assert steps(path) == [1, 2, 3, 4]
    assert metrics.rewind(9) == 0
    assert steps(path) == [1, 2, 3, 4]
    metrics.rewind(-1)
    assert steps(path) == []


def test_a_torn_last_line_is_cut_off_at_every_length(path: Path) -> None:
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for size in range(last, len(whole)):
        path.write_bytes(whole[:size])
        assert steps(path) == [1, 2, 3, 4], "a reader leaves it out"
        MetricsFile(path).append(5, {"again": 1.0})
        assert steps(path) == [1, 2, 3, 4, 5]
        assert read_metrics(path)[-1] == {"step": 5, "again": 1.0}


def test_a_kill_during_rewind_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, die)
            with pytest.raises(Killed):
                MetricsFile(path).rewind(2)
        assert steps(path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("line", ["{", "[1]", '{"reward": 1}', '{"step": "x"}'])
def test_a_wrong_line_is_named(path: Path, line: str) -> None:
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:3: "):
        read_metrics(path)
