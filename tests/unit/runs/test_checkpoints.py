"""A checkpoint is whole or absent, whatever moment the process is killed at."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.errors import RunFailed, UserError
from rlcore.runs.checkpoints import (
    CheckpointStore,
    DamagedCheckpoint,
    committed_steps,
    latest_checkpoint,
    read_checkpoint,
)

WRITES = ("rename", "replace", "fsync")  # every way in which a commit reaches the disk
DELETES = ("unlink", "rmdir")  # and in which pruning does


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ours may catch it."""


def save(store: CheckpointStore, step: int) -> None:
    aside = store.begin(step)
    (aside / "model" / "shard_0.bin").write_bytes(bytes([step]) * 1000)
    (aside / "model" / "shard_1.bin").write_bytes(bytes([step]) * 2000)
    store.write_state(step, {"step": step, "source": {"cursor": step * 7}})
    store.commit(step)


def assert_whole(store: CheckpointStore, step: int) -> None:
    found = latest_checkpoint(store.folder)
    assert found is not None
    assert found.step == step
    assert found.state == {"step": step, "source": {"cursor": step * 7}}
    assert (found.model / "shard_1.bin").read_bytes() == bytes([step]) * 2000


def fail_at(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    error: Callable[[], BaseException],
    calls: tuple[str, ...],
) -> list[str]:
    """Make call number `count` (from 0) of `calls` raise. Returns the list of calls made.

    No call waits for the disk: a killed process, unlike a machine that loses power, keeps what it
    wrote.
    """
    made: list[str] = []

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            if len(made) == count + 1:
                raise error()
            return None if name == "fsync" else real(*args, **kwargs)

        return call

    for name in calls:
        monkeypatch.setattr(os, name, wrap(name))
    return made


def points(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[CheckpointStore], None],
    calls: tuple[str, ...] = WRITES + DELETES,
) -> int:
    """How many points `act` can be killed at."""
    with monkeypatch.context() as patch:
        made = fail_at(patch, -1, Killed, calls)
        act(CheckpointStore(tmp_path / "counted", keep=2))
    return len(made)


def test_commits_and_keeps_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert latest_checkpoint(store.folder) is None
    for step in (1, 2, 3, 10):
        save(store, step)
    assert committed_steps(store.folder) == [3, 10]
    assert_whole(store, 10)
    assert read_checkpoint(store.path(3)).state["source"] == {"cursor": 21}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003", "step_000010"]


def test_who_goes_on_keeps_as_few_as_the_commit_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "_prune", lambda self, newest: None)  # killed before that
        save(store, 2)
    again = CheckpointStore(tmp_path, keep=1)
    assert committed_steps(again.folder) == [1, 2]
    again.rewind(2)
    assert committed_steps(again.folder) == [2]
    assert_whole(again, 2)


def test_a_kill_at_any_point_of_a_commit_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def three(store: CheckpointStore) -> None:
        for step in (1, 2, 3):
            save(store, step)

    total = points(tmp_path, monkeypatch, three)
    assert total > 20
    seen = set()
    for count in range(total):
        folder = tmp_path / f"kill_{count}"
        with monkeypatch.context() as patch:
            fail_at(patch, count, Killed, WRITES + DELETES)
            with pytest.raises(Killed):
                three(CheckpointStore(folder, keep=2))
        latest = latest_checkpoint(folder)
        store = CheckpointStore(folder, keep=2)  # sweeps
        for committed in committed_steps(store.folder):
            read_checkpoint(store.path(committed))
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
        step = latest.step if latest else 0
        seen.add(step)
        if step:
            assert_whole(store, step)
        save(store, step + 1)  # and the run can go on
        assert_whole(store, step + 1)
    assert seen == {0, 1, 2, 3}


def test_a_kill_while_a_step_is_committed_again_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(store: CheckpointStore) -> None:
        save(store, 1)
        save(store, 1)

    first = points(tmp_path / "once", monkeypatch, lambda store: save(store, 1))
    total = points(tmp_path / "twice", monkeypatch, twice)
    assert total > first
    for count in range(first, total):
        folder = tmp_path / f"kill_{count}"
        with monkeypatch.context() as patch:
            fail_at(patch, count, Killed, WRITES + DELETES)
            with pytest.raises(Killed):
                twice(CheckpointStore(folder))
        assert_whole(CheckpointStore(folder), 1)


def test_a_full_disk_is_reported_plainly_and_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = points(tmp_path, monkeypatch, lambda store: save(store, 2), WRITES)
    reported = 0
    for count in range(total):
        store = CheckpointStore(tmp_path / f"full_{count}", keep=2)
        save(store, 1)
        with monkeypatch.context() as patch:
            fail_at(patch, count, lambda: OSError(errno.ENOSPC, "No space left on device"), WRITES)
            with pytest.raises(RunFailed) as caught:
                save(store, 2)
        message = str(caught.value)
        assert "step 2" in message
        assert "No space left on device" in message
        assert "free space" in message
        if latest_checkpoint(store.folder).step == 1:  # type: ignore[union-attr]
            assert "the checkpoint of step 1 is intact" in message
            reported += 1
        assert_whole(CheckpointStore(store.folder), committed_steps(store.folder)[-1])
        assert not list(store.folder.glob(".*")), "the space of the failed write was given back"
    # only a failure to sync the folder's names comes after the rename
    assert reported >= total - 1


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("state.json", None, "state.json is missing"),
        ("state.json", b"{", "state.json has 1 bytes"),
        ("manifest.json", b"{", "manifest.json cannot be read"),
        ("manifest.json", b"{}", "manifest.json lists no state.json"),
        ("manifest.json", None, "manifest.json is missing"),
        ("model/shard_1.bin", b"\2" * 5, "shard_1.bin has 5 bytes, 2000 were written"),
        ("model/shard_0.bin", None, "shard_0.bin is missing"),
        ("model/shard_0.bin", b"x" * 1000, "other content"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, content: bytes | None, named: str
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    save(store, 2)
    damaged = store.path(2) / file
    damaged.unlink()
    if content is not None:
        damaged.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert_whole(store, 1)
    assert named in caplog.text
    assert "going back to the checkpoint of step 1" in caplog.text
    with pytest.raises(DamagedCheckpoint, match="step_000002 is damaged"):
        read_checkpoint(store.path(2))

    store.rewind(1)  # the run goes on and reaches step 2 again
    assert committed_steps(store.folder) == [1]
    save(store, 2)
    assert_whole(store, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_damage_to_all_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (store.path(1) / "state.json").unlink()
    with pytest.raises(
        UserError, match=r"no whole checkpoint is left.*state\.json is missing.*--overwrite"
    ):
        latest_checkpoint(store.folder)


def test_a_damaged_newest_never_costs_the_last_good_one(tmp_path: Path) -> None:
    """Pruning counts only what was committed up to now, so one kept is the one just written."""
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    save(store, 5)
    (store.path(5) / "state.json").unlink()
    save(store, 4)
    assert read_checkpoint(store.path(4)).step == 4


def test_state_is_exact(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(1)
    keys = np.arange(624, dtype=np.uint32).reshape(2, 312)
    state = {
        "nan": float("nan"),
        "inf": -np.inf,
        "pi": np.float64(np.pi),
        "tuple": (1, [2.5, None, "x"]),
        "keys": keys,
    }
    store.write_state(1, state)
    store.commit(1)
    back = read_checkpoint(store.path(1)).state
    assert np.isnan(back["nan"])
    assert back["inf"] == -np.inf
    assert back["pi"] == np.pi
    assert back["tuple"] == [1, [2.5, None, "x"]]
    assert back["keys"].dtype == np.uint32
    np.testing.assert_array_equal(back["keys"], keys)


@pytest.mark.parametrize(
    ("state", "named"), [({"a": {3: 1}}, "state.a: key 3"), ({"b": [object()]}, r"state\.b\[0\]")]
)
def test_state_that_would_not_come_back_is_refused(
    tmp_path: Path, state: dict[str, Any], named: str
) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(1)
    with pytest.raises(TypeError, match=named):
        store.write_state(1, state)


WRITER = """
import itertools, pathlib, sys
from rlcore.runs.checkpoints import CheckpointStore, latest_checkpoint
store = CheckpointStore(pathlib.Path(sys.argv[1]), keep=2)
found = latest_checkpoint(store.folder)
step = found.step if found else 0
for step in itertools.count(step + 1):
    aside = store.begin(step)
    (aside / "model" / "shard.bin").write_bytes(step.to_bytes(4, "little") * 50_000)
    store.write_state(step, {"step": step, "samples": list(range(2000))})
    store.commit(step)
    print("committed", flush=True)
"""


def test_sigkill_at_random_moments(tmp_path: Path) -> None:
    """Real processes are killed at seeded moments after a commit; each continues after the last."""
    moments = random.Random(0)
    last = 0
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert writer.stdout is not None
        output = writer.stdout.readline()
        assert output == "committed\n", output + writer.stdout.read()
        time.sleep(moments.uniform(0.005, 0.15))
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=10)
        writer.stdout.close()
        found = latest_checkpoint(tmp_path)
        assert found is not None
        assert found.step > last
        assert found.step == max(int(path.name[5:]) for path in tmp_path.glob("step_*")), (
            "the newest is whole"
        )
        assert (found.model / "shard.bin").read_bytes() == found.step.to_bytes(4, "little") * 50_000
        last = found.step
