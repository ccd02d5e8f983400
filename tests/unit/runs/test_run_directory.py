from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlcore.data.sample import Sample
from rlcore.errors import DataError, UserError
from rlcore.runs.directory import HEADER, RunDirectory
from rlcore.runs.rollouts import read_rollouts, write_rollouts
from rlcore.runs.sample_index import write_index

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


@pytest.mark.parametrize(
    "files",
    [
        ("thesis.tex",),
        # A file of the name config.yaml and a lock beside it do not make a run.
        ("config.yaml", "metrics.jsonl", "result.json", "thesis.tex", ".lock"),
    ],
)
def test_overwrite_spares_a_folder_that_is_no_run(tmp_path: Path, files: tuple[str, ...]) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in files:
        (project / name).write_text("run: {name: project}\npolicy: {}\n")
    with pytest.raises(UserError, match="does not look like a run"):
        RunDirectory.create(tmp_path, "project", overwrite=True)
    assert len(list(project.iterdir())) == len(files)


@pytest.mark.parametrize("lost", [".lock", "origins"])
def test_overwrite_needs_the_lock_and_configuration_of_a_run(tmp_path: Path, lost: str) -> None:
    """The latter has all sections, and says where each value came from."""
    run = used(tmp_path)
    if lost == ".lock":
        (run.path / ".lock").unlink()
    else:
        sections = ("run", "model", "data", "policy", "algorithm", "rollout", "training")
        run.config_path.write_text("".join(f"{name}:\n  a: 1\n" for name in sections))
    with pytest.raises(UserError, match="does not look like a run"):
        RunDirectory.create(tmp_path, "a", overwrite=True)
    assert run.metrics_path.exists()


def test_a_configuration_that_may_not_be_read_is_no_run_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = used(tmp_path)
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path == run.config_path:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(UserError, match="does not look like a run"):
        RunDirectory.create(tmp_path, "a", overwrite=True)
    RunDirectory.create(tmp_path, "a", resume=True).close()


def test_overwrite_leaves_and_names_what_no_run_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = used(tmp_path).path
    (path / "notes.md").write_text("mine")
    (path / "plots").mkdir()
    (path / "hf").mkdir()
    RunDirectory.create(tmp_path, "a", overwrite=True)
    left = {entry.name for entry in path.iterdir()}
    assert left == {".lock", "logs", "rollouts", "checkpoints", "notes.md", "plots"}
    assert (path / "notes.md").read_text() == "mine"
    assert "notes.md, plots" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_overwrite_of_a_link_to_a_run_deletes_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a link inside the run it deletes nothing: only the link goes."""
    (tmp_path / "runs").mkdir()
    elsewhere = tmp_path / "elsewhere"
    path = used(tmp_path / "disk").path
    elsewhere.mkdir()
    (elsewhere / "shard").write_text("x")
    (path / "hf").symlink_to(elsewhere)
    (tmp_path / "runs" / "linked").symlink_to(path)
    moved: list[Path] = []
    rename = os.rename

    def spied(old: Path, new: Path) -> None:
        moved.append(new)
        rename(old, new)

    monkeypatch.setattr(os, "rename", spied)
    run = RunDirectory.create(tmp_path / "runs", "linked", overwrite=True)
    assert run.path.is_symlink()
    assert not (path / "metrics.jsonl").exists()
    assert not (path / "hf").is_symlink()
    assert (elsewhere / "shard").exists()
    # nothing is moved to the folder of the link, which may be on another file system
    assert {new.parent.parent for new in moved} == {tmp_path / "disk"}
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["linked"]
    assert [entry.name for entry in (tmp_path / "disk").iterdir()] == ["a"]


def test_overwrite_that_a_kill_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.yaml, by which a run is known, is deleted last."""
    run = used(tmp_path)
    rename = os.rename

    def killed_at_the_configuration(source: Path, target: Path) -> None:
        if Path(source).name == "config.yaml":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed_at_the_configuration)
    with pytest.raises(KeyboardInterrupt):
        RunDirectory.create(tmp_path, "a", overwrite=True)
    monkeypatch.undo()
    assert run.config_path.exists()
    assert not run.metrics_path.exists()
    assert not RunDirectory.create(tmp_path, "a", overwrite=True).resumed
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_run_that_was_killed_before_it_wrote_is_none(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "a").close()
    assert not RunDirectory.create(tmp_path, "a").resumed


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "/etc", "a\0b", "a\nb", "x" * 300])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="plain folder name"):
        RunDirectory.create(tmp_path, name, overwrite=True)


def test_resume_and_overwrite_contradict(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contradict"):
        RunDirectory.create(tmp_path, "a", resume=True, overwrite=True)


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
    """Whatever the file server's clock says: here it is years behind."""
    run = RunDirectory.create(tmp_path, "a")
    assert run.result_mark() is None
    run.write_result("failed", 3)
    earlier = run.result_mark()
    assert run.read_result(but=earlier) is None
    run.write_result("completed", 3)
    os.utime(run.result_path, (1000.0, 1000.0))
    expected = {"status": "completed", "steps": 3, "reason": ""}
    assert run.read_result(but=earlier) == run.read_result() == expected


def test_the_configuration_is_its_owners_and_holds_no_secret(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    run.config_path.write_text("an older one")
    run.config_path.chmod(0o644)
    run.write_config({"rollout": {"engine": {"urls": ["http://user:hidden@host"]}}})
    assert run.config_path.stat().st_mode & 0o777 == 0o600
    assert run.config_path.read_text().startswith(HEADER)
    assert "hidden" not in run.config_path.read_text()
    run.write_result("failed", 0, "no answer from http://user:hidden@host/x")
    assert "hidden" not in run.result_path.read_text()


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
    assert path.name == "step_000003.parquet"
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
    with pytest.raises(DataError, match=r"step_000001\.parquet: not a readable recording"):
        read_rollouts(path)


def test_rewind_removes_what_later_steps_left(tmp_path: Path, make_sample: MakeSample) -> None:
    run = RunDirectory.create(tmp_path, "a")
    for step in (1, 2, 3):
        scalars = write_rollouts(run.rollouts_path(step), step, [make_sample()])
        write_index(run.index_path(step), step, scalars)
    (run.rollouts / ".step_000004.parquet.tmp").write_bytes(b"half")
    run.write_result("interrupted", 3)
    run.rewind(2)
    for folder in (run.rollouts, run.index):
        assert sorted(path.name for path in folder.iterdir()) == [
            "step_000001.parquet",
            "step_000002.parquet",
        ]
    assert run.read_result() is None


def test_the_newest_rollouts_are_kept_and_those_a_checkpoint_goes_on_with(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    (run.checkpoints / "step_000002").mkdir()
    for step in range(1, 8):
        run.rollouts_path(step).write_bytes(b"x")
        run.prune_rollouts(step, keep=2)
    assert run.recorded_steps() == [3, 6, 7], "a replay from step 2 trains on step 3"
    assert run.pruned_through() == 5
    run.rewind(6)
    assert run.recorded_steps() == [3, 6]
    run.prune_rollouts(6, keep=2)
    assert run.pruned_through() == 5, "what was deleted stays deleted"


def test_what_a_checkpoint_goes_on_with_that_is_being_written_is_kept(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    (run.checkpoints / ".step_000002.tmp").mkdir()
    (run.checkpoints / ".step_000004.trash").mkdir()
    for step in range(1, 8):
        run.rollouts_path(step).write_bytes(b"x")
        run.prune_rollouts(step, keep=1)
    assert run.recorded_steps() == [3, 7]


def test_nothing_is_pruned_that_need_not_be(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    run.rollouts_path(1).write_bytes(b"x")
    run.prune_rollouts(1, keep=1)
    assert run.recorded_steps() == [1]
    assert run.pruned_through() == 0
    assert [path.name for path in run.rollouts.iterdir()] == ["step_000001.parquet"]
