"""The service actor and rank 0's client, as plain objects: whose calls count, and what is lost."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError
from torch.distributed import HashStore

from rlcore.deadlines import SERVICE_ANSWER_S
from rlcore.errors import EngineFailed, PartLost
from rlcore.launch.ray import service_actor
from rlcore.launch.ray.actor_env import ActorEnv
from rlcore.launch.ray.service_actor import ServiceActor
from rlcore.launch.ray.service_channel import ActorChannel
from rlcore.launch.service.channel import ServiceLost
from rlcore.launch.service.client import ServiceClient
from rlcore.launch.service.engine_handles import RemoteParticipants
from rlcore.launch.service.host import EngineInfo
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.weight_publisher import WeightPublisher
from rollout.asyncio_utils import LoopThread
from rollout.engines.factories import ADMIN_KEY, API_KEY, Keys
from rollout.weight_sync.publication import WeightPublication
from tests.ray.actors import config_of_a_run


async def until(reached: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not reached():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), 60)


class Prompts:
    lengths = np.ones(3, np.int64)

    def __len__(self) -> int:
        return len(self.lengths)


class Rollouts:
    """Stands for a `RolloutService`; a hand-over is a number."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.fleet = SimpleNamespace(engines=[], members=[])
        self.prompts = Prompts()
        self.handed_over: list[int] = []
        self.started: list[bool] = []
        self.may_encode = threading.Event()
        self.may_start = threading.Event()
        self.may_start.set()

    def start(self, *, again: bool) -> None:
        self.started.append(again)
        assert self.may_start.wait(60)

    def abandon(self) -> None: ...

    def halt(self) -> None: ...

    def next_step(self, step: int) -> int:
        self.handed_over.append(step)
        return step

    def snapshot(self) -> dict[str, Any]:
        return {"encoded": self.may_encode.wait(60)}


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rollouts]:
    """Replaces the `RolloutService` of every `ServiceActor`."""
    for name in (API_KEY, ADMIN_KEY):  # which an actor sets in its process: this one
        monkeypatch.setenv(name, "")
    thread = LoopThread("rollouts")
    of_all = Rollouts(thread.loop)
    monkeypatch.setattr(ServiceActor, "_build", lambda self, greedy_baseline: of_all)
    yield of_all
    thread.close()


def new_service() -> ServiceActor:
    return ServiceActor(
        ActorEnv(os.getcwd(), "127.0.0.1", 1), config_of_a_run(), [], Keys("api", "admin")
    )


def test_a_call_of_a_former_rank_0_fails(rollouts: Rollouts) -> None:
    """It may still run where the driver does not see it: it gets no step, nor the service back."""
    rollouts.may_encode.set()

    async def main() -> None:
        actor = new_service()
        former = (await actor.open(greedy_baseline=False)).token
        assert (await actor.next_step(former, 1)) == (1, {"encoded": True})
        present = (await actor.open(greedy_baseline=False)).token
        with pytest.raises(PartLost, match="has another rank 0 now") as caught:
            await actor.next_step(former, 2)
        assert not isinstance(caught.value, ServiceLost), "rank 0 would open the service again"
        assert rollouts.handed_over == [1]
        await actor.next_step(present, 2)
        with pytest.raises(ServiceLost, match="there is a new one"):
            await new_service().next_step(present, 3)

    asyncio.run(main())


def test_a_rank_0_that_comes_while_the_engines_start_waits_for_that_start(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its predecessor was lost meanwhile."""
    context = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(service_actor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(service_actor, "log_to", lambda path: None)
    monkeypatch.setattr(ActorEnv, "redirect_output", lambda self: None)
    rollouts.may_start.clear()

    async def main() -> None:
        actor = new_service()
        former = asyncio.ensure_future(actor.start((await actor.open(greedy_baseline=False)).token))
        await until(lambda: rollouts.started == [False])
        present = asyncio.ensure_future(
            actor.start((await actor.open(greedy_baseline=False)).token)
        )
        await asyncio.sleep(0.1)
        assert not present.done()
        rollouts.may_start.set()
        await asyncio.gather(former, present)
        assert rollouts.started == [False]

    asyncio.run(main())


def test_a_rank_0_that_comes_while_the_prompts_are_read_gets_the_same_service(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    may_build = threading.Event()

    def build(actor: ServiceActor, greedy_baseline: bool) -> Rollouts:
        built.append(greedy_baseline)
        assert may_build.wait(60)
        return rollouts

    monkeypatch.setattr(ServiceActor, "_build", build)

    async def main() -> None:
        actor = new_service()
        coming = [asyncio.ensure_future(actor.open(greedy_baseline=False)) for _ in range(2)]
        await until(lambda: bool(built))
        may_build.set()
        former, present = await asyncio.gather(*coming)
        assert former.token != present.token
        assert built == [False]
        rollouts.may_encode.set()
        await actor.next_step(present.token, 1)
        with pytest.raises(PartLost):
            await actor.next_step(former.token, 1)

    asyncio.run(main())


def test_a_new_service_has_time_for_a_long_journal_and_a_large_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[Any, float] = {}

    def call(
        client: ServiceClient,
        part: str,
        *given: Any,
        limit_s: float = SERVICE_ANSWER_S,
        key: str = "",
    ) -> None:
        asked[given[0] if given else part] = limit_s

    monkeypatch.setattr(ServiceClient, "open", lambda client: None)
    monkeypatch.setattr(ServiceClient, "call", call)
    client = ServiceClient(ActorChannel(None), config_of_a_run(), greedy_baseline=False)
    client.remember("published", 1, 2, 0)
    client.remember("admit_engines", Path("engines"))
    client.remember("keep_ledger", Path("ledger.jsonl"))
    client.remember("restore", {})
    client.reopen()
    start_s = client.config.cluster.start_timeout_s
    assert start_s > SERVICE_ANSWER_S
    assert list(asked.items()) == [
        ("restore", start_s),
        ("keep_ledger", start_s),
        ("admit_engines", start_s),
        ("published", SERVICE_ANSWER_S),
    ]


def test_others_are_answered_while_a_hand_over_is_encoded(rollouts: Rollouts) -> None:
    async def main() -> None:
        actor = new_service()
        token = (await actor.open(greedy_baseline=False)).token
        stepping = asyncio.ensure_future(actor.next_step(token, 1))
        await until(lambda: bool(rollouts.handed_over))
        await asyncio.sleep(0.1)
        assert (await actor.status())[0] == os.getpid()
        rollouts.may_encode.set()
        assert await stepping == (1, {"encoded": True}), "the actor's loop stood still"

    asyncio.run(main())


@pytest.mark.parametrize("restarted", [False, True])
def test_a_restarted_service_may_go_on_without_some_engines(
    rollouts: Rollouts, restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(was_current_actor_reconstructed=restarted)
    monkeypatch.setattr(service_actor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(service_actor, "log_to", lambda path: None)
    monkeypatch.setattr(ActorEnv, "redirect_output", lambda self: None)

    async def main() -> None:
        actor = new_service()
        await actor.start((await actor.open(greedy_baseline=False)).token)
        assert rollouts.started == [restarted]

    asyncio.run(main())


class Dead:
    """The handle of an actor whose process is gone."""

    def __getattr__(self, method: str) -> Any:
        async def call() -> None:
            raise RayActorError

        return SimpleNamespace(remote=lambda *arguments: call())


def test_a_publication_to_engines_that_take_turns_says_that_the_service_is_lost(
    tmp_path: Path,
) -> None:
    """Only a loss makes the driver restart the ranks; an error of a rank does not."""
    config = config_of_a_run(rollout={"engine": {"colocated": True}})
    thread = LoopThread("publication")
    sink = WeightPublication(
        config,
        RemoteParticipants(ServiceClient(ActorChannel(Dead()), config, greedy_baseline=False)),
        thread.loop,
    )
    backend: Any = SimpleNamespace(buckets=lambda: ())
    publisher = WeightPublisher(
        backend,
        RankSync(HashStore(), 0, 1, timeout_s=5),
        sink=sink,
        journal=VersionJournal(tmp_path / "versions.jsonl"),
        timeout_s=5,
    )
    with pytest.raises(
        ServiceLost, match="the knowledge of what its engines keep on the trainer's GPUs"
    ):
        publisher.publish(1)
    thread.close()


def test_an_engine_that_has_left_fails_and_news_of_it_change_nothing(rollouts: Rollouts) -> None:
    """Rank 0 may have it in its publication still."""

    async def main() -> None:
        actor = new_service()
        token = (await actor.open(greedy_baseline=False)).token
        await actor.notify(token, "draining", "gone")
        with pytest.raises(EngineFailed, match="the run has no engine 'gone' any more"):
            await actor.engine(token, "gone", "health")

    asyncio.run(main())


def test_an_engine_that_is_no_candidate_any_more_is_in_no_group() -> None:
    """So the group that rank 0 has with it is closed."""
    answers = [["a", "b"], ["a"], ["a"]]

    class Client:
        async def call_async(self, part: str, method: str) -> list[EngineInfo]:
            return [
                EngineInfo(name, False, ("distributed",), f"http://{name}:1", 1, f"group-{name}")
                for name in answers.pop(0)
            ]

    async def main() -> None:
        participants = RemoteParticipants(Client())  # type: ignore[arg-type]
        a, b = await participants.candidates()
        await participants.stale()
        assert (a.in_group, b.in_group) == ("group-a", "group-b")  # type: ignore[attr-defined]
        await participants.candidates()
        assert (a.in_group, b.in_group) == ("group-a", None)  # type: ignore[attr-defined]

    asyncio.run(main())
