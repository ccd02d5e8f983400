"""The folder of announcements, and the side of the engines that use it."""

from __future__ import annotations

import asyncio
import json
import os
import stat

import pytest
from patient_loop import run_patiently

from rlcore.errors import RunFailed, UserError
from rollout.engines.factories import Keys
from rollout.fleet import membership
from rollout.fleet.announcements import Announcement, EngineFolder
from rollout.fleet.membership import Membership, engine_name

KEYS = Keys("the-key-of-b", "the-admin-key-of-b")
URL = "http://127.0.0.1:4000"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The open folder of a run."""
    monkeypatch.setattr(membership, "POLL_S", 0.005)
    found = EngineFolder.of(tmp_path)
    found.make()
    return found


@pytest.fixture
def said():
    return []


@pytest.fixture
def member(folder, tmp_path, said):
    """An engine that has announced itself."""
    one = Membership(tmp_path, KEYS, said.append)
    one.announce([URL])
    return one


def the_announcement(folder) -> Announcement:
    [found] = folder.announced().values()
    assert found is not None
    return found


def test_keys_are_for_the_user_s_eyes_alone(folder, member):
    name = engine_name(URL)
    path = folder.path / f"{name}.engine"
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert the_announcement(folder).keys == KEYS
    assert the_announcement(folder).url == URL
    folder.answer(the_announcement(folder), "joined")
    folder.write_fleet([])
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.path.iterdir())
    assert KEYS.api not in repr(the_announcement(folder))


@pytest.mark.parametrize("mode", [0o755, 0o720, 0o701])
def test_a_folder_that_others_may_use_is_refused(folder, mode):
    folder.path.chmod(mode)
    for use in (folder.make, folder.check):
        with pytest.raises(UserError, match=f"has mode {mode:o}, and keys of engines go there"):
            use()


def test_a_folder_of_somebody_else_is_refused(folder, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(folder.path)
    with pytest.raises(UserError, match="is no folder of yours"):
        EngineFolder(tmp_path / "link").check()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match="is no folder of yours"):
        folder.check()


def test_a_run_without_the_folder_takes_no_engines(tmp_path):
    with pytest.raises(UserError, match="no run takes engines there"):
        Membership(tmp_path, KEYS, print).announce([URL])


def test_a_name_is_given_once(folder, member, tmp_path):
    with pytest.raises(UserError, match="exists: an engine of that name has joined the run"):
        Membership(tmp_path, KEYS, print).announce([URL])
    assert the_announcement(folder).keys == KEYS


def test_an_answer_to_an_earlier_one_of_that_name_counts_for_nothing(folder, member):
    folder.answer(the_announcement(folder), "joined")
    file = next(folder.path.glob("*.answer"))
    file.write_text(json.dumps({**json.loads(file.read_text()), "id": "another"}))
    assert folder.answer_to(the_announcement(folder)) is None


def run(work):
    return run_patiently(asyncio.wait_for(work, 60))


def test_what_the_run_answers_is_told_once(folder, member, said, tmp_path):
    async def use():
        following = asyncio.ensure_future(member.follow([URL]))
        await asyncio.sleep(0.05)
        folder.answer(the_announcement(folder), "joined")
        await asyncio.sleep(0.1)
        (tmp_path / "result.json").write_text('{"status": "failed"}')
        await asyncio.sleep(0.05)
        assert not following.done(), "the run may go on"
        (tmp_path / "result.json").write_text('{"status": "completed"}')
        await following

    run(use())
    name = engine_name(URL)
    assert said == [
        f"{name} at {URL} asks to join {tmp_path}",
        f"{name} has joined: it gets the weights when the run waits for rollouts next",
        f"{tmp_path} has finished",
    ]


def test_a_refusal_ends_the_engines(folder, member, tmp_path):
    folder.answer(the_announcement(folder), "refused", "it has another model")
    with pytest.raises(UserError, match=f"{tmp_path} refuses .*: it has another model"):
        run(member.follow())


def test_a_run_that_is_deleted_ends_the_engines(folder, member):
    for file in folder.path.iterdir():
        file.unlink()
    with pytest.raises(RunFailed, match=r"has no announcement of .* any more"):
        run(member.follow())


def test_leaving_waits_until_the_run_goes_on_without_them(folder, member):
    async def use():
        leaving = asyncio.ensure_future(member.leave())
        await asyncio.sleep(0.05)
        asked = the_announcement(folder)
        assert asked.leaving
        assert asked.keys == KEYS
        folder.answer(asked, "joined")
        await asyncio.sleep(0.05)
        assert not leaving.done()
        folder.answer(asked, "left")
        await leaving
        member.withdraw()

    run(use())
    assert list(folder.path.iterdir()) == []


def test_leaving_has_an_end(folder, member, said, monkeypatch):
    monkeypatch.setattr(membership, "LEAVE_FLEET_S", 0.05)
    run(member.leave())
    assert said[-1].endswith(f"has not let {engine_name(URL)} go within 0.05 s: ending anyway")


@pytest.mark.parametrize("how", ["finished", "deleted"])
def test_nobody_waits_for_a_run_that_is_not_there(folder, member, tmp_path, how):
    if how == "finished":
        (tmp_path / "result.json").write_text('{"status": "early_stopped"}')
    else:
        for file in folder.path.iterdir():
            file.unlink()
    run(member.leave())


def test_the_name_tells_the_machine_and_the_port(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "-node 1/é")
    assert engine_name("http://10.0.0.1:4000") == "node-1---4000"
