"""Engines that share their device with the trainer: what is asked of them, in which order, and what
becomes of failed ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from fake_engine import FakeEngine, random_reply

from rlcore.config.sections.rollout import EngineConfig, RestartConfig
from rlcore.data.generation import MemoryTag, PauseMode
from rlcore.errors import EngineFailed
from rollout.asyncio_utils import LoopThread
from rollout.fleet.engine_memory import FleetMemory
from rollout.fleet.fleet import Fleet

CACHES: tuple[MemoryTag, ...] = ("kv_cache", "cuda_graph")
CONFIG = EngineConfig(
    colocated=True, update_timeout_s=2, restart=RestartConfig(limit=2, backoff_s=0.01)
)


class Recording(FakeEngine):
    """Keeps what it was asked, and fails where it is told to."""

    def __init__(self, name: str) -> None:
        super().__init__(random_reply(10), name=name)
        self.asked: list[str] = []
        self.fails_at = ""

    def _note(self, verb: str) -> None:
        self.asked.append(verb)
        if verb == self.fails_at:
            raise EngineFailed(f"engine {self.name} cannot {verb}")

    async def start(self) -> None:
        self._note("start")
        self.released.clear()  # a new process
        await super().start()

    async def pause(self, mode: PauseMode) -> None:
        self._note(f"pause {mode}")

    async def resume(self) -> None:
        self._note("resume")

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        self._note("release")
        await super().release_memory(tags)

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        self._note("restore")
        await super().resume_memory(tags)


class Shared:
    """A fleet of two that serve version 1, and its memory."""

    def __init__(self) -> None:
        self.thread = LoopThread("test")
        self.engines = [Recording("a"), Recording("b")]
        self.fleet = Fleet(self.engines, CONFIG)
        self.memory = FleetMemory(self.fleet, CONFIG, self.thread)
        self.thread.call(self.fleet.start(), seconds=5, what="starting")
        self.publish()
        for engine in self.engines:
            engine.asked.clear()

    def publish(self) -> None:
        async def all_of_them() -> None:
            for engine in self.fleet.engines:
                self.fleet.draining(engine)
                self.fleet.published(engine, 1)

        self.thread.call(all_of_them(), seconds=5, what="publishing")

    @property
    def states(self) -> list[str]:
        return [str(member.health.state) for member in self.fleet.members]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    made.thread.call(made.fleet.close(), seconds=5, what="closing")
    made.thread.close()


def test_engines_are_idle_before_they_release_and_generate_when_all_is_restored(
    shared: Shared,
) -> None:
    shared.memory.release((*CACHES, "weights"))
    for engine in shared.engines:
        assert engine.asked == ["pause abort", "release"]
        assert engine.released == {*CACHES, "weights"}
    shared.memory.restore(("weights",))
    assert shared.engines[0].asked[2:] == ["restore"]
    shared.publish()
    shared.memory.restore(CACHES)
    assert shared.engines[0].asked[3:] == ["restore", "resume"]
    assert shared.states == ["serving", "serving"]
    assert not shared.engines[1].released


def test_an_engine_that_cannot_release_is_ended_and_starts_when_the_device_is_free(
    shared: Shared,
) -> None:
    a, b = shared.engines
    a.fails_at = "release"
    shared.memory.release((*CACHES, "weights"))
    assert a.closed
    assert shared.states == ["dead", "serving"]
    time.sleep(0.1)  # far longer than its pause
    assert "start" not in a.asked
    assert shared.memory.any_running()
    shared.memory.restore(("weights",))
    shared.publish()
    shared.memory.restore(CACHES)
    until(lambda: shared.states == ["stale", "serving"])
    assert a.asked == ["pause abort", "release", "start"]
    assert b.asked[-1] == "resume"


def test_an_engine_that_cannot_take_its_memory_again_is_out(shared: Shared) -> None:
    shared.engines[1].fails_at = "restore"
    shared.memory.release(CACHES)
    shared.memory.restore(CACHES)
    until(lambda: shared.states == ["serving", "stale"])  # a new life of it
    assert shared.engines[1].asked == ["pause abort", "release", "restore", "start"]


def test_without_an_engine_a_restart_is_waited_for_while_the_trainer_is_offloaded(
    shared: Shared,
) -> None:
    for engine in shared.engines:
        engine.fails_at = "release"
    shared.memory.release((*CACHES, "weights"))
    assert not shared.memory.any_running()
    shared.memory.restore((*CACHES, "weights"))
    assert shared.memory.any_running()
    until(lambda: shared.states == ["stale", "stale"])


def test_where_none_can_come_back_the_next_publication_says_so(shared: Shared) -> None:
    for engine in shared.engines:
        engine.fails_at = "release"
    for member in shared.fleet.members:
        member.health.restarted_at = [time.monotonic()] * CONFIG.restart.limit
    shared.memory.release(CACHES)
    shared.memory.restore(CACHES)
    assert not shared.memory.any_running()
    with pytest.raises(EngineFailed, match="no engine is left"):
        shared.thread.call(shared.fleet.candidates(), seconds=5, what="asking")


def test_a_stale_engine_is_not_resumed(shared: Shared) -> None:
    async def miss() -> None:
        shared.fleet.draining(shared.engines[0])
        shared.fleet.missed(shared.engines[0])

    shared.thread.call(miss(), seconds=5, what="missing")
    shared.memory.release(CACHES)
    shared.memory.restore(CACHES)
    assert "resume" not in shared.engines[0].asked
    assert shared.engines[1].asked[-1] == "resume"
