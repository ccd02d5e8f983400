"""The contradictions that `rlcore ledger` finds, and its report on a ledger or on one draw."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.data.sample import Sample
from rlcore.errors import UserError
from rlcore.launch.commands.ledger import MAX_SHOWN, describe, life_of, show_ledger
from rlcore.runs.checkpoints import Checkpoint
from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import write_rollouts
from rollout.accounting.audit import Audit, audit, check_checkpoint, check_recording, check_steps
from rollout.accounting.journal_reader import read_journal

CONFIG = """
run: {name: test}
model: {path: none}
data: {paths: [none.jsonl], label_key: answer}
reward: {parts: {right: {function: exact_match}}}
training: {steps: 5}
"""
START = {"start": 0, "prompts": [9, "nine"], "max_staleness": 0}
# Step 1 takes two of three draws, one of which came back; step 2 finds nothing in draw 3, and takes
# what is left.
WHOLE: list[dict[str, Any]] = [
    START,
    {"drawn": [0, 1, 2]},
    {"finished": [0, 1, 2]},
    {"requeued": [1], "because": "stale"},
    {"consumed": [0, 2], "step": 1},
    {"cut": 1},
    {"drawn": [1, 3]},
    {"finished": [1, 3]},
    {"dropped": [3], "by": "f"},
    {"consumed": [1], "step": 2},
    {"cut": 2},
]


def written(folder: Path, entries: list[dict[str, Any]]) -> Path:
    """The journal of these entries, in the folder of a run."""
    (folder / "config.yaml").write_text(CONFIG)
    path = folder / "ledger.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def steps_of(folder: Path, entries: list[dict[str, Any]]) -> list[str]:
    """What contradicts the order of the steps."""
    return list(check_steps(read_journal(written(folder, entries))))


@pytest.fixture
def checkpoint_of_step_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Checkpoint(step=2, folder=tmp_path, state={})
    monkeypatch.setattr("rollout.accounting.audit.latest_checkpoint", lambda _: found)
    monkeypatch.setattr("rollout.accounting.audit.check_checkpoint", lambda *_: [])


# --- steps ----------------------------------------------------------------------------------------


def test_steps_in_order_contradict_nothing(tmp_path: Path) -> None:
    assert steps_of(tmp_path, WHOLE) == []
    assert steps_of(tmp_path, [*WHOLE, {**START, "start": 1}, *WHOLE[6:]]) == []
    saved = read_journal(written(tmp_path, WHOLE)).at(1)
    assert saved is not None
    anew = [{**START, "start": 1, "ledger": saved.snapshot()}, *WHOLE[6:]]
    assert steps_of(tmp_path, anew) == []


BEFORE = "while the last step that consumed draws is"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            [*WHOLE[:9], {"consumed": [1], "step": 3}],
            "line 10: step 3 consumed draws 1, step 2 was the next",
        ),
        (WHOLE[:5] + WHOLE[6:], "line 9: step 2 consumed draws 1, step 1 was the next"),
        (WHOLE[:4] + WHOLE[5:6], f"line 5: the cut of step 1, {BEFORE} 0"),
        (WHOLE[:9] + WHOLE[10:], f"line 10: the cut of step 2, {BEFORE} 1"),
        (
            [*WHOLE[:8], {"consumed": [3], "step": 1}, *WHOLE[9:]],  # behind the cut of its step
            "line 9: step 1 consumed draws 3, step 2 was the next",
        ),
    ],
)
def test_steps_out_of_order_are_named(
    tmp_path: Path, entries: list[dict[str, Any]], said: str
) -> None:
    assert steps_of(tmp_path, entries) == [said]


# --- the checkpoint -------------------------------------------------------------------------------


def checkpoint(history: Path, step: int = 1) -> dict[str, Any]:
    """What a service gives to the checkpoint of `step`, which keeps the groups of its finished
    draws.
    """
    ledger = read_journal(history).at(step)
    assert ledger is not None
    finished = [draw for draw in ledger.unsettled() if ledger.state(draw) == "finished"]
    return {
        "stream": {"cursor": len(ledger), "requeued": ledger.requeued()},
        "ledger": ledger.snapshot(),
        "ahead": {"groups": [{"draw": draw} for draw in reversed(finished)]},
    }


def said_of(path: Path, source: dict[str, Any], step: int = 1) -> list[str]:
    return list(
        check_checkpoint(Checkpoint(step, path.parent, {"source": source}), read_journal(path))
    )


# 1 and 2 are finished, 3 is in flight.
LEFT_OVER = [
    START,
    {"drawn": [0, 1, 2, 3]},
    {"finished": [0, 1, 2]},
    {"consumed": [0], "step": 1},
    {"cut": 1},
]


@pytest.mark.parametrize("entries", [WHOLE, LEFT_OVER])
def test_a_checkpoint_of_its_cut_contradicts_nothing(
    tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    path = written(tmp_path, entries)
    assert said_of(path, checkpoint(path)) == []


CHECKPOINT = "the checkpoint of step 1"
SHORTER = {
    "ledger": {"codes": [1, -2], "lengths": [1, 1], "filters": []},
    "stream": {"cursor": 2, "requeued": []},
    "ahead": {"groups": [{"draw": 1}]},
}


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (
            {"ledger": {"codes": [-3, -2, -1], "lengths": [1, 2, 1]}, "stream": {"requeued": [0]}},
            f"draw 0 is requeued in {CHECKPOINT} and consumed by step 1 in the journal; so 1 draws",
        ),
        (
            {"ledger": {"codes": [1, -2, -3], "lengths": [1, 2, 1]}, "stream": {"requeued": [3]}},
            f"draw 3 is requeued in {CHECKPOINT} and in flight in the journal; so 1 draws",
        ),
        (SHORTER, f"{CHECKPOINT} knows 2 draws, the journal 4 at its cut"),
        (
            {"stream": {"cursor": 5}},
            f"the stream of {CHECKPOINT} is at draw 5, with none to come again;"
            " its ledger has 4 draws, requeued none",
        ),
        (
            {"stream": {"requeued": [2]}},
            f"the stream of {CHECKPOINT} is at draw 4, with 2 to come again;"
            " its ledger has 4 draws, requeued none",
        ),
        (
            {"ahead": {"groups": [{"draw": 2}]}},
            f"{CHECKPOINT} keeps the groups of draws 2, finished are 1, 2",
        ),
        (
            {"ahead": {"groups": [{"draw": 2}, {"draw": 1}, {"draw": 0}]}},
            f"{CHECKPOINT} keeps the groups of draws 0, 1, 2, finished are 1, 2",
        ),
    ],
)
def test_a_checkpoint_that_contradicts_its_cut_is_named(
    tmp_path: Path, harm: dict[str, dict[str, Any]], said: str
) -> None:
    path = written(tmp_path, LEFT_OVER)
    source = checkpoint(path)
    for part, changes in harm.items():
        source[part] |= changes
    assert said_of(path, source) == [said]


def test_a_checkpoint_without_its_cut_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    assert said_of(path, checkpoint(path), step=3) == [
        "the journal has no cut of step 3, of which there is a checkpoint"
    ]


# --- recordings -----------------------------------------------------------------------------------


def samples(*addresses: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"draw": draw, "index": index} for draw, index in addresses]


@pytest.mark.usefixtures("checkpoint_of_step_2")
def test_a_recording_is_held_against_the_step_that_it_is_of(
    tmp_path: Path, make_sample: Callable[..., Sample]
) -> None:
    written(tmp_path, WHOLE)
    run = RunDirectory(tmp_path)
    run.rollouts.mkdir(exist_ok=True)
    write_rollouts(run.rollouts_path(2), 2, [make_sample(99)])
    said = "step 2 was trained on draws 99, which the ledger does not say it consumed"
    assert said in audit(run).contradictions


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (samples((4, 0), (4, 1), (7, 0)), []),
        (samples((4, 0)), ["step 2 consumed draws 7, of which no sample is recorded"]),
        (
            samples((4, 0), (7, 0), (5, 0)),
            ["step 2 was trained on draws 5, which the ledger does not say it consumed"],
        ),
        (samples((4, 0), (7, 1), (7, 1)), ["step 2 was trained twice on sample 1 of draw 7"]),
    ],
)
def test_a_step_was_trained_on_what_it_consumed(
    records: list[dict[str, Any]], said: list[str]
) -> None:
    assert list(check_recording(2, records, [4, 7])) == said


# --- a run's folder -------------------------------------------------------------------------------


def test_a_run_before_its_first_checkpoint(tmp_path: Path) -> None:
    written(
        tmp_path, [*WHOLE, {**START, "start": 1}, {"drawn": [1]}, {"requeued": [1]}, {"drawn": [1]}]
    )
    found = audit(RunDirectory(tmp_path))
    assert found == Audit(
        draws=3,
        states={"in flight": 1, "finished": 0, "requeued": 0, "consumed": 2},
        steps=1,
        given_up={"stale": 1},
        restarts=1,
        rewound=4,
    )


def test_given_up_groups_are_counted_one_by_one(tmp_path: Path) -> None:
    written(
        tmp_path,
        [
            START,
            {"drawn": [0, 1, 2]},
            {"finished": [0, 1]},
            {"requeued": [0, 1], "because": "stale"},
            {"requeued": [2]},
        ],
    )
    found = audit(RunDirectory(tmp_path))
    assert (found.given_up, found.restarts, found.contradictions) == ({"stale": 2}, 0, [])


def test_a_journal_that_contradicts_itself_is_all_there_is_to_say(tmp_path: Path) -> None:
    written(tmp_path, [START, {"drawn": [0]}, {"consumed": [0], "step": 1}])
    found = audit(RunDirectory(tmp_path))
    assert found.contradictions == [
        f"{tmp_path / 'ledger.jsonl'}:3: draw 0 is in flight, expected finished"
    ]


# --- what is printed ------------------------------------------------------------------------------


def test_a_ledger_in_a_few_lines() -> None:
    found = Audit(
        draws=3,
        states={"in flight": 0, "requeued": 1, "consumed": 2},
        steps=2,
        restarts=1,
        rewound=7,
        checkpoint=2,
        given_up={"stale": 4},
        recorded=2,
    )
    assert list(describe(found)) == [
        "draws            3: 1 requeued, 2 consumed",
        "steps            2",
        "given up         4 stale",
        "restarts         1, which rewound 7 lines",
        "checkpoint       step 2",
        "recordings       of 2 steps",
        "balanced",
    ]
    assert "restarts         2, which rewound 0 lines" in describe(Audit(restarts=2))
    assert list(describe(Audit())) == [
        "draws            0",
        "steps            0",
        "restarts         0",
        "checkpoint       none",
        "recordings       of 0 steps",
        "balanced",
    ]


def test_contradictions_are_counted_and_the_first_are_shown() -> None:
    lines = list(
        describe(Audit(contradictions=[f"no. {number}" for number in range(MAX_SHOWN + 3)]))
    )
    assert lines[5:7] == ["NOT balanced:", "  no. 0"]
    assert lines[-2:] == [f"  no. {MAX_SHOWN - 1}", "  and 3 more"]
    assert list(describe(Audit(contradictions=["only"])))[-2:] == ["NOT balanced:", "  only"]


def test_the_life_of_a_draw(tmp_path: Path) -> None:
    history = read_journal(written(tmp_path, [*WHOLE, {**START, "start": 1}, {"drawn": [1]}]))
    assert list(life_of(history, 1)) == [
        "draw 1: in flight",
        "  line 2        drawn",
        "  line 3        finished",
        "  line 4        requeued (because stale)",
        "  line 7        drawn, rewound by line 12",
        "  line 8        finished, rewound by line 12",
        "  line 10       consumed (step 2), rewound by line 12",
        "  line 13       drawn",
    ]
    first, *_, last = life_of(history, 3)
    assert first == "draw 3: not drawn, since it was rewound"
    assert last == "  line 9        dropped (by f), rewound by line 12"
    with pytest.raises(UserError, match=r"draw 4 was not made; the ledger knows 3"):
        list(life_of(history, 4))


def test_a_draw_of_a_lost_journal_has_a_state_and_no_life(tmp_path: Path) -> None:
    """The start holds the ledger of the checkpoint, where the draw was made."""
    saved = {"codes": [1], "lengths": [3], "filters": []}
    history = read_journal(written(tmp_path, [{**START, "start": 1, "ledger": saved}]))
    assert list(life_of(history, 2)) == ["draw 2: consumed by step 1"]


def test_the_life_of_a_draw_that_contradicts_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no state, and everything that is needed to see why."""
    path = written(tmp_path, [*WHOLE, {"consumed": [1], "step": 3}, {"cut": 3}])
    assert show_ledger(tmp_path, draw=1, as_json=False, recordings=True) == 0
    assert capsys.readouterr().out.splitlines() == [
        (
            f"draw 1: in no one state, the journal contradicts itself: {path}:12: draw 1 is"
            " consumed by step 2, expected finished"
        ),
        "  line 2        drawn",
        "  line 3        finished",
        "  line 4        requeued (because stale)",
        "  line 7        drawn",
        "  line 8        finished",
        "  line 10       consumed (step 2)",
        "  line 12       consumed (step 3)",
    ]


def test_nothing_is_compared_for_the_life_of_a_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step has no cut, which `rlcore ledger` alone says."""
    written(tmp_path, WHOLE[:5] + WHOLE[6:])
    assert show_ledger(tmp_path, draw=0, as_json=False, recordings=True) == 0
    assert capsys.readouterr().out.startswith("draw 0: consumed by step 1\n")
    assert show_ledger(tmp_path, draw=None, as_json=False, recordings=True) == 1
    assert "NOT balanced" in capsys.readouterr().out


@pytest.mark.usefixtures("checkpoint_of_step_2")
def test_recordings_that_retention_has_deleted_are_not_missing(tmp_path: Path) -> None:
    """Only those up to the step that `rollouts/pruned` names."""
    written(tmp_path, WHOLE)
    missing = "is missing, tracking.save_rollouts is on"
    run = RunDirectory(tmp_path)
    run.rollouts.mkdir(exist_ok=True)

    def said() -> list[str]:
        return [line for line in audit(run).contradictions if missing in line]

    assert [line[:11] for line in said()] == ["step_000001", "step_000002"]
    (run.rollouts / "pruned").write_text("1\n")
    assert [line[:11] for line in said()] == ["step_000002"]
