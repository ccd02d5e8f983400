"""A run that is killed anywhere and resumed is the run that was never disturbed.

With one process and one thread this holds bit for bit: metrics, samples, weights, optimizers,
generators, prompt accounting. Over several ranks, and between layouts, to round-off.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlcore.runs.checkpoints import committed_steps
from rlcore.runs.directory import RunDirectory
from rollout.accounting.audit import audit
from rollout.accounting.journal_reader import read_journal
from tests.integration.resume_runs import (
    STEPS,
    UPDATES,
    Ended,
    Runs,
    assert_close_run,
    assert_same_run,
    contents,
    metrics_of,
    result_of,
)

SEED = 5

# Each is one run that is killed several times: at a point, at which call of it since the last
# start, before or after it. Checkpoints are written after steps 2, 4 and 5; together they cover
# each thing that a kill can leave half done.
KILLS: dict[str, list[dict[str, Any]]] = {
    "before_there_is_a_checkpoint": [
        {"point": "version", "call": 1, "after": True},
        {"point": "update", "call": UPDATES + 2},
        # the policy's are written, the critic's not
        {"point": "shards", "call": 2},
    ],
    "in_the_log": [
        {"point": "torn line", "call": 4},                  # in the middle of step 3's metrics
        {"point": "samples", "call": 2},                    # step 4 has metrics, but no samples
    ],
    "in_a_checkpoint": [
        {"point": "write shard", "call": 200},              # of step 4
        # the same again: all written, not renamed
        {"point": "flush", "call": 1, "after": True},
        # and again: renamed, the one of step 2 not deleted
        {"point": "prune", "call": 1},
    ],
    "in_the_ledger": [
        {"point": "torn ledger", "call": 12},
        {"point": "torn ledger", "call": 3},
        {"point": "journal cut", "call": 2},                # a step has consumed, and nobody knows
        {"point": "journal start", "call": 1, "after": True},
    ],
    "after_the_last_step": [
        {"point": "export", "call": 1, "after": True},
        {"point": "result", "call": 1},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> Ended:
    """The run called "reference"."""
    ended = runs.train("reference")
    assert ended.codes == [0], ended.output
    assert result_of(runs.path("reference"))["status"] == "completed"
    return ended


def test_the_reference_has_everything_in_play(runs: Runs, undisturbed: Ended) -> None:
    rows = metrics_of(runs.path("reference"))
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    # the reference stays, the policy leaves it
    assert rows[1]["objective/kl"] == 0 < rows[STEPS]["objective/kl"]
    assert rows[2]["epoch"] < 1 < rows[STEPS]["epoch"]  # reshuffled in between
    assert sum(row["rollout/requeued_prompts"] for row in rows[1:]) > 0
    assert len({row["lr"] for row in rows[2:]}) == STEPS - 1
    assert all(row["train/optimizer_steps"] == UPDATES for row in rows[1:])
    assert "eval/score" in rows[2]


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", KILLS)
def test_killed_at_points(runs: Runs, undisturbed: Ended, where: str) -> None:
    for number, kill in enumerate(KILLS[where]):
        ended = runs.train(where, resume=number > 0, at=kill)
        assert ended.killed, (kill, ended.output)
        assert not ended.orphans
        assert audit(RunDirectory(runs.path(where))).contradictions == []
    runs.finish(where)
    assert_same_run(runs.path(where), runs.path("reference"))
    found = audit(RunDirectory(runs.path(where)))
    assert found.contradictions == []
    assert found.restarts >= len(KILLS[where])
    assert found.rewound > 0 or where != "in_the_ledger"
    # The journal knows more than the reference's; what counts of it is the same.
    journals = [
        read_journal(runs.path(name) / "ledger.jsonl").at(STEPS) for name in (where, "reference")
    ]
    assert journals[0] is not None
    assert journals[1] is not None
    assert journals[0].snapshot() == journals[1].snapshot()


def _completed(run: Path) -> bool:
    return (run / "result.json").exists() and result_of(run)["status"] == "completed"


def kill_at_times(runs: Runs, name: str, draw: random.Random, kills: int) -> int:
    """Kill the run at drawn times, resume it, and let it end. Returns how often it was killed.

    A time is a publication, of which each step makes one, and a delay of up to a step: so it means
    the same on a busy machine.
    """
    step_s = result_of(runs.path("reference"))["seconds"] / STEPS
    versions = runs.path(name) / "versions.jsonl"
    killed = 0
    for number in range(kills):
        before = versions.read_bytes().count(b"\n") if versions.exists() else 0
        publication = draw.randint(
            1, 1 + STEPS - max(committed_steps(runs.path(name) / "checkpoints"), default=0)
        )
        outside = {
            "file": str(versions),
            "lines": before + publication,
            "seconds": draw.uniform(0, step_s),
        }
        ended = runs.train(name, resume=number > 0, outside=outside)
        killed += ended.killed
        assert not ended.orphans
        assert ended.killed or ended.codes == [0], ended.output
        if _completed(runs.path(name)):  # killed after its last word, or not at all
            break
    else:
        runs.finish(name)
    assert_same_run(runs.path(name), runs.path("reference"))
    return killed


def test_killed_at_times_drawn_from_a_seed(runs: Runs, undisturbed: Ended) -> None:
    """Again, where the kills come too late for a run, as on a machine that stands still."""
    draw = random.Random(SEED)
    assert any(kill_at_times(runs, f"times_{number}", draw, 3) for number in range(5))


@pytest.mark.full
@pytest.mark.parametrize("number", range(5))
def test_killed_at_many_times(runs: Runs, undisturbed: Ended, number: int) -> None:
    draw = random.Random(SEED + 1 + number)
    kill_at_times(runs, f"many_times_{number}", draw, draw.randint(1, 4))


@pytest.mark.full
@pytest.mark.parametrize("number", range(15))
def test_killed_at_points_drawn_from_a_seed(runs: Runs, undisturbed: Ended, number: int) -> None:
    draw = random.Random(1000 + number)
    name = f"point_{number}"
    passed = runs.passed("reference")
    point = draw.choice(sorted(passed))
    kill = {"point": point, "call": draw.randint(1, passed[point]), "after": draw.random() < 0.5}
    ended = runs.train(name, at=kill)
    assert ended.killed, (kill, ended.output)
    if not _completed(runs.path(name)):  # killed after its last word
        runs.finish(name)
    assert_same_run(runs.path(name), runs.path("reference"))


@pytest.mark.parametrize(("name", "more"), [("grpo", ()), ("adapters", ("policy.lora.rank=4",))])
def test_random_numbers_and_the_initial_policy_outlive_a_kill(
    runs: Runs, undisturbed: Ended, name: str, more: tuple[str, ...]
) -> None:
    """The reference is the checkpoint of the run's start, whatever was resumed or trained since."""
    start = f"{name}_start"
    shutil.copytree(runs.path("reference"), runs.path(start))
    given = (f"policy.checkpoint={runs.path(start)}", *more)
    runs.finish(name, *given, algorithm="grpo")
    rows = metrics_of(runs.path(name))
    # an estimate from samples: one step's may be below 0
    assert rows[1]["objective/kl"] == 0 != rows[3]["objective/kl"] < rows[STEPS]["objective/kl"]

    for number, kill in enumerate(
        ({"point": "update", "call": 2 * UPDATES + 3}, {"point": "state", "call": 2})
    ):
        ended = runs.train(f"{name}_killed", *given, algorithm="grpo", resume=number > 0, at=kill)
        assert ended.killed, ended.output
        runs.finish(start, f"training.steps={STEPS + 1 + number}", "checkpoint.keep=9")
    runs.finish(f"{name}_killed", *given, algorithm="grpo")
    assert_same_run(runs.path(f"{name}_killed"), runs.path(name))

    shutil.rmtree(runs.path(start) / "checkpoints" / f"step_{STEPS:06d}")
    ended = runs.train(f"{name}_killed", *given, "training.steps=9", algorithm="grpo", resume=True)
    assert ended.codes == [2]
    assert f"step_{STEPS:06d}/model, which is gone" in ended.output


def test_supervised_fine_tuning_killed(runs: Runs) -> None:
    runs.finish("sft", algorithm="sft")
    ended = runs.train("sft_killed", algorithm="sft", at={"point": "update", "call": 4})
    assert ended.killed, ended.output
    runs.finish("sft_killed", algorithm="sft")
    assert_same_run(runs.path("sft_killed"), runs.path("sft"))


def test_asked_to_end(runs: Runs, undisturbed: Ended) -> None:
    ended = runs.train(
        "asked", at={"point": "update", "call": 2 * UPDATES + 1, "action": "terminate"}
    )
    assert ended.codes == [130], ended.output
    result = result_of(runs.path("asked"))
    assert (result["status"], result["steps"]) == ("interrupted", 3)
    assert [row["step"] for row in metrics_of(runs.path("asked"))] == [0, 1, 2, 3]
    assert [path.name for path in (runs.path("asked") / "checkpoints").iterdir()] == ["step_000003"]
    runs.finish("asked")
    assert_same_run(runs.path("asked"), runs.path("reference"))


def unowned(run: Path) -> dict[str, bytes]:
    """Read a run's folder, without its logs and its lock."""
    return {
        name: content
        for name, content in contents(run).items()
        if name != ".lock" and not name.startswith("logs/")
    }


# --- what is refused ------------------------------------------------------------------------------


def test_a_complete_run_has_nothing_to_resume(runs: Runs, undisturbed: Ended) -> None:
    before = unowned(runs.path("reference"))
    ended = runs.train("reference", resume=True)
    assert ended.codes == [2]
    assert ended.output.count("\n") == 1
    assert "'reference' is complete at step 5 of 5" in ended.output
    assert unowned(runs.path("reference")) == before


def test_a_dtype_that_cannot_be_loaded(runs: Runs, undisturbed: Ended) -> None:
    runs.train("plain", at={"point": "update", "call": 2 * UPDATES + 1})
    before = unowned(runs.path("plain"))
    ended = runs.train("plain", "model.dtype=bf16", resume=True)
    assert ended.codes == [2]
    message = ended.output.strip().splitlines()[-1]
    assert "policy was saved in float32, model.dtype makes it bfloat16" in message
    assert "Traceback" not in ended.output
    assert unowned(runs.path("plain")) == before
    runs.finish("plain")
    assert_same_run(runs.path("plain"), runs.path("reference"))


# --- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point",
    [{"point": "write shard", "call": 200}, {"point": "flush", "call": 2}],
    ids=["shard", "flush"],
)
def test_a_full_disk_leaves_the_last_checkpoint(
    runs: Runs, undisturbed: Ended, point: dict[str, Any]
) -> None:
    name = "full_" + point["point"].replace(" ", "_")
    message = fail_of_a_full_disk(runs, name, point)
    assert "the checkpoint of step 4 could not be written" in message
    assert "the checkpoint of step 2 is intact; free space under" in message
    assert [path.name for path in (runs.path(name) / "checkpoints").iterdir()] == ["step_000002"]
    assert result_of(runs.path(name))["status"] == "failed"
    runs.finish(name)
    assert_same_run(runs.path(name), runs.path("reference"))


def test_a_disk_too_full_for_the_log(runs: Runs, undisturbed: Ended) -> None:
    message = fail_of_a_full_disk(runs, "full_log", {"point": "samples", "call": 4})
    assert f"free space under {runs.folder} and continue with --resume" in message


def fail_of_a_full_disk(runs: Runs, name: str, point: dict[str, Any]) -> str:
    """The one line that the user gets."""
    ended = runs.train(name, at={**point, "action": "disk full"})
    assert ended.codes == [1], ended.output
    assert "Traceback" not in ended.output
    message = ended.output.strip().splitlines()[-1]
    assert "No space left on device" in message
    return message


# --- several ranks and other layouts --------------------------------------------------------------

# AdamW divides by the square root of the second moment: where that is tiny it makes any round-off
# as large as the learning rate, and two layouts part within three steps. With this eps they stay
# together.
CALM = ("policy.optimizer.eps=1e-2", "critic.optimizer.eps=1e-2")
TP2 = (*CALM, "policy.parallel.tensor=2", "cluster.launcher=torchrun")
PP2 = (*CALM, "policy.parallel.pipeline=2", "cluster.launcher=torchrun")
DP2 = (*CALM, "cluster.launcher=torchrun")
ROUND_OFF = 1e-5


@pytest.fixture(scope="module")
def calm(runs: Runs) -> Path:
    """An undisturbed run in one process."""
    runs.finish("calm", *CALM)
    return runs.path("calm")


@pytest.mark.everyday
def test_two_ranks_killed_in_a_checkpoint(runs: Runs, calm: Path) -> None:
    ended = runs.train("killed_tp2", *TP2, ranks=2, at={"point": "shards", "call": 3, "rank": 1})
    assert ended.killed, ended.output
    assert not ended.orphans
    runs.finish("killed_tp2", *TP2, ranks=2)
    assert_close_run(runs.path("killed_tp2"), calm, tolerance=ROUND_OFF)


def test_from_tensor_parallel_ranks_over_pipeline_stages_and_replicas_to_one_process(
    runs: Runs, calm: Path
) -> None:
    """One run under four layouts, each resuming the one before: losses as undisturbed."""
    for layout, updates, steps in ((TP2, UPDATES + 1, 2), (PP2, 1, 3), (DP2, 1, 4)):
        ask = {"point": "update", "call": updates, "action": "terminate"}
        ended = runs.train("layouts", *layout, ranks=2, resume=True, at=ask)
        assert ended.codes == [130, 130], ended.output
        result = result_of(runs.path("layouts"))
        assert (result["status"], result["steps"]) == ("interrupted", steps)
    runs.finish("layouts", *CALM)
    assert_close_run(runs.path("layouts"), calm, tolerance=ROUND_OFF)
