"""When the soak strikes: progress from a run's folder, and moments drawn over all its phases."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.soak.progress import WEIGHTS, Progress, Timeline

START = Progress()
FIRST = Progress(versions=1)
PUBLISHING = Progress(versions=2, published=1)
LOGGED = Progress(versions=2, published=1, rows=1)
SAVING = Progress(versions=2, published=1, rows=1, begun=1)
SAVED = Progress(versions=2, published=1, rows=1, begun=1, committed=1)
LAST = Progress(versions=11, published=10, rows=10, begun=10, committed=10)
CHANGES = [
    (0.0, START),
    (4.0, FIRST),
    (5.0, PUBLISHING),
    (5.5, LOGGED),
    (6.0, SAVING),
    (6.1, SAVED),
    (9.0, LAST),
]
TIMELINE = Timeline(CHANGES, 9.5)


def test_the_folder_of_a_run_says_how_far_it_is(tmp_path: Path) -> None:
    assert Progress.of(tmp_path / "nothing") == START
    versions = [json.dumps({"version": step + 1, "step": step}) for step in range(3)]
    (tmp_path / "versions.jsonl").write_text("\n".join([*versions, '{"ver']))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    assert Progress.of(tmp_path) == Progress(versions=3, published=2, rows=1, begun=2, committed=2)
    (tmp_path / "checkpoints" / ".step_000004.tmp").mkdir()
    assert Progress.of(tmp_path) == Progress(versions=3, published=2, rows=1, begun=4, committed=2)


@pytest.mark.parametrize(
    ("progress", "phase", "words"),
    [
        (START, "start", "before the first publication"),
        (FIRST, "step", "in the rollouts or the update of step 1"),
        (PUBLISHING, "publication", "in the publication after step 1, or the end of the step"),
        (LOGGED, "step", "in the rollouts or the update of step 2"),
        (SAVING, "checkpoint", "in the checkpoint of step 1"),
        (LAST, "end", "in the export, or the end of the run"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_phases(progress: Progress, phase: str, words: str) -> None:
    assert (progress.phase, str(progress)) == (phase, words)


def test_a_moment_is_reached_when_all_counters_are() -> None:
    assert SAVED.reached(SAVING)
    assert not SAVING.reached(SAVED)
    assert LAST.reached(PUBLISHING)


def test_moments_are_drawn_over_all_phases_and_evenly_within_one() -> None:
    chance = random.Random(1)
    drawn = Counter[str]()
    began = {progress: at for at, progress in CHANGES}
    ended = dict(zip(began, [*list(began.values())[1:], TIMELINE.seconds], strict=True))
    steps: list[float] = []
    for _ in range(4000):
        moment = TIMELINE.draw(chance)
        drawn[moment.after.phase] += 1
        at = began[moment.after] + moment.seconds
        assert began[moment.after] <= at <= ended[moment.after]
        if moment.after.phase == "step":
            steps.append(at)
    whole = sum(WEIGHTS.values())
    assert {phase: round(10 * count / 4000) for phase, count in drawn.items()} == {
        phase: round(10 * weight / whole) for phase, weight in WEIGHTS.items()
    }
    late = sum(at > 6.1 for at in steps) / len(steps)  # 2.9 of the 4.4 seconds that are steps
    assert late == pytest.approx(2.9 / 4.4, abs=0.05)
