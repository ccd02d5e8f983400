"""Engines that come into a fleet, and go out of it, while requests are in flight."""

from __future__ import annotations

import asyncio
import json
import os
import stat

import pytest
from fake_engine import FakeEngine, random_reply

from rlcore.config import Config
from rlcore.errors import ConfigError, EngineFailed, NoEngineLeft, UserError
from rollout.fleet import fleet
from rollout.fleet.engine_list import EngineList, keep_shown


def new_engine(name, **settings):
    return FakeEngine(random_reply(31), name=name, **settings)


@pytest.mark.site("a")
async def test_an_engine_that_joins_serves_once_it_has_the_weights(site):
    late = new_engine("b")
    site.fleet.join(late)
    await site.until("serving stale")
    await asyncio.gather(*(site.one(i) for i in range(4)))
    assert not late.calls, "it has no weights"
    await asyncio.wait_for(site.fleet.wait_for_stale(), 1)
    await site.publish(1, only_stale=True)
    assert site.states() == "serving serving"
    await asyncio.gather(*(site.one(i) for i in range(9, 13)))
    assert late.calls


@pytest.mark.site("ab")
async def test_requests_of_an_engine_that_leaves_go_on_elsewhere(site):
    """They come back with the tokens that they have, and are no failures."""
    a, b = site.engines
    a.delay_s = 30.0
    b.delay_s = 30.0
    asked = [asyncio.ensure_future(site.one(i)) for i in range(2)]
    while not (a.calls and b.calls):
        await asyncio.sleep(0.005)
    [[at_a]] = a.calls
    leaving = asyncio.ensure_future(site.fleet.leave(a))
    await asyncio.sleep(0)
    assert site.states() == "leaving serving"
    await asyncio.wait_for(leaving, 2)
    [part] = await asked[at_a.draw]
    assert part.finish_reason == "abort"
    assert len(part.tokens) == 2
    assert not asked[1 - at_a.draw].done(), "those of others are left alone"
    assert set(a.aborted) == {at_a.rid}
    assert b.aborted == []
    assert a.closed
    assert site.states() == "serving"
    assert site.dispatcher.retried == 0
    b.delay_s = 0.0
    await site.one(7)
    assert len(a.calls) == 1
    for one in asked:
        one.cancel()


def test_a_request_that_it_does_not_answer_is_sent_again(on_site, monkeypatch):
    monkeypatch.setattr(fleet, "ABORT_S", 0.3)

    async def use(site):
        a, b = site.engines
        a.delay_s = 30.0
        a.deaf = True
        b.delay_s = 0.2
        asked = asyncio.gather(*(site.one(i) for i in range(2)))
        while not (a.calls and b.calls):
            await asyncio.sleep(0.005)
        await asyncio.wait_for(site.fleet.leave(a), 2)
        answers = await asyncio.wait_for(asked, 2)
        assert [one.finish_reason for [one] in answers] == ["length", "length"]
        assert site.dispatcher.retried == 1
        assert site.fleet.restarts == 0

    on_site("ab", use)


@pytest.mark.site("ab", health_every_s=600.0)
async def test_one_that_dies_while_it_leaves_is_not_started_again(site):
    a = site.engines[0]
    a.delay_s = 0.1
    a.deaf = True
    a.failure = EngineFailed("its connections broke")
    a.probe_error = EngineFailed("nothing answers")
    asked = asyncio.gather(*(site.one(i) for i in range(2)))
    while not a.calls:
        await asyncio.sleep(0.005)
    await asyncio.wait_for(site.fleet.leave(a), 2)
    assert len(await asyncio.wait_for(asked, 2)) == 2
    await asyncio.sleep(0.2)
    assert site.states() == "serving"
    assert a.starts == 1


@pytest.mark.site("ab")
async def test_a_publication_ends_before_an_engine_leaves(site):
    a = site.engines[0]
    site.fleet.draining(a)
    leaving = asyncio.ensure_future(site.fleet.leave(a))
    await asyncio.sleep(0.05)
    assert site.states() == "draining serving"
    site.fleet.published(a, 2)
    await asyncio.wait_for(leaving, 1)
    assert site.states() == "serving"
    site.fleet.missed(a)
    site.fleet.published(a, 3)
    await site.fleet.out(a, "a step that it has left")
    await site.fleet.failed(a, "likewise")
    await site.fleet.leave(a)
    assert site.states() == "serving"


@pytest.mark.site("ab", restart={"backoff_s": 0.1})
async def test_a_dead_engine_leaves_at_once_and_for_good(site):
    a = site.engines[0]
    await site.fleet.failed(a, "killed")
    await asyncio.wait_for(site.fleet.leave(a), 1)
    await asyncio.sleep(0.2)
    assert site.states() == "serving"
    assert a.starts == 1


@pytest.mark.site("ab")
async def test_restarts_of_engines_that_have_left_still_count(site):
    await site.fleet.failed(site.engines[0], "killed")
    await site.until("stale serving")
    await site.fleet.leave(site.engines[0])
    assert site.fleet.restarts == 1


@pytest.mark.site("a")
async def test_where_the_last_one_leaves_everybody_hears_why(site):
    await site.fleet.leave(site.engines[0])
    with pytest.raises(NoEngineLeft, match=r"none can be started again.*: engine a has left"):
        await site.one(1)
    with pytest.raises(NoEngineLeft, match="engine a has left"):
        await site.fleet.candidates()


# --- the list of engines --------------------------------------------------------------------------


class Listed(EngineList):
    """A list in a file, of which fake engines are made."""

    def __init__(self, path):
        path.write_text("[]")
        self.path = path
        self.built = []
        self._config = Config.model_validate(
            {
                "run": {"name": "a"},
                "model": {"path": "m"},
                "data": {"paths": "d.jsonl"},
                "training": {"steps": 1},
                "rollout": {"engine": {"kind": "sglang", "urls_file": str(path)}},
            }
        )

    def build(self, name, url):
        self.built.append((name, url))
        return new_engine(name)


@pytest.mark.site(["a-1"])
async def test_engines_come_and_go_with_the_list(site, tmp_path):
    """A new one serves once it has the weights; the list is read before a publication."""
    listed = Listed(tmp_path / "urls.json")
    site.fleet._listed = listed
    listed.path.write_text('["http://a:1", "http://b:1/"]')
    await asyncio.sleep(0.2)
    assert site.states() == "serving"
    await site.publish(2)
    assert listed.built == [("b-1", "http://b:1")]
    await site.until("serving stale")
    await site.publish(2, only_stale=True)
    assert site.states() == "serving serving"
    assert [member.version for member in site.fleet.members] == [2, 2]
    listed.path.write_text('["http://b:1", "http://c:1"]')
    await site.publish(3)
    await site.until("serving stale")
    assert [member.name for member in site.fleet.members] == ["b-1", "c-1"]
    assert site.engines[0].closed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "cannot be read"),
        ('{"a": 1}', "expected a JSON list of URLs"),
        ('["b:1"]', "got 'b:1', expected http://HOST:PORT"),
        (None, "there is no "),
    ],
)
@pytest.mark.site(["a-1"])
async def test_a_list_that_cannot_be_read_changes_nothing(site, tmp_path, text, why, caplog):
    listed = Listed(tmp_path / "urls.json")
    listed.path.unlink()
    if text is not None:
        listed.path.write_text(text)
    site.fleet._listed = listed
    await site.publish(2)
    assert site.states() == "serving"
    [said] = [one for one in caplog.messages if "the engines stay as they are" in one]
    assert why in said


def test_a_folder_has_a_file_for_each_command(tmp_path):
    listed = Listed(tmp_path / "urls.json")
    listed.path = tmp_path / "engines"
    listed.path.mkdir()
    assert listed.read() == {}
    (listed.path / "node1.json").write_text('["http://10.0.0.1:1", "http://10.0.0.1:2"]')
    (listed.path / "node2.json").write_text('["http://10.0.0.2:1"]')
    (listed.path / "notes.txt").write_text("no list")
    assert listed.read() == {
        "10.0.0.1-1": "http://10.0.0.1:1",
        "10.0.0.1-2": "http://10.0.0.1:2",
        "10.0.0.2-1": "http://10.0.0.2:1",
    }


def test_engines_behind_one_gateway_are_told_apart_by_their_paths(tmp_path):
    listed = Listed(tmp_path / "urls.json")
    listed.path.write_text('["http://gw/e0/", "http://gw/e1", "http://gw:81/e0"]')
    assert list(listed.read()) == ["gw-e0", "gw-e1", "gw-81-e0"]
    listed.path.write_text('["http://gw/e0", "https://gw/e0"]')
    with pytest.raises(UserError, match="https://gw/e0 and http://gw/e0 are both named gw-e0"):
        listed.read()


@pytest.mark.parametrize("of_folder", [True, False])
def test_a_list_that_others_could_have_written_is_not_read(tmp_path, monkeypatch, of_folder):
    listed = Listed(tmp_path / "urls.json")
    path = tmp_path if of_folder else listed.path
    listed.path = path
    assert listed.read() == {}
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    with pytest.raises(UserError, match=f"everybody may write to {path}"):
        listed.read()
    path.chmod(0o700)
    assert listed.read() == {}
    os.chown(path, 12345, -1) if os.getuid() == 0 else monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(UserError, match=f"{path} is another user's"):
        listed.read()


@pytest.mark.site(["a-1", "b-1"], restart={"backoff_s": 0.02, "limit": 2, "window_s": 1.0})
async def test_a_listed_engine_that_was_given_up_is_tried_again_after_the_window(site, tmp_path):
    listed = Listed(tmp_path / "urls.json")
    listed.path.write_text('["http://a:1", "http://b:1"]')
    site.fleet._listed = listed
    b = site.engines[1]

    async def fails():
        raise EngineFailed("nothing answers")

    b.start = fails
    await site.fleet.failed(b, "its machine is away")
    await site.until("serving dead")
    while site.fleet.members[1].health.can_come_back:
        await asyncio.sleep(0.05)
    del b.start
    await site.publish(2)
    assert site.states() == "serving dead"
    await asyncio.sleep(1.1)
    await site.publish(3)
    await site.until("serving stale")
    assert listed.built == []


@pytest.mark.site("ab")
async def test_an_engine_that_is_taken_out_twice_leaves_once(site):
    a = site.engines[0]
    a.delay_s = 30.0
    asked = asyncio.gather(*(site.one(i) for i in range(2)))
    while not a.calls:
        await asyncio.sleep(0.005)
    site.fleet.draining(a)
    leaving = asyncio.gather(site.fleet.leave(a), site.fleet.leave(a))
    await asyncio.sleep(0)
    site.fleet.published(a, 2)
    await asyncio.wait_for(leaving, 2)
    assert site.fleet._departed == ["a"]
    assert [one.finish_reason for [one] in await asked].count("abort") == 1


@pytest.mark.site(["a-1"])
async def test_an_engine_that_does_not_suit_the_run_does_not_serve(site, tmp_path, caplog):
    listed = Listed(tmp_path / "urls.json")
    listed.path.write_text('["http://a:1", "http://b:1"]')

    def check(engine):
        if engine.name == "b-1":
            raise ConfigError("engine b-1 takes 8 tokens")

    site.fleet._listed = listed
    site.fleet._check = check
    await site.publish(2)
    await site.until("serving dead")
    assert "engine b-1 takes 8 tokens" in site.fleet.members[1].health.why


@pytest.mark.site("a")
async def test_the_state_of_the_engines_is_written(site, tmp_path):
    path = tmp_path / "engines.json"
    showing = asyncio.ensure_future(keep_shown(site.fleet.members, path))
    while not path.exists():
        await asyncio.sleep(0.01)
    [row] = json.loads(path.read_bytes())
    assert (row["engine"], row["state"], row["version"]) == ("a", "serving", 1)
    showing.cancel()
