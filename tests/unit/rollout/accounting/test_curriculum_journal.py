"""Choices of a curriculum in the journal: they can be made again from it, and audited."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_ledger_machine import curriculum_stream, samples_of
from test_restore_groups import buffered

from rlcore.data.curriculum.history import num_results
from rlcore.errors import DataError
from rlcore.launch.commands.ledger import life_of
from rlcore.runs.checkpoints import Checkpoint
from rollout.accounting.audit import PromptsOfRows, check_checkpoint, check_rows
from rollout.accounting.journal_reader import read_journal
from rollout.accounting.prompt_queue import PromptQueue
from rollout.collection.buffer import restore_groups

SIZE = 40


def written(path: Path, *, lockstep: bool, seed: int = 0) -> tuple[PromptQueue, dict[str, Any]]:
    """Write the journal of steps of two groups; returns the queue and its snapshot at the last.

    In lock-step draws end in their order; else some are in flight at each hand-over.
    """
    dice = random.Random(seed)
    queue = PromptQueue((), curriculum_stream(SIZE))
    queue.keep_journal(path)
    saved: dict[str, Any] = {}
    for step in range(1, 25):
        going = queue.ledger.unsettled()
        going += queue.take(5 if lockstep else dice.randint(3, 7))
        ended = going if lockstep else dice.sample(going, len(going) - 1)
        for draw in ended:
            if queue.ledger.state(draw) == "in flight":
                queue.finish(draw, samples_of(queue.stream.row(draw)))
        for draw in (ended[0], *ended[5:]):
            queue.drop(draw, "f")
        queue.give_back(ended[1], "stale")
        queue.hand_over(ended[2:4], step)
        saved = json.loads(json.dumps(queue.snapshot()))
    queue.journal.flush()
    return queue, saved


def remade(entries: list[dict[str, Any]]) -> dict[int, int]:
    """The row of each draw from the journal alone, by the definition, without a cache."""
    key = int.from_bytes(hashlib.blake2b(b"1:curriculum", digest_size=8).digest(), "little")
    rows: dict[int, int] = {}
    right = np.zeros(SIZE)
    told = np.zeros(SIZE)
    open_draws: set[int] = set()
    weights = np.ones(SIZE)
    before: set[int] = set()  # rows that were taken at the hand-over
    since: set[int] = set()  # and since
    for entry in entries:
        for draw in entry.get("drawn", ()):
            if draw not in rows:
                words = np.random.Philox(key=np.array([key, draw], np.uint64)).random_raw(17)
                free = np.array([0 if row in before else weights[row] for row in range(SIZE)])
                for word in words:
                    at = (int(word) >> 11) * 2.0**-53 * free.cumsum()[-1]
                    row = int((free.cumsum() <= at).sum())
                    if row not in since:
                        break
                else:
                    raise AssertionError("too many prompts are under way for this test")
                rows[draw] = row
                since.add(row)
            open_draws.add(draw)
        for draw, passed in zip(entry.get("finished", ()), entry.get("passed", ())):
            found = [int(number) for number in passed.split("/")]
            right[rows[draw]] = right[rows[draw]] / 2 + found[0]
            told[rows[draw]] = told[rows[draw]] / 2 + found[1]
        open_draws -= {*entry.get("consumed", ()), *entry.get("dropped", ())}
        if "cut" in entry:
            rate = np.where(told > 0, right / np.maximum(told, 1e-9), 0.5)
            weights = 0.1 + 0.9 * 4 * rate * (1 - rate)
            before = {rows[draw] for draw in open_draws}
            since = set()
    return rows


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_every_choice_follows_from_what_is_written_before_it(
    tmp_path: Path, lockstep: bool, seed: int
) -> None:
    path = tmp_path / "ledger.jsonl"
    queue, _ = written(path, lockstep=lockstep, seed=seed)
    entries = [entry for _, entry in read_journal(path).entries()]
    rows: dict[int, int] = {}
    for entry in entries:
        rows |= dict(zip(entry.get("drawn", ()), entry.get("rows", ())))
    assert len(rows) == len(queue.ledger)
    assert len(set(rows.values())) > SIZE / 2
    assert remade(entries) == rows


def test_a_choice_is_written_before_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    queue = PromptQueue((), curriculum_stream(SIZE))
    queue.keep_journal(path)
    draws = queue.take(3)
    last = json.loads(path.read_text().splitlines()[-1])
    assert last == {"drawn": draws, "rows": [queue.stream.row(draw) for draw in draws]}
    queue.finish(1, samples_of(15))
    queue.finish(0, samples_of(1))
    queue.give_back(1, "stale")
    queue.take(1)
    queue.journal.flush()
    entries = [json.loads(line) for line in path.read_text().splitlines()[-3:]]
    assert entries == [
        {"finished": [1, 0], "passed": ["2/3", "0/3"]},
        {"requeued": [1], "because": "stale"},
        {"drawn": [1], "rows": [queue.stream.row(1)]},
    ]
    life = list(life_of(read_journal(path), 1))
    assert life[1].endswith(f"drawn (row {queue.stream.row(1)})")
    assert life[2].endswith("finished (passed 2/3)")


def test_a_run_that_starts_again_keeps_rows_and_results_of_its_groups(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    queue = PromptQueue((), curriculum_stream(SIZE))
    queue.keep_journal(path)
    for draw in queue.take(6)[:4]:
        queue.finish(draw, samples_of(draw))
    queue.hand_over([0, 1], 1)
    saved = json.loads(json.dumps(queue.snapshot()))
    rows = {draw: queue.stream.row(draw) for draw in range(6)}
    queue.close()
    again = PromptQueue((), curriculum_stream(SIZE))
    again.restore(saved)
    assert list(restore_groups(again, [buffered(2, 0, 0)])) == [2]
    again.keep_journal(path)
    assert again.ledger.requeued() == [3, 4, 5]
    assert {draw: again.stream.row(draw) for draw in range(2, 6)} == {
        draw: row for draw, row in rows.items() if draw >= 2
    }
    # 0 to 3 of the snapshot
    assert num_results(again.stream.snapshot()["curriculum"]["results"]) == 4
    assert again.take(4) == [3, 4, 5, 6]
    again.journal.flush()
    assert list(check_rows(read_journal(path))) == []


def test_a_journal_of_a_curriculum_contradicts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    _, saved = written(path, lockstep=False)
    history = read_journal(path)
    assert list(check_rows(history)) == []
    found = check_checkpoint(Checkpoint(24, tmp_path, {"source": with_groups(saved)}), history)
    assert list(found) == []


def with_groups(saved: dict[str, Any]) -> dict[str, Any]:
    """The snapshot of a service whose buffer has the finished groups."""
    queue = PromptQueue((), curriculum_stream(SIZE))
    queue.restore(saved)
    ledger = queue.ledger
    finished = [draw for draw in ledger.unsettled() if ledger.state(draw) == "finished"]
    return {**saved, "ahead": {"groups": [{"draw": draw} for draw in finished]}}


def other_row(curriculum: dict[str, Any]) -> None:
    curriculum["rows"][0][1] += 1


def lost_result(curriculum: dict[str, Any]) -> None:
    curriculum["results"]["tail"].pop()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (other_row, "is of row .* in the checkpoint of step 24 and of row .* in the journal"),
        (lost_result, "has the results of .* groups, the journal of"),
    ],
)
def test_a_checkpoint_that_says_something_else_is_named(
    tmp_path: Path, harm: Callable[[dict[str, Any]], None], said: str
) -> None:
    path = tmp_path / "ledger.jsonl"
    _, saved = written(path, lockstep=False)
    harm(saved["stream"]["curriculum"])
    checkpoint = Checkpoint(24, tmp_path, {"source": with_groups(saved)})
    (line,) = check_checkpoint(checkpoint, read_journal(path))
    assert re.search(said, line), line


def test_a_draw_of_two_rows_and_a_row_of_two_prompts_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    written(path, lockstep=True)
    history = read_journal(path)
    (first, second) = (draw for draw, row in list(remade_of(history).items())[:2])
    records = [{"draw": first, "prompt_id": "a:1"}, {"draw": second, "prompt_id": "a:2"}]
    prompts = PromptsOfRows(history)
    assert list(prompts.check(1, records)) == []
    (line,) = prompts.check(2, [{"draw": first, "prompt_id": "a:3"}])
    assert line.startswith(f"step 2 was trained on prompt a:3 for draw {first}, which the ledger")
    path.write_text(path.read_text() + json.dumps({"drawn": [first], "rows": [99]}) + "\n")
    (line,) = check_rows(read_journal(path))
    assert f"draw {first} is of row 99, and was of row" in line


def remade_of(history: Any) -> dict[int, int]:
    return remade([entry for _, entry in history.entries()])


@pytest.mark.parametrize(
    "entry",
    [
        {"drawn": [0, 1], "rows": [1]},
        {"drawn": [0], "rows": ["1"]},
        {"drawn": [0], "rows": 1},
        {"finished": [0], "passed": [0.5]},
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, entry: dict[str, Any]) -> None:
    path = tmp_path / "ledger.jsonl"
    start = {"start": 0, "prompts": [1, "x"], "max_staleness": 0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (start, entry)))
    with pytest.raises(DataError, match=r"ledger.jsonl:2: .* for each draw"):
        read_journal(path).at()
