"""Weights in a shared folder: whole or absent, and removed when no engine needs them."""

from __future__ import annotations

import asyncio
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from shared_folders import (
    Publication,
    Reader,
    by_disk,
    flatten,
    layout,
    make_weights,
    model_folder,
    publish,
    same,
)

from rlcore.errors import RunFailed
from rollout.weight_sync.delta import DeltaSender, DeltaTransport
from rollout.weight_sync.disk import DiskTransport, FolderSender, WeightFolders, published
from tests.limits import no_large_files

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def folders(tmp_path: Path) -> WeightFolders:
    return WeightFolders(tmp_path / "weights", model=model_folder(tmp_path / "model"))


def names(folders: WeightFolders) -> list[str]:
    return sorted(path.name for path in folders.root.iterdir() if path.name != ".lock")


async def test_every_engine_loads_what_was_published(folders: WeightFolders) -> None:
    engines = [Reader("a"), Reader("b")]

    transport = by_disk(folders)
    for seed in range(3):
        weights = make_weights(seed)
        assert await publish(transport, engines, weights) == {}
        for engine in engines:
            assert same(engine.weights, weights)
        assert names(folders) == [f"update_{seed + 1:06d}"]  # the older one is gone
    await transport.close()
    assert (published(folders.root)[0] / "config.json").read_text() == '{"model_type": "qwen3"}'
    assert (published(folders.root)[0] / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("transport", "sender"), [(DiskTransport, FolderSender), (DeltaTransport, DeltaSender)]
)
async def test_a_relative_folder_is_the_same_for_both_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Any, sender: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = WeightFolders(Path("weights"), model=model_folder(tmp_path / "model"))
    both = Publication(transport(Path("weights"), timeout_s=5), sender(folders))
    engine = Reader("a")

    assert await publish(both, [engine], make_weights()) == {}
    assert names(folders) == ["update_000001"]
    await both.close()
    assert same(engine.weights, make_weights())


async def test_what_an_engine_still_has_is_kept(folders: WeightFolders) -> None:
    first = Reader("a")
    second = Reader("b")

    transport = by_disk(folders)
    await publish(transport, [first, second], make_weights(0))
    # it alone had missed something
    await publish(transport, [second], make_weights(0))
    assert names(folders) == ["update_000001", "update_000002"]
    second.broken = True
    failed = await publish(transport, [first, second], make_weights(1))
    assert failed == {second: "RuntimeError: out of memory"}
    assert names(folders) == ["update_000003"]
    assert same(first.weights, make_weights(1))


async def test_what_an_engine_had_that_has_left_is_removed(folders: WeightFolders) -> None:
    """A run that engines join and leave would fill the disk, a model each."""
    first = Reader("a")

    transport = by_disk(folders)
    await publish(transport, [first, Reader("guest")], make_weights(0))
    await publish(transport, [first], make_weights(1))
    assert names(folders) == ["update_000001", "update_000002"], "the guest may be there still"
    transport.transport.has_all_engines = True
    await publish(transport, [first], make_weights(2))
    assert names(folders) == ["update_000003"]


async def test_nothing_is_seen_of_a_publication_that_is_given_up(folders: WeightFolders) -> None:
    weights = make_weights()
    buckets = layout(weights)

    transport = by_disk(folders)
    await transport.open([Reader()], buckets)
    await transport.send(buckets[0], flatten(buckets[0], weights))
    assert published(folders.root) == []
    await transport.close()
    assert names(folders) == []


def test_an_earlier_runs_folders_are_counted_on_and_its_rest_removed(
    folders: WeightFolders,
) -> None:
    asyncio.run(publish(by_disk(folders), [Reader()], make_weights(0)))
    (folders.root / ".update_000002.partial").mkdir()  # killed while it wrote
    (folders.root / "notes.txt").touch()  # not ours
    folders.close()
    again = WeightFolders(folders.root, model=folders.root.parent / "model")
    engine = Reader()
    asyncio.run(publish(by_disk(again), [engine], make_weights(1)))
    assert names(folders) == ["notes.txt", "update_000002"]
    assert same(engine.weights, make_weights(1))


async def test_old_weights_that_cannot_be_removed_are_told_and_end_nothing(
    folders: WeightFolders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS keeps what an engine has open."""

    def refuse(folder: Path) -> None:
        raise OSError(39, "Directory not empty", str(folder))

    transport = by_disk(folders)
    await publish(transport, [Reader()], make_weights(0))
    monkeypatch.setattr("rollout.weight_sync.disk.remove_tree", refuse)
    assert await publish(transport, [Reader()], make_weights(1)) == {}
    assert names(folders) == ["update_000001", "update_000002"]
    assert "update_000001 could not be removed" in caplog.text


def test_a_disk_that_refuses_is_told_at_the_end(folders: WeightFolders) -> None:
    message = r"could not be written to .*/weights \(rollout.engine.weights_dir\): .*File too large"
    with pytest.raises(RunFailed, match=message), no_large_files(200):
        asyncio.run(publish(by_disk(folders), [Reader()], make_weights()))
    assert names(folders) == []


def test_too_little_room_is_told_before_anything_is_written(
    folders: WeightFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000, 100, 900))
    size = sum(weight.nbytes for weight in make_weights().values())
    with pytest.raises(
        RunFailed, match=rf"/weights .* has 900 bytes left, the weights need {size:,}"
    ):
        asyncio.run(publish(by_disk(folders), [Reader()], make_weights()))
