"""The delta transport: every follower ends with the trainer's bytes, or a reason why not."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines_kit import once_it_says
from shared_folders import (
    Reader,
    by_delta,
    layout,
    make_weights,
    model_folder,
    nudge,
    publish,
    read,
    same,
)

from rlcore.errors import RunFailed
from rollout.weight_sync import delta
from rollout.weight_sync.delta_follower import (
    CHANGES,
    REPORTS,
    Follower,
    Manifest,
    keep_following,
    make_home,
)
from rollout.weight_sync.disk import WeightFolders, published
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
        transport = by_delta(folders)
        for weights in versions:
            assert await publish(transport, [engine or Reader()], weights) == {}
        await transport.close()

    asyncio.run(run())


async def test_engines_hold_every_version_though_only_changes_are_written(
    folders: WeightFolders,
) -> None:
    engine = Reader()

    transport = by_delta(folders)
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
    assert shared(folders) == [("update_000001", True)] + [
        (f"update_{n:06d}", False) for n in range(2, 6)
    ]


async def test_a_whole_one_follows_when_changes_are_larger_or_the_layout_is_another(
    folders: WeightFolders,
) -> None:
    engine = Reader()

    transport = by_delta(folders)
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


async def test_after_a_publication_that_was_given_up_the_next_is_whole(
    folders: WeightFolders,
) -> None:
    engine = Reader()
    first = make_weights(0)
    second = nudge(make_weights(0), ["embed"])

    transport = by_delta(folders)
    await publish(transport, [engine], first)
    buckets = layout(second)
    await transport.open([engine], buckets)
    await transport.close()
    left = {path.name for path in folders.root.iterdir()}
    assert left == {".lock", "update_000001"}
    await publish(transport, [engine], second)
    assert same(engine.weights, second)
    assert shared(folders) == [("update_000002", True)]
    await transport.close()


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
        RunFailed,
        match=r"publication 2 in .*/weights cannot be rebuilt in .*/local/rlcore-weights-.*: ",
    ):
        follower.follow(2)
    assert follower.number in (None, 1)
    changes.write_bytes(content)
    assert same(read(follower.follow(2)), second)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("manifest", r"manifest\.json is not a manifest of a publication"),
        ("missing", r"update_000001/manifest\.json is not a manifest .* No such file"),
        ("weights", r"does not have the published checksum"),
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
    with pytest.raises(RunFailed, match="does not change norm, but its checksum differs here"):
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


async def test_engines_elsewhere_read_the_folder_of_their_own_follower(
    folders: WeightFolders,
) -> None:
    engine = Reader(managed=False, url="http://10.0.0.2:30000")
    weights = make_weights()

    following = asyncio.create_task(keep_following(folders.root, [engine.url]))
    transport = by_delta(folders, 20)
    await publish(transport, [engine], weights)
    assert same(engine.weights, weights)
    changed = nudge(weights, ["embed"])
    await publish(transport, [engine], changed)
    assert same(engine.weights, changed)
    assert len(list((folders.root / REPORTS).iterdir())) == 1
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert list((folders.root / REPORTS).iterdir()) == []


def test_an_engine_without_a_follower_is_told_what_to_start(folders: WeightFolders) -> None:
    engine = Reader(managed=False, url="http://10.0.0.2:30000")

    async def run() -> str:
        [why] = (await publish(by_delta(folders, 0.3), [engine], make_weights())).values()
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
    monkeypatch.setattr(delta, "within", once_it_says(str(refuse)))

    async def run() -> str:
        following = asyncio.create_task(keep_following(folders.root, [engine.url]))
        [why] = (await publish(by_delta(folders, 2), [engine], make_weights())).values()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        return why

    assert (
        "is at None, expected 1 within 2 s (rollout.engine.update_timeout_s): the local disk is"
        " full" in asyncio.run(asyncio.wait_for(run(), 60))
    )


def make_home_and_wait(shared: Path, root: Path) -> subprocess.Popen[str]:
    """A process with a follower's folder, as in another container; it says where."""
    code = (
        "import sys; from pathlib import Path;"
        " from rollout.weight_sync.delta_follower import make_home;"
        " print(make_home(Path(sys.argv[1]), Path(sys.argv[2]))[0], flush=True);"
        " sys.stdin.read()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(shared), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_folders_of_living_followers_stay_whatever_their_pids_and_those_of_dead_ones_go(
    tmp_path: Path,
) -> None:
    """Containers share /dev/shm, and have the same pids."""
    other = make_home_and_wait(tmp_path, tmp_path / "shm")
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    try:
        mine = Follower(tmp_path, tmp_path / "shm")
        assert theirs.is_dir(), "its follower lives"
        again = Follower(tmp_path, tmp_path / "shm")
        assert len({mine.folder, again.folder, theirs}) == 3
        assert mine.folder.parent.is_dir()
        again.close()
    finally:
        other.kill()
        other.communicate()
    assert theirs.is_dir(), "killed, it cleans nothing up"
    Follower(tmp_path, tmp_path / "shm").close()
    assert not theirs.exists()
    assert mine.folder.parent.is_dir()
    mine.close()
    assert list((tmp_path / "shm").iterdir()) == []


def test_nobody_else_reads_the_weights_in_memory_or_foresees_their_name(tmp_path: Path) -> None:
    made = [make_home(tmp_path, tmp_path) for _ in range(2)]
    assert {home.stat().st_mode & 0o777 for home, _ in made} == {0o700}
    assert len({home.name for home, _ in made}) == 2
    assert not any(str(os.getpid()) == home.name.rpartition("-")[2] for home, _ in made)
    for _, lock in made:
        os.close(lock)


async def test_followers_of_one_host_name_write_notes_of_their_own(folders: WeightFolders) -> None:
    """Two containers may have one host name, and the same pids."""

    following = [
        asyncio.create_task(keep_following(folders.root, [f"http://10.0.0.{i}:1"]))
        for i in range(2)
    ]
    transport = by_delta(folders, 20)
    engines = [Reader(managed=False, url=f"http://10.0.0.{i}:1") for i in range(2)]
    assert await publish(transport, engines, make_weights()) == {}
    assert len(list((folders.root / REPORTS).iterdir())) == 2
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)


def test_two_trainers_do_not_publish_to_one_folder(folders: WeightFolders) -> None:
    other = WeightFolders(folders.root, model=folders.root.parent / "model")
    folders.begin(0)
    with pytest.raises(RunFailed, match=r"another trainer publishes to .*weights_dir of its own"):
        other.begin(0)
    folders.close()
    other.begin(0)
    other.close()
