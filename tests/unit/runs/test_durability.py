"""A checkpoint follows what it relies on to the disk: a power cut may lose the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.data.sample import Sample
from rlcore.runs.checkpoints import CheckpointStore
from rlcore.runs.rollouts import write_rollouts
from rlcore.runs.versions import VersionJournal, read_versions


class Disk:
    """One file: its content when last synced, if its name was synced since it was made."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._contents = dict[int, bytes]()
        self._names = set[tuple[str, int]]()
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            synced = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if synced.is_dir():
                self._names |= {(entry.name, entry.stat().st_ino) for entry in synced.iterdir()}
            else:
                self._contents[os.fstat(descriptor).st_ino] = synced.read_bytes()

        monkeypatch.setattr(os, "fsync", fsync)

    def is_whole(self) -> bool:
        inode = self.path.stat().st_ino
        return (self.path.name, inode) in self._names and self._contents.get(
            inode
        ) == self.path.read_bytes()


def test_a_version_that_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path / "versions.jsonl", monkeypatch)
    for life in range(2):
        journal = VersionJournal(disk.path)
        for step in range(2):
            assert journal.next(step).version == 2 * life + step + 1
            assert disk.is_whole()


def test_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_sample: Callable[..., Sample]
) -> None:
    disk = Disk(tmp_path / "step_000001.parquet", monkeypatch)
    for reward in (0.0, 1.0):  # the second time over the first
        write_rollouts(disk.path, 1, [make_sample(reward=reward)])
        assert disk.is_whole()


def test_the_names_in_all_folders_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    part = store.begin(3) / "model" / "rank"
    part.mkdir(parents=True)
    (part / "weights").write_bytes(b"1")
    store.write_state(3, {})
    disk = Disk(part / "weights", monkeypatch)
    monkeypatch.setattr(store, "_prune", lambda step: None)
    rename = os.rename

    def renamed(old: Path, new: Path) -> None:
        assert disk.is_whole()
        rename(old, new)

    monkeypatch.setattr(os, "rename", renamed)
    assert (store.commit(3) / "manifest.json").exists()


def test_a_torn_last_version_is_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "versions.jsonl"
    VersionJournal(path).next(0)
    whole = path.read_text()
    path.write_text(whole + whole[:-3])
    second = VersionJournal(path)
    assert (second.last, second.next(1).version) == (1, 2)
    assert [(one.version, one.incarnation) for one in read_versions(path)] == [(1, 0), (2, 1)]
    assert VersionJournal(path).next(2).incarnation == 2


def test_a_version_that_a_checkpoint_knows_is_not_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "versions.jsonl"  # lost
    assert VersionJournal(path, newest=7).next(3).version == 8
    assert VersionJournal(path, newest=7).next(3).version == 9
