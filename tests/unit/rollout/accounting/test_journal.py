"""The journal of the ledger: its lines, kills while it is written, and rewinds."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from stat import S_ISDIR

import pytest

from rlcore.data.prompts import PromptStream
from rlcore.errors import DataError, RunFailed
from rollout.accounting.journal_reader import read_journal
from rollout.accounting.prompt_queue import LedgerJournal, PromptQueue
from tests.limits import no_large_files


def new(path: Path | None = None) -> PromptQueue:
    queue = PromptQueue((), PromptStream(7, seed=3, fingerprint="seven"))
    if path is not None:
        queue.keep_journal(path)
    return queue


def step(queue: PromptQueue, number: int, size: int = 2) -> dict[str, object]:
    """Draw and finish one more than wanted, hand the first over. The snapshot."""
    taken = queue.take(size + 1)
    for draw in taken:
        queue.ledger.finish(draw)
    queue.hand_over(taken[:size], number)
    return queue.snapshot()


def resumed(path: Path, state: dict[str, object]) -> PromptQueue:
    queue = new()
    queue.restore(json.loads(json.dumps(state)))
    queue.give_back_unsettled()
    queue.keep_journal(path)
    return queue


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_what_a_run_writes(path: Path) -> None:
    queue = new(path)
    queue.take(4)
    for draw in (0, 1, 2):
        queue.ledger.finish(draw)
    queue.ledger.drop(2, "zero_variance")
    queue.give_back(3, "stale")
    queue.hand_over([0, 1], 1)
    queue.give_back_unsettled()
    queue.close()
    assert lines(path) == [
        '{"start": 0, "prompts": [7, "seven"], "max_staleness": 0}',
        '{"drawn": [0, 1, 2, 3]}',
        '{"finished": [0, 1, 2]}',
        '{"dropped": [2], "by": "zero_variance"}',
        '{"requeued": [3], "because": "stale"}',
        '{"consumed": [0, 1], "step": 1}',
        '{"cut": 1}',
    ]


def test_every_kind_of_transition_is_written_before_the_next(path: Path) -> None:
    queue = new(path)
    queue.take(2)
    queue.ledger.finish(0)
    assert lines(path)[1:] == ['{"drawn": [0, 1]}']
    queue.ledger.drop(0, "f")
    assert lines(path)[2:] == ['{"finished": [0]}']
    queue.journal.flush()
    assert lines(path)[3:] == ['{"dropped": [0], "by": "f"}']


def test_what_came_after_the_cut_is_rewound_and_stays_readable(path: Path) -> None:
    queue = new(path)
    saved = step(queue, 1)
    step(queue, 2)
    queue.take(2)
    queue.close()
    before = path.read_bytes()
    again = resumed(path, saved)
    assert path.read_bytes().startswith(before)
    step(again, 2)
    again.close()
    history = read_journal(path)
    ledger = history.at()
    assert ledger is not None
    assert ledger.snapshot() == again.ledger.snapshot()
    assert [at for _, at in history.starts] == [0, 1]
    assert sorted(history.cuts) == [0, 1, 2]
    # Draw 2 was finished beside step 1's; a step 2 that was rewound left it alone, the one after
    # drew it again.
    assert [(transition, rewound) for _, transition, _, rewound in history.life(2)] == [
        ("drawn", None),
        ("finished", None),
        ("requeued", None),
        ("drawn", None),
        ("finished", None),
        ("consumed", None),
    ]
    start = history.starts[1][0]
    assert [(transition, rewound) for _, transition, _, rewound in history.life(3)] == [
        ("drawn", start),
        ("finished", start),
        ("consumed", start),
        ("drawn", None),
        ("finished", None),
        ("consumed", None),
    ]


def test_a_run_that_starts_over_rewinds_everything(path: Path) -> None:
    queue = new(path)
    step(queue, 1)
    queue.close()
    again = new(path)
    again.take(1)
    again.close()
    history = read_journal(path)
    assert [state for state, count in history.at().balance().items() if count] == ["in flight"]
    assert sorted(history.cuts) == [0]
    assert history.rewound_transitions == 3


def test_a_torn_line_is_left_out_and_cut_off(path: Path) -> None:
    queue = new(path)
    saved = step(queue, 1)
    queue.take(3)
    queue.close()
    whole = path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    for end in range(last + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert read_journal(path).at().snapshot() == saved["ledger"]
    resumed(path, saved).close()
    assert path.read_bytes().startswith(whole[:last] + b'{"start": 1')


def test_a_journal_without_the_cut_gets_the_checkpoints_ledger(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = new()
    saved = step(queue, 1)
    with caplog.at_level(logging.WARNING):
        again = resumed(path, saved)
    assert "lacks the ledger of step 1 that the checkpoint has" in caplog.text
    step(again, 2)
    again.close()
    assert json.loads(lines(path)[0])["ledger"] == saved["ledger"]
    history = read_journal(path)
    assert history.at().snapshot() == again.ledger.snapshot()
    assert history.at(1).snapshot() == saved["ledger"]
    assert sorted(history.cuts) == [1, 2]
    assert history.at(0) is None


def test_a_journal_that_says_otherwise_gets_the_checkpoints_ledger(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both have a step 1, but the journal has that of another run."""
    step(new(path), 1, size=1)
    saved = step(new(), 1, size=2)
    with caplog.at_level(logging.WARNING):
        again = resumed(path, saved)
    assert "lacks the ledger of step 1 that the checkpoint has" in caplog.text
    again.close()
    history = read_journal(path)
    assert history.at(1).snapshot() == saved["ledger"]
    assert history.at().snapshot() == again.ledger.snapshot()
    assert history.rewound_transitions == 3
    assert [by for *_, by in history.life(0)] == [5 + 1] * 3


def test_what_is_asked_of_a_history(path: Path) -> None:
    queue = new()
    queue.keep_journal(path, max_staleness=2)
    states = [step(queue, number) for number in (1, 2, 3)]
    queue.close()
    again = new()
    again.restore(states[0])
    again.give_back_unsettled()
    again.keep_journal(path, max_staleness=1)
    step(again, 2)
    again.close()
    history = read_journal(path)
    assert history.bounds == {1: 2, 2: 1}
    assert [entry for _, entry in history.entries() if "cut" in entry] == [{"cut": 1}, {"cut": 2}]
    assert [entry for _, entry in history.entries() if "start" in entry] == [], (
        "they hold no ledger"
    )
    assert history.rewound_transitions == 6
    resumed(path, states[0]).close()
    assert read_journal(path).rewound_transitions == 6 + 4
    assert {by for *_, by in history.life(3)} == {None, history.starts[1][0]}
    numbers = [number for number, *_ in history.life(3)]
    assert numbers == sorted(numbers)
    with pytest.raises(
        DataError, match=r"none\.jsonl: no such file; a run with rollouts writes it"
    ):
        read_journal(path.with_name("none.jsonl"))


NO_START = "expected 'start' with a step, max_staleness, prompts"


def start_with(ledger: str) -> str:
    return f'{{"start": 0, "prompts": [7, "seven"], "max_staleness": 0, "ledger": {ledger}}}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "2: not an entry of a ledger's journal"),
        ("[1]", "2: not an entry of a ledger's journal: expected an object, got list"),
        ('{"eaten": [1]}', "expected one of drawn, finished, consumed, dropped, failed, requeued"),
        ('{"cut": "1"}', "expected 'cut' with a step"),
        ('{"cut": true}', "expected 'cut' with a step"),
        ('{"drawn": 4}', "expected one of drawn, .* with a list of draws"),
        ('{"drawn": [0], "finished": [0]}', "expected one of drawn, .* with a list of draws"),
        ('{"drawn": ["0"]}', "expected one of drawn, .* with a list of draws"),
        ('{"consumed": [0]}', "expected 'step' with 'consumed'"),
        ('{"consumed": [0], "step": "1"}', "expected 'step' with 'consumed'"),
        ('{"dropped": [0]}', "expected 'by' with 'dropped'"),
        ('{"requeued": [0], "because": 1}', "expected 'because' with 'requeued'"),
        ('{"start": 0}', NO_START),
        ('{"start": 0, "prompts": 5, "max_staleness": 0}', NO_START),
        ('{"start": 0, "prompts": [7], "max_staleness": 0}', NO_START),
        ('{"start": 0, "prompts": ["seven", 7], "max_staleness": 0}', NO_START),
        ('{"start": 0, "prompts": [7, "seven"], "max_staleness": "0"}', NO_START),
        *[
            (start_with(ledger), "expected a ledger with codes")
            for ledger in (
                "5",
                "null",
                '["codes", "lengths", "filters"]',
                '{"codes": []}',
                '{"codes": [1], "lengths": [0.5], "filters": []}',
                '{"codes": [null], "lengths": [1], "filters": []}',
                '{"codes": [1], "lengths": [1], "filters": 5}',
                '{"codes": [1], "lengths": [1], "filters": [], "settled": [5]}',
            )
        ],
        (
            '{"start": 3, "prompts": [7, "seven"], "max_staleness": 0}',
            "2: a start from step 3, which has no cut",
        ),
    ],
)
def test_a_line_that_is_no_entry_is_named(path: Path, line: str, said: str) -> None:
    new(path).close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=said):
        read_journal(path).at()


def test_a_damaged_journal_is_set_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    queue = new(path)
    saved = step(queue, 1)
    queue.close()
    content = path.read_text().replace('"finished"', '"drawn"')
    path.write_text(content)
    with pytest.raises(DataError, match=r"ledger.jsonl:3: draw 0 is in flight, expected requeued"):
        read_journal(path).at()
    with caplog.at_level(logging.WARNING):
        resumed(path, saved).close()
    assert "it is set aside as ledger.jsonl.damaged" in caplog.text
    assert path.with_name("ledger.jsonl.damaged").read_text() == content
    assert read_journal(path).at(1).snapshot() == saved["ledger"]


def test_a_second_damaged_journal_does_not_replace_the_first(path: Path) -> None:
    saved = step(new(), 1)
    for content in ("first\n", "second\n", "third\n"):
        path.write_text(content)
        resumed(path, saved).close()
    aside = {
        name: path.with_name(f"ledger.jsonl.{name}").read_text()
        for name in ("damaged", "damaged.2", "damaged.3")
    }
    assert aside == {"damaged": "first\n", "damaged.2": "second\n", "damaged.3": "third\n"}


def test_a_service_that_was_replaced_writes_no_more(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost service works on, while another has gone on from its last hand-over."""
    lost = new(path)
    saved = step(lost, 1)
    lost.take(2)
    lost.ledger.finish(3)  # its draws are written: the other's start rewinds them
    other = resumed(path, saved)
    before = path.read_bytes()
    for act in (lambda: lost.give_back(4), lambda: lost.ledger.drop(3, "f")):
        with pytest.raises(
            RunFailed,
            match=r"another service writes .*/ledger\.jsonl: it has \d+ bytes, expected the \d+ ",
        ):
            act()
    with caplog.at_level(logging.WARNING):
        lost.close()
    assert (
        "the last lines of the ledger could not be written: another service writes" in caplog.text
    )
    assert path.read_bytes() == before
    step(other, 2)
    other.close()
    assert read_journal(path).at().snapshot() == other.ledger.snapshot()


def test_a_full_disk_leaves_whole_lines(path: Path) -> None:
    queue = new(path)
    queue.take(50)
    before = path.read_bytes()
    with no_large_files(len(before) + 20), pytest.raises(OSError, match="File too large"):
        queue.ledger.finish(0)
    assert path.read_bytes() == before
    queue.hand_over([0], 1)
    queue.close()
    assert read_journal(path).at().snapshot() == queue.ledger.snapshot()


def test_a_full_disk_at_the_end_is_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    queue = new(path)
    queue.take(50)
    with no_large_files(path.stat().st_size + 20), caplog.at_level(logging.WARNING):
        queue.close()
    assert "the last lines of the ledger could not be written" in caplog.text


def test_a_cut_is_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the new file is on the disk too."""
    synced: list[tuple[bool, bytes]] = []
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: synced.append((S_ISDIR(os.fstat(file).st_mode), path.read_bytes())),
    )
    queue = new(path)
    assert synced == [(True, b"")]
    step(queue, 1)
    ((of_folder, content),) = synced[1:]
    assert not of_folder
    assert content.endswith(b'{"cut": 1}\n')


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    queue = new()
    step(queue, 1)
    queue.close()
    assert not list(tmp_path.iterdir())


def test_what_is_recorded_during_a_restore_lies_behind_the_start(path: Path) -> None:
    """The trainer alone went back; the service is the same."""
    queue = new(path)
    saved = step(queue, 1)
    step(queue, 2)
    queue.take(1)
    queue.restore(saved)
    queue.give_back_unsettled()
    assert lines(path)[-2:] == ['{"cut": 2}', '{"drawn": [6]}']
    queue.keep_journal(path)
    queue.close()
    assert lines(path)[-2:] == [
        '{"start": 1, "prompts": [7, "seven"], "max_staleness": 0}',
        '{"requeued": [2]}',
    ]


def test_a_repeated_start_of_the_journal_does_nothing(path: Path) -> None:
    """The answer to the first request was lost."""
    queue = new(path)
    saved = step(queue, 1)
    queue.restore(saved)
    queue.give_back_unsettled()
    for _ in range(2):
        queue.keep_journal(path)
    assert queue.take(1) == [2]
    queue.close()
    assert len(read_journal(path).starts) == 2
    assert read_journal(path).at().snapshot() == queue.ledger.snapshot()


def test_a_start_is_in_the_file_at_once(path: Path) -> None:
    queue = new(path)
    assert lines(path) == ['{"start": 0, "prompts": [7, "seven"], "max_staleness": 0}']
    file = queue.journal._file
    assert file is not None
    queue.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_line_that_the_system_takes_in_pieces_is_written_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, content: real(file, content[:7]))
    queue = new(path)
    step(queue, 1)
    queue.close()
    assert read_journal(path).at().snapshot() == queue.ledger.snapshot()


def test_a_state_that_is_replaced_before_it_is_gone_on_from_leaves_no_trace(path: Path) -> None:
    queue = new(path)
    saved = step(queue, 1)
    queue.restore(queue.beginning())
    queue.take(5)
    queue.restore(saved)
    queue.give_back_unsettled()
    queue.keep_journal(path)
    queue.close()
    assert lines(path)[-2:] == [
        '{"start": 1, "prompts": [7, "seven"], "max_staleness": 0}',
        '{"requeued": [2]}',
    ]
    assert read_journal(path).at().snapshot() == queue.ledger.snapshot()


def test_a_journal_that_was_not_started_keeps_its_entries() -> None:
    journal = LedgerJournal()
    journal.record("drawn", 0, None)
    journal.cut(1)
    journal.close()
    assert journal._unwritten == [{"drawn": [0]}]
