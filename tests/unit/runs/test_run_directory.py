from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rlcore.data.sample import Sample
from rlcore.errors import DataError, DeadlineExceeded, UserError
from rlcore.runs.directory import RunDirectory, wait_until_free
from rlcore.runs.rollouts import read_rollouts, write_rollouts

MakeSample = Callable[..., Sample]


def used(root: Path, name: str = "a") -> RunDirectory:
    run = RunDirectory.create(root, name)
    run.write_config({"run": {"name": name}})
    run.metrics_path.write_text('{"step": 1}\n')
    run.close()
    return run


def test_an_existing_name_is_refused_unless_resumed_or_overwritten(tmp_path: Path) -> None:
    used(tmp_path)
    with pytest.raises(UserError, match=r"run 'a' exists.*--resume.*--overwrite"):
        RunDirectory.create(tmp_path, "a")
    resumed = RunDirectory.create(tmp_path, "a", resume=True)
    assert resumed.resumed
    assert resumed.metrics_path.exists()
    fresh = RunDirectory.create(tmp_path, "a", overwrite=True)
    assert not fresh.resumed
    assert not fresh.metrics_path.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_resume_of_a_new_name_starts_it(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "new", resume=True)
    assert not run.resumed
    assert run.logs.is_dir()


def test_a_folder_with_logs_only_is_no_run_yet(tmp_path: Path) -> None:
    (tmp_path / "a" / "logs").mkdir(parents=True)
    (tmp_path / "a" / "logs" / "rank_1.log").write_text("early")
    assert RunDirectory.create(tmp_path, "a").logs.joinpath("rank_1.log").exists()


def test_overwrite_spares_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    with pytest.raises(UserError, match="does not look like a run"):
        RunDirectory.create(tmp_path, "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter1.tex").exists()


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "/etc"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="plain folder name"):
        RunDirectory.create(tmp_path, name, overwrite=True)


def test_resume_and_overwrite_contradict(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contradict"):
        RunDirectory.create(tmp_path, "a", resume=True, overwrite=True)


HOLDER = """
import sys
from rlcore.runs.directory import RunDirectory
run = RunDirectory.create(sys.argv[1], "a", resume=True)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_elsewhere(root: Path) -> Iterator[int]:
    """Run `a` is held by a process, whose id it is; that is killed in the end."""
    command = [sys.executable, "-c", HOLDER, str(root)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdin is not None
    try:
        assert holder.stdout.readline() == "held\n"
        yield holder.pid
    finally:
        holder.kill()
        holder.wait(timeout=10)
        holder.stdin.close()
        holder.stdout.close()


def test_a_run_that_is_written_by_a_living_process_is_refused(tmp_path: Path) -> None:
    """A process that takes over from a lost one waits for a while."""
    used(tmp_path)
    ticks: list[None] = []
    with held_elsewhere(tmp_path) as pid:
        for flags in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(UserError, match=f"in use by pid {pid}"):
                RunDirectory.create(tmp_path, "a", **flags)
        with pytest.raises(
            DeadlineExceeded, match=rf"still in use by pid {pid} on .* after 0\.1 s \(a\.key\)"
        ):
            wait_until_free(
                tmp_path / "a", limit_s=0.1, key="a.key", tick=lambda: ticks.append(None)
            )
    assert ticks
    wait_until_free(tmp_path / "a", limit_s=0.1, key="a.key")
    assert RunDirectory.create(tmp_path, "a", resume=True).resumed, "a killed process holds nothing"


def test_result_is_absent_until_written(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    assert run.read_result() is None
    run.write_result(
        "early_stopped", 12, "objective/kl above target", objective_kl=0.3, target_kl=0.2
    )
    assert run.read_result() == {
        "status": "early_stopped",
        "steps": 12,
        "reason": "objective/kl above target",
        "objective_kl": 0.3,
        "target_kl": 0.2,
    }


def test_a_result_of_before_is_none_of_now(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    run.write_result("completed", 3)
    os.utime(run.result_path, (1000.0, 1000.0))
    assert run.read_result(since=1001.0) is None
    assert (
        run.read_result(since=1000.0)
        == run.read_result()
        == {
            "status": "completed",
            "steps": 3,
            "reason": "",
        }
    )


def test_rollouts_come_back_whole(tmp_path: Path, make_sample: MakeSample) -> None:
    run = RunDirectory.create(tmp_path, "a")
    nothing = make_sample(
        1,
        loss_mask=np.zeros(5, np.uint8),
        rollout_logprobs=np.zeros(0, np.float32),
        versions=(),
        label=10**30,
        metadata={"turn": 2, "path": Path("x")},
    )
    samples = [make_sample(0), nothing]
    advantages = [np.array([0.5, 0.1, -2.0], dtype=np.float32), np.zeros(0, np.float32)]
    path = run.rollouts_path(3)
    write_rollouts(path, 3, samples, advantages)
    assert path.name == "step_000003.jsonl.zst"
    records = read_rollouts(path)
    assert [record["step"] for record in records] == [3, 3]
    np.testing.assert_array_equal(np.float32(records[0]["advantages"]), advantages[0])
    for sample, record in zip(samples, records):
        back = Sample.from_record(record)
        np.testing.assert_array_equal(back.tokens, sample.tokens)
        np.testing.assert_array_equal(back.rollout_logprobs, sample.rollout_logprobs)
        assert back.versions == sample.versions
        assert (back.prompt_text, back.response_text, back.reward) == ("12+34=", "46", 1.0)
        assert back.reward_parts == {"exact_match": 1.0}
        assert back.label == sample.label
    assert Sample.from_record(records[1]).metadata == {"turn": 2, "path": "x"}


def test_advantages_that_do_not_fit_name_the_sample(
    tmp_path: Path, make_sample: MakeSample
) -> None:
    path = RunDirectory.create(tmp_path, "a").rollouts_path(1)
    with pytest.raises(ValueError, match="sample 0 of draw 7: advantages of shape"):
        write_rollouts(path, 1, [make_sample(7)], [np.zeros(2, np.float32)])
    assert not path.exists()
    with pytest.raises(ValueError, match="1 samples but 0 advantage vectors"):
        write_rollouts(path, 1, [make_sample(7)], [])


@pytest.mark.parametrize("cut", [0, 30, -6])
def test_a_damaged_rollout_file_is_named(tmp_path: Path, make_sample: MakeSample, cut: int) -> None:
    path = RunDirectory.create(tmp_path, "a").rollouts_path(1)
    write_rollouts(path, 1, [make_sample(k) for k in range(9)])
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"step_000001\.jsonl\.zst: not a readable rollout file"):
        read_rollouts(path)


def test_rewind_removes_what_later_steps_left(tmp_path: Path, make_sample: MakeSample) -> None:
    run = RunDirectory.create(tmp_path, "a")
    for step in (1, 2, 3):
        write_rollouts(run.rollouts_path(step), step, [make_sample()])
    (run.rollouts / ".step_000004.jsonl.zst.tmp").write_bytes(b"half")
    run.write_result("interrupted", 3)
    run.rewind(2)
    assert sorted(path.name for path in run.rollouts.iterdir()) == [
        "step_000001.jsonl.zst",
        "step_000002.jsonl.zst",
    ]
    assert run.read_result() is None
