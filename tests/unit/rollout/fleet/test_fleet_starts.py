"""The first start of a fleet, and that of one in the place of another: which engines it needs, and
for how long it waits.
"""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeEngine

from rlcore.errors import NoEngineLeft, RunFailed


def test_the_first_start_is_strict(on_site, monkeypatch):
    async def broken(self):
        raise RunFailed("bad arguments")

    monkeypatch.setattr(FakeEngine, "start", broken)
    with pytest.raises(RunFailed, match="bad arguments"):
        on_site("ab", None)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_start_in_the_place_of_a_lost_fleet_needs_one_engine(on_site, monkeypatch, hangs):
    """The run may have gone on without the other, which comes when it can."""
    has_place = asyncio.Event()
    start = FakeEngine.start

    async def homeless(self):
        if self.name == "a" and not has_place.is_set():
            if not hangs:
                raise RunFailed("its node is gone")
            await has_place.wait()
        await start(self)

    async def use(site):
        assert site.states() == ("starting serving" if hangs else "dead serving")
        has_place.set()
        await site.until("stale serving")
        await site.publish(1, only_stale=True)
        assert site.states() == "serving serving"
        assert site.fleet.restarts == (0 if hangs else 1)

    monkeypatch.setattr(FakeEngine, "start", homeless)
    on_site("ab", use, again=True)


def test_a_start_in_the_place_of_a_lost_fleet_fails_where_no_engine_comes(on_site, monkeypatch):
    async def broken(self):
        raise RunFailed(f"{self.name} burnt")

    monkeypatch.setattr(FakeEngine, "start", broken)
    with pytest.raises(
        NoEngineLeft, match="engine a: it did not start: a burnt; engine b: it did not"
    ):
        on_site("ab", None, again=True, restart={"limit": 0})


def test_an_engine_that_needs_a_place_first_has_its_own_time_all_the_same(on_site, monkeypatch):
    monkeypatch.setattr("rollout.fleet.fleet.TRANSPORT_GRACE_S", 0.0)
    start = FakeEngine.start

    async def late(self):
        await asyncio.sleep(0.5)
        await start(self)

    async def use(site):
        monkeypatch.setattr(FakeEngine, "start", late)
        await site.fleet.failed(site.engines[0], "its node is gone")
        assert await site.fleet.candidates() == site.engines, "a publication waits for it as long"
        assert site.fleet.restarts == 1

    on_site(
        "a",
        use,
        start_timeout_s=0.2,
        placement_timeout_s=5.0,
        restart={"backoff_s": 0.01, "max_backoff_s": 0.01, "limit": 1},
    )
