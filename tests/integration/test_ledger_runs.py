"""`rlcore ledger` on real runs: it balances after kills and resumes, or names what does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore import cli
from rlcore.data.sample import Sample
from rlcore.runs.checkpoints import latest_checkpoint
from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import read_rollouts, write_rollouts
from rollout.accounting.audit import Audit, audit
from rollout.accounting.journal_reader import read_journal
from tests.integration.async_checks import check_async_run
from tests.integration.resume_runs import STEPS, UPDATES, Ended, Runs, assert_same_run


def balanced(run: Path) -> Audit:
    found = audit(RunDirectory(run))
    assert found.contradictions == []
    return found


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Ended:
    """The run called "whole"."""
    ended = runs.train("whole")
    assert ended.codes == [0], ended.output
    return ended


def test_a_whole_run(runs: Runs, whole: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    found = balanced(runs.path("whole"))
    assert (found.steps, found.checkpoint, found.recorded, found.restarts) == (
        STEPS,
        STEPS,
        STEPS,
        0,
    )
    assert found.states["consumed"] == 3 * STEPS
    assert found.states["in flight"] == found.states["finished"] == 0
    assert sum(found.states.values()) == found.draws

    assert cli.main(["ledger", str(runs.path("whole"))]) == 0
    out = capsys.readouterr().out
    assert f"{3 * STEPS} consumed" in out
    assert out.endswith("balanced\n")
    assert cli.main(["ledger", str(runs.path("whole")), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["balanced"] is True
    assert told["states"] == found.states
    assert cli.main(["ledger", str(runs.path("whole")), "--draw", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[1:]][:2] == ["drawn", "finished"]
    assert cli.main(["ledger", str(runs.path("whole")), "--draw", "900"]) == 2


def test_killed_while_generation_runs_ahead(runs: Runs) -> None:
    """Groups are in flight and buffered at every kill; buffered ones of the checkpoint are used."""
    asynchronous = ("rollout.max_staleness=2", "rollout.oversample=1")
    trained = 0
    saved: list[int] = []
    for number, kill in enumerate((
        # of step 3, behind the checkpoint of step 2
        {"point": "update", "call": 2 * UPDATES + 2},
        {"point": "journal cut", "call": 1},
        # the checkpoint of step 4 is being written
        {"point": "state", "call": 1, "after": True},
        {"point": "commit", "call": 1, "after": True},
    )):  # fmt: skip
        ended = runs.train("async", *asynchronous, resume=number > 0, at=kill)
        assert ended.killed, (kill, ended.output)
        trained += balanced(runs.path("async")).recorded
        found = latest_checkpoint(runs.path("async") / "checkpoints")
        assert found is not None
        saved += [group["draw"] for group in found.state["source"]["ahead"]["groups"]]
    runs.finish("async", *asynchronous)
    check_async_run(runs.path("async"), steps=STEPS, staleness=2)
    told = balanced(runs.path("async"))
    assert (told.steps, told.checkpoint, told.recorded) == (STEPS, STEPS, STEPS)
    assert told.states["consumed"] == 3 * STEPS
    assert told.rewound > 0
    history = read_journal(runs.path("async") / "ledger.jsonl")
    assert saved
    for draw in saved:
        life = [
            transition for _, transition, _, rewound_by in history.life(draw) if rewound_by is None
        ]
        assert life == ["drawn", "finished", "consumed"]
    # some steps were done more than once
    assert trained > STEPS
    # Another bound from here on; steps before it are held to theirs.
    runs.finish("async", "rollout.max_staleness=0", f"training.steps={STEPS + 1}")
    told = balanced(runs.path("async"))
    assert (told.steps, told.states["consumed"]) == (STEPS + 1, 3 * (STEPS + 1))
    bounds = read_journal(runs.path("async") / "ledger.jsonl").bounds
    assert bounds == dict.fromkeys(range(1, STEPS + 1), 2) | {STEPS + 1: 0}


def test_a_journal_that_is_lost_or_damaged_costs_its_past_alone(runs: Runs, whole: Ended) -> None:
    """The checkpoint has the ledger: the run goes on from there, and its new journal balances."""
    for name, harm in (
        ("lost", Path.unlink),
        ("damaged", lambda path: path.write_bytes(b"{}\n" + path.read_bytes())),
    ):
        runs.train(name, at={"point": "update", "call": 2 * UPDATES + 1})
        harm(runs.path(name) / "ledger.jsonl")
        runs.finish(name)
        assert balanced(runs.path(name)).steps == STEPS
        assert (runs.path(name) / "ledger.jsonl.damaged").exists() == (name == "damaged")


def test_a_trainer_that_is_killed_among_failing_conversations(runs: Runs) -> None:
    """Of every five draws one fails for good, in both runs alike."""
    workflow = {
        "name": "tests.integration.failing_environments:SomeDrawsFail",
        "how": "raises",
        "retries": 0,
    }
    given = (f"rollout.workflow={json.dumps(workflow)}", "rollout.max_failed=0.9")
    calm = runs.train("calm", *given)
    assert calm.codes == [0], calm.output
    for number, kill in enumerate((
        {"point": "update", "call": 2 * UPDATES + 1},
        {"point": "journal cut", "call": 1, "after": True},
    )):  # fmt: skip
        ended = runs.train("killed", *given, resume=number > 0, at=kill)
        assert ended.killed, (kill, ended.output)
    runs.finish("killed", *given)
    assert_same_run(runs.path("killed"), runs.path("calm"))
    for name in ("calm", "killed"):
        assert balanced(runs.path(name)).states["failed"] >= 3


# --- what contradicts what ------------------------------------------------------------------------


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def rewrite(run: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    found = entries(run)
    change(found)
    (run / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in found))


def consumed(found: list[dict[str, Any]], step: int) -> dict[str, Any]:
    return next(entry for entry in found if entry.get("step") == step)


def lose_a_draw(run: Path) -> None:
    rewrite(run, lambda found: consumed(found, 3)["consumed"].pop())


def consume_twice(run: Path) -> None:
    rewrite(
        run, lambda found: consumed(found, 4)["consumed"].append(consumed(found, 3)["consumed"][0])
    )


def forget_a_cut(run: Path) -> None:
    rewrite(run, lambda found: found.remove({"cut": STEPS}))


def forget_a_step(run: Path) -> None:
    rewrite(run, lambda found: found.remove(consumed(found, 4)))


def lose_a_recording(run: Path) -> None:
    RunDirectory(run).rollouts_path(2).unlink()


def train_twice(run: Path) -> None:
    """Step 4 again on what step 3 had."""
    paths = RunDirectory(run)
    records = read_rollouts(paths.rollouts_path(3))
    write_rollouts(
        paths.rollouts_path(4), 4, [Sample.from_record(one) for one in records], version=4
    )


def lie_about_versions(run: Path) -> None:
    path = run / "versions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["step"] = 0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (
            lose_a_draw,
            "is consumed by step 3 in the checkpoint of step 5 and finished in the journal",
        ),
        (consume_twice, "is consumed by step 3, expected finished"),
        (forget_a_cut, "the journal has no cut of step 5, of which there is a checkpoint"),
        (forget_a_step, "the cut of step 4, while the last step that consumed draws is 3"),
        (lose_a_recording, "step_000002.parquet is missing"),
        (train_twice, "step 4 was trained on draws"),
        (lie_about_versions, "step 2 has trained version 2, which is of step 0"),
    ],
)
def test_what_does_not_balance_is_named(
    runs: Runs,
    whole: Ended,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    harm: Callable[[Path], None],
    said: str,
) -> None:
    run = tmp_path / "harmed"
    shutil.copytree(runs.path("whole"), run)
    harm(run)
    assert cli.main(["ledger", str(run)]) == 1
    out = capsys.readouterr().out
    assert "NOT balanced" in out
    assert said in out


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", str(tmp_path)]) == 2
    assert "no config.yaml in it" in capsys.readouterr().err
