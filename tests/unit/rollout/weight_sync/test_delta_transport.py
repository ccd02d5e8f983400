"""The delta transport: every follower ends with the trainer's bytes, or a reason why not."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from shared_folders import Reader, layout, make_weights, model_folder, nudge, publish, read, same

from rlcore.errors import RunFailed
from rollout.weight_sync.delta import DeltaTransport
from rollout.weight_sync.delta_files import CHANGES, Manifest
from rollout.weight_sync.folders import WeightFolders, published
from rollout.weight_sync.follower import NOTES, Follower, keep_following, local_folder
from tests.limits import no_large_files


@pytest.fixture
def folders(tmp_path: Path) -> WeightFolders:
    return WeightFolders(tmp_path / "weights", model=model_folder(tmp_path / "model"))


def shared(folders: WeightFolders) -> list[tuple[str, bool]]:
    """(name, is it a whole one) of each publication."""
    return [(path.name, Manifest.read(path).base is None) for path in published(folders.root)]


def newest(folders: WeightFolders) -> Manifest:
    return Manifest.read(published(folders.root)[-1])


def publish_all(folders: WeightFolders, *versions, engine: Reader | None = None) -> None:
    async def run() -> None:
        transport = DeltaTransport(folders, timeout_s=5)
        for weights in versions:
            assert await publish(transport, [engine or Reader()], weights) == {}
        await transport.close()

    asyncio.run(run())


def test_engines_hold_every_version_though_only_changes_are_written(folders: WeightFolders) -> None:
    engine = Reader()

    async def run() -> None:
        transport = DeltaTransport(folders, timeout_s=5)
        weights = make_weights()
        await publish(transport, [engine], weights)
        whole = newest(folders).num_bytes
        for seed, names in enumerate((["embed"], ["norm", "router.bias"], [], ["down"])):
            weights = nudge(weights, names, seed)
            assert await publish(transport, [engine], weights) == {}
            assert same(engine.weights, weights)
            assert sorted(newest(folders).changes) == sorted(names)
            assert newest(folders).num_bytes < whole / 4
        assert engine.folder is not None
        assert (engine.folder / "config.json").exists()
        await transport.close()
        assert not engine.folder.exists()

    asyncio.run(run())
    assert shared(folders) == [("update_000001", True)] + [
        (f"update_{n:06d}", False) for n in range(2, 6)
    ]


def test_a_whole_one_follows_when_changes_are_larger_or_the_layout_is_another(
    folders: WeightFolders,
) -> None:
    engine = Reader()

    async def run() -> None:
        transport = DeltaTransport(folders, timeout_s=5)
        # nearly every element changes: two such take more than the whole
        for seed in range(4):
            await publish(transport, [engine], make_weights(seed))
            assert same(engine.weights, make_weights(seed))
            if seed == 2:
                assert [whole for _, whole in shared(folders)] == [True, False, False]
        assert shared(folders) == [("update_000004", True)]
        fewer = {name: weight for name, weight in make_weights(9).items() if name != "norm"}
        await publish(transport, [engine], fewer)
        assert same(engine.weights, fewer)
        assert shared(folders) == [("update_000005", True)]
        await transport.close()

    asyncio.run(run())


def test_after_a_publication_that_was_given_up_the_next_is_whole(folders: WeightFolders) -> None:
    engine = Reader()
    first = make_weights(0)
    second = nudge(make_weights(0), ["embed"])

    async def run() -> None:
        transport = DeltaTransport(folders, timeout_s=5)
        await publish(transport, [engine], first)
        buckets = layout(second)
        await transport.open([engine], buckets)
        await transport.close()
        assert [path.name for path in folders.root.iterdir()] == ["update_000001"]
        await publish(transport, [engine], second)
        assert same(engine.weights, second)
        assert shared(folders) == [("update_000002", True)]
        await transport.close()

    asyncio.run(run())


def test_an_engine_that_missed_some_gets_them_all(folders: WeightFolders, tmp_path: Path) -> None:
    versions = [make_weights()]
    for seed in range(3):
        versions.append(nudge(versions[-1], ["embed", "down"], seed))
    publish_all(folders, *versions)
    early = Follower(folders.root, tmp_path / "early")
    late = Follower(folders.root, tmp_path / "late")
    assert same(read(early.follow(2)), versions[1])
    assert same(read(early.follow(4)), versions[3])
    assert same(read(late.follow(4)), versions[3])
    assert early.newest() == early.number == 4


@pytest.mark.parametrize("damage", ["flipped", "cut", "local", "wrong base"])
def test_damage_that_a_whole_publication_mends(
    folders: WeightFolders, tmp_path: Path, damage: str
) -> None:
    first = make_weights()
    second = nudge(make_weights(), ["embed"])
    publish_all(folders, first, second)
    follower = Follower(folders.root, tmp_path / "local")
    folder = follower.follow(1)
    if damage == "local":  # in a tensor that the change touches
        shard = next(path for path in folder.glob("*.safetensors") if b"embed" in path.read_bytes())
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
        assert same(read(follower.follow(2)), second)
        return
    if damage == "wrong base":  # it believes to hold publication 1
        wrong = Follower(folders.root, tmp_path / "other")
        wrong.follow(2)
        wrong.number = 1
        assert same(read(wrong.follow(2)), second)
        return
    changes = folders.root / "update_000002" / CHANGES
    content = changes.read_bytes()
    changes.write_bytes(
        content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1])
    )
    with pytest.raises(
        RunFailed, match=r"publication 2 in .*/weights cannot be rebuilt in .*/local: "
    ):
        follower.follow(2)
    assert follower.number in (None, 1)
    changes.write_bytes(content)
    assert same(read(follower.follow(2)), second)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("manifest", r"manifest\.json is no manifest of a publication"),
        ("missing", r"update_000001/manifest\.json is no manifest .* No such file"),
        ("weights", r"does not have the checksum that was published"),
        ("shard", r"name different tensors: down, embed"),
    ],
)
def test_a_damaged_whole_publication_is_refused(
    folders: WeightFolders, tmp_path: Path, damage: str, says: str
) -> None:
    publish_all(folders, make_weights())
    folder = folders.root / "update_000001"
    shard = sorted(folder.glob("*.safetensors"))[0]
    if damage == "manifest":
        (folder / "manifest.json").write_text("{")
    elif damage == "missing":
        (folder / "manifest.json").unlink()
    elif damage == "weights":
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    else:
        for path in folder.glob("*.safetensors"):
            path.unlink()
    follower = Follower(folders.root, tmp_path / "local")
    with pytest.raises(RunFailed, match=says):
        follower.follow(1)
    assert follower.number is None


def test_a_change_of_unknown_or_untold_tensors_is_refused(
    folders: WeightFolders, tmp_path: Path
) -> None:
    publish_all(folders, make_weights(), nudge(make_weights(), ["embed", "norm"]))
    path = folders.root / "update_000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["changes"]["norm"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(RunFailed, match="leaves norm as it was, but that is not what is here"):
        Follower(folders.root, tmp_path / "local").follow(2)
    manifest["changes"]["bias"] = manifest["changes"]["embed"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        RunFailed, match="changes bias, which the last whole publication does not have"
    ):
        Follower(folders.root, tmp_path / "local").follow(2)


def test_a_disk_that_refuses_is_told(folders: WeightFolders) -> None:
    with (
        pytest.raises(RunFailed, match=r"could not be written to .*/weights .*File too large"),
        no_large_files(200),
    ):
        publish_all(folders, make_weights())


# --- engines that the user runs -------------------------------------------------------------------


def test_engines_elsewhere_read_the_folder_of_their_own_follower(folders: WeightFolders) -> None:
    engine = Reader(managed=False, url="http://10.0.0.2:30000")
    weights = make_weights()

    async def run() -> None:
        following = asyncio.create_task(keep_following(folders.root, [engine.url]))
        transport = DeltaTransport(folders, timeout_s=20)
        await publish(transport, [engine], weights)
        assert same(engine.weights, weights)
        changed = nudge(weights, ["embed"])
        await publish(transport, [engine], changed)
        assert same(engine.weights, changed)
        assert len(list((folders.root / NOTES).iterdir())) == 1
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert list((folders.root / NOTES).iterdir()) == []

    asyncio.run(run())


def test_an_engine_without_a_follower_is_told_what_to_start(folders: WeightFolders) -> None:
    engine = Reader(managed=False, url="http://10.0.0.2:30000")

    async def run() -> str:
        [why] = (
            await publish(DeltaTransport(folders, timeout_s=0.3), [engine], make_weights())
        ).values()
        return why

    assert (
        "named http://10.0.0.2:30000 within 0.3 s (rollout.engine.update_timeout_s): start it with"
        " `rlcore engine`" in (asyncio.run(run()))
    )


def test_what_stopped_a_follower_reaches_the_trainer(
    folders: WeightFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Reader(managed=False, url="http://10.0.0.2:30000")
    refuse = RunFailed("the local disk is full")

    def fail(follower: Follower, number: int) -> Path:
        raise refuse

    monkeypatch.setattr(Follower, "follow", fail)

    async def run() -> str:
        following = asyncio.create_task(keep_following(folders.root, [engine.url]))
        [why] = (
            await publish(DeltaTransport(folders, timeout_s=2), [engine], make_weights())
        ).values()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        return why

    assert (
        "is at None, expected 1 within 2 s (rollout.engine.update_timeout_s): the local disk is"
        " full" in asyncio.run(run())
    )


def test_what_dead_processes_left_in_memory_is_removed(tmp_path: Path) -> None:
    mine = local_folder(tmp_path)
    assert mine.name.endswith(f"-{os.getpid()}")
    dead = mine.with_name(mine.name.replace(str(os.getpid()), "999999999"))
    alive = mine
    for folder in (dead, alive):
        folder.mkdir()
    try:
        assert local_folder(tmp_path) == mine
        assert not dead.exists()
        assert alive.exists()
    finally:
        alive.rmdir()
