"""The rollout service's side of engines that announce themselves in a run's folder."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import replace

import pytest
from fake_engine import FakeEngine, random_reply

from rlcore.config import Config
from rlcore.errors import ConfigError, EngineFailed
from rollout.engines.factories import Keys
from rollout.fleet.admission import Admission
from rollout.fleet.announcements import Announcement, EngineFolder

HERE = "node1"
KEYS = Keys("the-key-of-b", "the-admin-key-of-b")
B = Announcement("b", "http://10.0.0.2:4000", KEYS, host="node2")


def make_config(**engine):
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": "model"},
            "data": {"paths": "train.jsonl"},
            "training": {"steps": 1},
            "rollout": {"engine": {"kind": "sglang", "start_timeout_s": 5.0, **engine}},
        }
    )


class House:
    """A fleet of one engine, `a`, and the folder through which others come."""

    def __init__(self, site, path, *, check=None, **config):
        self.site = site
        self.folder = EngineFolder(path / "engines")
        self.folder.make()
        self.built = []
        self.start_error = None

        def build(name, url, keys):
            engine = FakeEngine(random_reply(31), name=name)
            engine.url = url
            engine.keys = keys
            if self.start_error is not None:
                engine.start = self._fail
            self.built.append(engine)
            return engine

        self.admission = Admission(
            self.folder,
            site.fleet,
            make_config(**config),
            build=build,
            check=check or (lambda engine: None),
            host=HERE,
        )

    async def _fail(self):
        raise self.start_error

    async def answer(self, announcement):
        for _ in range(400):
            await self.admission.look()
            if (answer := self.folder.answer_to(announcement)) is not None:
                return answer.verdict, answer.why
            await asyncio.sleep(0.005)
        raise AssertionError("no answer")

    async def look_until(self, reached):
        for _ in range(400):
            await self.admission.look()
            if reached():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(self.site.states())


def test_an_engine_comes_and_goes(on_site, tmp_path):
    async def use(site):
        house = House(site, tmp_path)
        house.folder.announce(B)
        assert await house.answer(B) == ("joined", "")
        await site.until("serving stale")
        [engine] = house.built
        assert (engine.name, engine.url, engine.keys) == (B.name, B.url, KEYS)
        await house.look_until(lambda: len(house.folder.read_fleet()) == 2)
        row = house.folder.read_fleet()[1]
        assert row == {
            "engine": "b",
            "url": B.url,
            "state": "stale",
            "version": None,
            "restarts": 0,
            "requests": 0,
            "joined": True,
        }
        house.folder.announce_leaving(B)
        await house.look_until(lambda: house.folder.answer_to(B).verdict == "left")
        assert site.states() == "serving"
        assert engine.closed
        await house.look_until(lambda: len(house.folder.read_fleet()) == 1)
        assert len(house.built) == 1, "it is not taken in again"
        house.folder.withdraw(B)
        await house.admission.look()
        assert not list(house.folder.path.glob("b.*"))

    on_site("a", use)


def test_one_whose_announcement_is_gone_has_left(on_site, tmp_path):
    async def use(site):
        house = House(site, tmp_path)
        house.folder.announce(B)
        await house.answer(B)
        house.folder.withdraw(B)
        await house.look_until(lambda: site.states() == "serving")
        await asyncio.sleep(0.02)
        assert not list(house.folder.path.glob("b.*")), "nobody reads an answer"

    on_site("a", use)


def test_one_that_comes_again_under_its_name_replaces_itself(on_site, tmp_path):
    async def use(site):
        house = House(site, tmp_path)
        house.folder.announce(B)
        await house.answer(B)
        house.folder.withdraw(B)
        again = replace(B, id="another")
        house.folder.announce(again)
        await house.look_until(lambda: len(house.built) == 2)
        assert await house.answer(again) == ("joined", "")
        assert house.built[0].closed
        assert not house.built[1].closed
        assert len(site.fleet.members) == 2

    on_site("a", use)


def test_one_that_leaves_before_it_was_taken_in_is_disconnected(on_site, tmp_path):
    async def use(site):
        house = House(site, tmp_path)
        forever = asyncio.Event()
        house.start_error = EngineFailed("unused")
        house._fail = forever.wait
        house.folder.announce(B)
        await house.look_until(lambda: house.built)
        house.folder.announce_leaving(B)
        assert await house.answer(B) == ("left", "")
        assert house.built[0].closed
        assert site.states() == "serving"

    on_site("a", use)


def test_a_leaving_one_that_is_not_known_is_told_so(on_site, tmp_path):
    """As by a service that was started again meanwhile."""

    async def use(site):
        house = House(site, tmp_path)
        house.folder.announce(replace(B, leaving=True))
        assert await house.answer(B) == ("left", "")
        assert not house.built

    on_site("a", use)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rlcore": "0.0.9"}, r"it was started by rlcore 0\.0\.9, expected .*use the same"),
        ({"url": "ftp://10.0.0.2"}, "its URL is 'ftp://10.0.0.2', expected http://HOST:PORT"),
        ({"url": "https://10.0.0.2:1"}, "it speaks https .* cluster.tls not set: give both"),
        (
            {"url": "http://127.0.0.1:4000"},
            "loopback interface of node2, and the run's rollout service is on node1: set"
            " rollout.engine.host to an address of node2",
        ),
        ({"name": "a"}, "the run has an engine a already"),
    ],
)
def test_an_engine_that_cannot_be_of_use_is_refused(on_site, tmp_path, changes, why):
    async def use(site):
        house = House(site, tmp_path)
        odd = replace(B, **changes)
        house.folder.announce(odd)
        verdict, said = await house.answer(odd)
        assert verdict == "refused"
        assert re.search(why, said), said
        assert not house.built
        await house.admission.look()
        assert site.states() == "serving"

    on_site("a", use)


def test_an_address_that_the_run_has_is_refused(on_site, tmp_path):
    async def use(site):
        house = House(site, tmp_path)
        site.engines[0].url = f"{B.url}/"
        house.folder.announce(B)
        assert await house.answer(B) == ("refused", f"{B.url} is in the run already, as engine a")

    on_site("a", use)


def test_a_server_on_the_run_s_own_machine_may_be_on_loopback(on_site, tmp_path):
    async def use(site):
        house = House(site, tmp_path)
        near = replace(B, url="http://127.0.0.1:4000", host=HERE)
        house.folder.announce(near)
        assert await house.answer(near) == ("joined", "")

    on_site("a", use)


@pytest.mark.parametrize("by", ["its start", "the service"])
def test_one_that_is_no_engine_for_the_run_is_refused_once(on_site, tmp_path, by, caplog):
    async def use(site):
        def check(engine):
            if by == "the service":
                raise ConfigError("engine b takes 100 tokens")

        house = House(site, tmp_path, check=check)
        if by == "its start":
            house.start_error = ConfigError("engine b takes 100 tokens")
        house.folder.announce(B)
        with caplog.at_level(logging.WARNING):
            assert await house.answer(B) == ("refused", "engine b takes 100 tokens")
            for _ in range(3):
                await house.admission.look()
        assert len(house.built) == 1
        assert house.built[0].closed
        assert site.states() == "serving"
        assert caplog.text.count("engine b is not taken in: engine b takes 100 tokens") == 1

    on_site("a", use)


def test_one_that_vanishes_is_asked_again_and_comes_back(on_site, tmp_path):
    async def use(site):
        house = House(site, tmp_path)
        house.folder.announce(B)
        await house.answer(B)
        await site.publish(2)
        house.built[0].probe_error = EngineFailed("nothing answers")
        await site.until("serving dead")
        house.built[0].probe_error = None
        await site.until("serving stale")
        await house.admission.look()
        assert house.folder.answer_to(B).verdict == "joined"
        assert house.built[0].starts == 3  # to be checked, to join, to come back

    on_site("a", use)


def test_one_that_does_not_come_back_is_given_up_and_told(on_site, tmp_path):
    async def use(site):
        house = House(site, tmp_path)
        house.folder.announce(B)
        await house.answer(B)
        await site.until("serving stale")
        house.start_error = EngineFailed("nothing answers")
        house.built[0].start = house._fail
        house.built[0].probe_error = EngineFailed("nothing answers")
        await house.look_until(lambda: house.folder.answer_to(B).verdict == "refused")
        assert "nothing answers (rollout.engine.restart.limit)" in house.folder.answer_to(B).why
        await house.admission.look()
        assert site.states() == "serving"
        assert len(house.built) == 1, "it is not taken in again"
        again = replace(B, id="another")
        house.folder.withdraw(B)
        house.folder.announce(again)
        house.start_error = None
        await house.look_until(lambda: len(house.built) == 2)

    on_site("a", use, restart={"limit": 1, "backoff_s": 0.01})


def test_what_is_no_announcement_is_said_once(on_site, tmp_path, caplog):
    async def use(site):
        house = House(site, tmp_path)
        (house.folder.path / "c.engine").write_text('{"name": "c"}')
        (house.folder.path / "d.engine").write_text("")
        (house.folder.path / "-.engine").write_text("{}")
        house.folder.announce(B)
        (house.folder.path / "b.engine").rename(house.folder.path / "e.engine")
        for _ in range(3):
            await house.admission.look()
        for name in "cde":
            assert caplog.text.count(f"the announcement {name} cannot be read") == 1
        assert not house.built

    on_site("a", use)


def test_a_folder_that_is_away_for_a_while_is_looked_at_again(on_site, tmp_path, caplog):
    async def use(site):
        house = House(site, tmp_path)
        away = tmp_path / "away"
        house.folder.path.rename(away)
        watching = asyncio.ensure_future(house.admission.watch())
        while "cannot be used" not in caplog.text:
            await asyncio.sleep(0.01)
        away.rename(house.folder.path)
        house.folder.announce(B)
        while house.folder.answer_to(B) is None:
            await asyncio.sleep(0.01)
        watching.cancel()

    on_site("a", use)
