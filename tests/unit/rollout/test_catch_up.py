"""A step goes on while the trainer brings its weights to an engine that was started again."""

from __future__ import annotations

import asyncio
import time

import pytest
from fake_engine import FakeEngine, random_reply

from rlcore.errors import DeadlineExceeded, EngineFailed, NoEngineLeft

RESTART = {"restart": {"backoff_s": 0.02}, "health_every_s": 0.05}


def on_loop(service, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, service.loop).result(10)


def addresses(rollouts):
    return [(s.draw, s.index, s.tokens.tolist(), s.reward) for s in rollouts.samples]


async def catch_up(service, version=0):
    for engine in await service.fleet.stale():
        service.fleet.draining(engine)
        service.fleet.published(engine, version)


def ask_again_and_again(service):
    """Act as a trainer that never brings the weights."""
    while service.next_step(1) is None:
        time.sleep(0.02)


def hold(service, held):
    """Whether no engine answers, so that no step ends."""
    for engine in service.fleet.engines:
        engine.held = held


def two():
    return [FakeEngine(random_reply(31), name=name, delay_s=0.2) for name in "ab"]


def test_a_step_goes_on_and_is_counted_once(make_service):
    expected = addresses(make_service(engines=two()).next_step(1))
    service = make_service(engines=two(), rollout={"engine": RESTART})
    hold(service, True)  # until the other engine has come back
    on_loop(service, service.fleet.failed(service.fleet.engines[0], "killed between steps"))
    calls = 0
    while (rollouts := service.next_step(1)) is None:
        calls += 1
        on_loop(service, catch_up(service))
        hold(service, False)
    assert calls == 1, "one engine came back"
    assert addresses(rollouts) == expected
    assert service.ledger.balance()["consumed"] == 4
    assert rollouts.metrics["rollout/engine_restarts"] == 1.0
    assert rollouts.metrics["rollout/engines_serving"] == 2.0
    again = service.next_step(2)
    assert again is not None
    assert again.metrics["rollout/engine_restarts"] == 0.0, "counted since the row before"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_batch_that_the_trainer_never_got_is_in_no_checkpoint(make_service, staleness):
    """It comes while the trainer brings an engine its weights, which fails: then what was trained
    is saved.
    """
    given = {"engine": RESTART, "max_staleness": staleness}
    service = make_service(engines=two(), rollout=given)
    service.published(0, 0, 0)
    # steps whose groups were made before the weights of policy step 1
    done = 1 + staleness
    for step in range(1, done + 1):
        service.next_step(step)
    before = service.snapshot()
    for engine in service.fleet.engines:
        engine.version = 1
    hold(service, True)
    service.published(1, 1, 0)
    on_loop(service, service.fleet.failed(service.fleet.engines[0], "killed between steps"))
    assert service.next_step(done + 1) is None
    hold(service, False)
    deadline = time.monotonic() + 60
    while service.ledger.last_step == done:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert service.snapshot() == before
    engines = two()
    for engine in engines:
        engine.version = 2
    resumed = make_service(engines=engines, rollout=given)
    resumed.restore(service.snapshot())
    resumed.published(done, 2, 1)
    assert len(resumed.next_step(done + 1).samples) == 8


def test_the_only_engine_comes_back_in_the_middle_of_a_step(make_service):
    class WellAgain(FakeEngine):
        async def start(self):
            self.failure = None
            await super().start()

    engine = WellAgain(random_reply(31), name="a", delay_s=0.3)
    expected = addresses(make_service(engines=[FakeEngine(random_reply(31))]).next_step(1))
    service = make_service(engines=[engine], rollout={"engine": RESTART})
    engine.failure = EngineFailed("engine a: 500")
    while (rollouts := service.next_step(1)) is None:
        on_loop(service, catch_up(service))
    assert addresses(rollouts) == expected
    assert rollouts.metrics["rollout/retried_requests"] >= 4
    assert service.ledger.balance() == {"in flight": 0, "finished": 0, "requeued": 0, "consumed": 4}


def test_an_evaluation_goes_on_too(make_service, tmp_path):
    evaluation = {"paths": [str(tmp_path / "sums.jsonl")], "max_prompts": 6}
    _, expected = make_service(engines=two(), evaluation=evaluation).evaluate()
    service = make_service(engines=two(), evaluation=evaluation, rollout={"engine": RESTART})
    hold(service, True)  # until the other engine has come back
    on_loop(service, service.fleet.failed(service.fleet.engines[1], "killed"))
    calls = 0
    while (scored := service.evaluate()) is None:
        calls += 1
        on_loop(service, catch_up(service))
        hold(service, False)
    assert calls == 1
    assert [s.tokens.tolist() for s in scored[1]] == [s.tokens.tolist() for s in expected]


def test_a_step_that_no_engine_can_make_requeues_its_draws(make_service):
    service = make_service(engines=two(), rollout={"engine": {"restart": {"limit": 0}}})
    for engine in service.fleet.engines:
        on_loop(service, service.fleet.failed(engine, f"{engine.name} burnt"))
    with pytest.raises(NoEngineLeft, match="engine a: a burnt; engine b: b burnt"):
        service.next_step(1)
    assert service.ledger.balance()["requeued"] == 4


def test_the_deadline_of_a_step_runs_on_over_several_calls(make_service):
    service = make_service(engines=two(), rollout={"timeout_s": 3.0, "engine": RESTART})
    for engine in service.fleet.engines:
        engine.delay_s = 60
    on_loop(service, service.fleet.failed(service.fleet.engines[0], "killed"))
    began = time.monotonic()
    with pytest.raises(
        DeadlineExceeded,
        match=r"step 1 has no rollouts after 3 s \(rollout.timeout_s\).*engine b \(",
    ):
        ask_again_and_again(service)
    assert time.monotonic() - began < 30
    assert service.ledger.balance()["requeued"] == 4
