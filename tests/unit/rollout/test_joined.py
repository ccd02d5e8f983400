"""A service takes in engines that announce themselves, and the trainer brings them the weights."""

from __future__ import annotations

import asyncio
import stat
import time

import pytest
from fake_engine import FakeEngine, random_reply

from rlcore.errors import UserError
from rollout.engines.factories import Keys
from rollout.engines.sglang.factory import SGLangFactory
from rollout.fleet import admission
from rollout.fleet.announcements import Announcement, EngineFolder

SGLANG = {"engine": {"kind": "sglang", "health_every_s": 0.05}}
B = Announcement("b", "http://127.0.0.1:4000", Keys("the-key-of-b", "the-admin-key-of-b"))


@pytest.fixture
def built(monkeypatch):
    """What the factory was asked for, and answers with fakes."""
    found = []

    def build(config, name, url, keys):
        found.append((config.model.path, name, url, keys))
        return FakeEngine(random_reply(31), name=name)

    monkeypatch.setattr(SGLangFactory, "build_joining", build)
    monkeypatch.setattr(admission, "POLL_S", 0.01)
    return found


def until(reached):
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def catch_up(service):
    for engine in await service.fleet.stale():
        service.fleet.draining(engine)
        service.fleet.published(engine, 0)


def test_an_engine_joins_while_steps_are_made(make_service, built, tmp_path):
    first = FakeEngine(random_reply(31), name="a", delay_s=0.05)
    service = make_service(engines=[first], rollout=SGLANG)
    folder = EngineFolder(tmp_path / "engines")
    service.admit_engines(folder.path)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.announce(B)
    until(lambda: folder.answer_to(B) is not None)
    assert folder.answer_to(B).verdict == "joined"
    assert built == [(str(service._config.model.path), B.name, B.url, B.keys)]
    first.held = True
    assert service.next_step(1) is None, "it waits for the weights"
    first.held = False
    service.admit_engines(folder.path)  # as by a rank 0 that was started again
    time.sleep(0.1)
    assert folder.answer_to(B).verdict == "joined"
    asyncio.run_coroutine_threadsafe(catch_up(service), service.loop).result(10)
    rollouts = service.next_step(1)
    assert rollouts.metrics["rollout/engines_serving"] == 2.0
    assert {service.next_step(step).metrics["rollout/engines_serving"] for step in (2, 3)} == {2.0}
    folder.announce_leaving(B)
    until(lambda: folder.answer_to(B).verdict == "left")
    left = service.next_step(4)
    assert left.metrics["rollout/engines_serving"] == 1.0
    assert left.metrics["rollout/engine_restarts"] == 0.0
    assert service.ledger.balance()["consumed"] == 16


def test_the_end_of_a_service_leaves_what_was_announced(make_service, built, tmp_path):
    """Its engines wait for the next start of the run."""
    service = make_service(rollout=SGLANG)
    folder = EngineFolder(tmp_path / "engines")
    service.admit_engines(folder.path)
    folder.announce(B)
    until(lambda: folder.answer_to(B) is not None)
    service.close()
    assert folder.is_announced(B)
    assert folder.answer_to(B).verdict == "joined"


def test_an_engine_that_has_no_room_for_the_prompts_is_refused(
    make_service, built, tmp_path, monkeypatch
):
    monkeypatch.setattr(FakeEngine, "max_total_tokens", 9, raising=False)
    service = make_service(rollout={**SGLANG, "sampling": {"max_new_tokens": 5}})
    monkeypatch.setattr(FakeEngine, "max_total_tokens", 8)
    folder = EngineFolder(tmp_path / "engines")
    service.admit_engines(folder.path)
    folder.announce(B)
    until(lambda: folder.answer_to(B) is not None)
    assert folder.answer_to(B).verdict == "refused"
    assert "engine b takes 8 tokens of prompt and response" in folder.answer_to(B).why


def test_a_run_whose_engines_are_its_own_has_no_folder(make_service, tmp_path):
    make_service().admit_engines(tmp_path / "engines")
    assert not (tmp_path / "engines").exists()


def test_a_folder_that_others_may_use_ends_the_start(make_service, tmp_path):
    (tmp_path / "engines").mkdir(mode=0o755)
    with pytest.raises(UserError, match="has mode 755"):
        make_service(rollout=SGLANG).admit_engines(tmp_path / "engines")
