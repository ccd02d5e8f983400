"""The service, driven as the trainer drives it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace

import psutil
import pytest
from fake_engine import FakeEngine, addresses, random_reply

from rlcore.data.batch import RolloutBatch
from rlcore.data.generation import Drafts
from rlcore.errors import ConfigError, DataError, RunFailed

# --- the start ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "warned"), [(8, True), (0, False)])
def test_a_reward_that_pays_for_cheap_answers_is_named_before_the_first_step(
    make_service, caplog, rows, warned
):
    """The reward of the user counts the label anywhere, as in a list of answers."""
    parts = {"mine": {"function": "user_parts:contains_label"}}
    service = make_service(reward={"parts": parts, "audit_rows": rows})
    said = [r.getMessage() for r in caplog.records if r.name == "rollout.rewards.audit"]
    assert ["a list of answers scores on 8 of 8 rows" in text for text in said] == [True] * warned
    assert len(service.next_step(1).samples) == 8
    assert service.next_step(2).metrics["rollout/scored_samples"] == 8, "the audit is not counted"


# --- a step ---------------------------------------------------------------------------------------


def test_a_step_is_whole_scored_groups(make_service, engine):
    service = make_service()
    rollouts = service.next_step(1)
    assert [(s.draw, s.index) for s in rollouts.samples] == [
        (d, i) for d in range(4) for i in range(2)
    ]
    assert [s.reward for s in rollouts.samples] == [1.0, 0.0] * 4
    sample = rollouts.samples[0]
    assert sample.response_text == sample.label
    assert sample.tokens.tolist()[-1] == 1, "the stop token is kept"
    assert sample.num_trainable == len(sample.label) + 1
    assert len({s.rollout_id for s in rollouts.samples}) == 8
    assert len({s.group_id for s in rollouts.samples}) == 4
    assert rollouts.epoch == pytest.approx(4 / 20)
    assert RolloutBatch.from_samples(rollouts.samples).num_sequences == 8
    assert service.ledger.balance() == {"in flight": 0, "finished": 0, "requeued": 0, "consumed": 4}
    assert [r.draw for r in engine.calls[0]] == [0, 1, 2, 3]
    assert {(r.n, r.seed) for r in engine.calls[0]} == {(2, 1)}
    assert (
        rollouts.metrics["rollout/reward_errors"]
        == rollouts.metrics["rollout/reward_timeouts"]
        == 0.0
    )


def test_what_the_engines_say_of_their_drafts_is_the_step_s(make_service, engine):
    """Of all answers of a step together: an answer of many verifications counts more."""
    counts = [Drafts(6, 5, 2), Drafts(60, 10, 20), Drafts(3, 3, 1), None] * 2

    class Drafting(FakeEngine):
        def _complete(self, request, place, aborted):
            made = super()._complete(request, place, aborted)
            return replace(made, drafts=counts.pop(0) if counts else None)

    service = make_service(engines=[Drafting(engine.reply)])
    metrics = service.next_step(1).metrics
    assert metrics["rollout/draft_acceptance"] == pytest.approx(18 / 69)
    assert metrics["rollout/tokens_per_verification"] == pytest.approx(1 + 18 / 23)
    counts += [Drafts(4, 1, 1)]
    metrics = service.next_step(2).metrics
    assert (metrics["rollout/draft_acceptance"], metrics["rollout/tokens_per_verification"]) == (
        0.25,
        2.0,
    )
    metrics = service.next_step(3).metrics
    assert "rollout/draft_acceptance" not in metrics
    assert "rollout/tokens_per_verification" not in metrics


def test_overhead_outside_the_engine_is_small(make_service):
    """256 samples take some 10 ms of CPU time, the fake engine's share and the checks of samples
    included, several times that on a busy machine; the limit is of what grows with the square.
    """
    service = make_service(
        engines=[FakeEngine(lambda request, sample: [3, 4, 1])],
        rollout={"prompts_per_step": 32, "samples_per_prompt": 8},
    )
    seconds = []
    for step in range(1, 41):
        start = time.process_time()
        assert len(service.next_step(step).samples) == 256
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.2


def test_the_batch_goes_to_engines_in_calls_of_max_batch(make_service):
    engines = [FakeEngine(random_reply(31), name=name) for name in "ab"]
    service = make_service(
        engines=engines,
        rollout={
            "prompts_per_step": 6,
            "sampling": {"max_new_tokens": 4},
            "engine": {"max_batch": 4},
        },
    )
    rollouts = service.next_step(1)
    assert [[[r.draw for r in call] for call in e.calls] for e in engines] == [
        [[0, 2], [4]],
        [[1, 3], [5]],
    ]
    assert [s.draw for s in rollouts.samples] == [d for d in range(6) for _ in range(2)]


def test_continuous_engines_get_each_request_at_once(make_service):
    async def until_all_are_there(rids):
        while sum(len(engine.calls) for engine in engines) < 4:
            await asyncio.sleep(0.001)
        return False

    engines = [FakeEngine(random_reply(31), name=name) for name in "ab"]
    for engine in engines:
        engine._wait = until_all_are_there
    service = make_service(
        engines=engines, rollout={"sampling": {"max_new_tokens": 4}, "engine": {"kind": "sglang"}}
    )
    service.next_step(1)
    assert [[[r.draw for r in call] for call in e.calls] for e in engines] == [
        [[0], [2]],
        [[1], [3]],
    ]


def test_turns_of_many_workflows_share_batches(make_service, engine):
    service = make_service(rollout={"workflow": "user_parts:TwoTries"})
    assert len(service.next_step(1).samples) == 4
    assert [[(r.draw, r.turn) for r in call] for call in engine.calls] == [
        [(d, t) for d in range(4)] for t in (0, 1)
    ]


def test_prompts_that_are_too_long_are_counted(make_service, tmp_path):
    (tmp_path / "more.jsonl").write_text(json.dumps({"prompt": "1+22=", "label": "23"}) + "\n")
    paths = [str(tmp_path / "sums.jsonl"), str(tmp_path / "more.jsonl")]
    service = make_service(data={"paths": paths, "max_prompt_tokens": 4})
    assert service.next_step(1).metrics["rollout/excluded_prompts"] == 1.0
    assert len(service.prompts) == 20


def test_a_prompt_that_no_engine_can_take_is_refused_before_the_first_step(make_service, engine):
    engine.max_total_tokens = 11  # as a server whose KV pool is small tells after its start
    with pytest.raises(
        ConfigError, match=r"takes 11 tokens .*longest prompt has 4 .*max_prompt_tokens to 3"
    ):
        make_service()
    engine.max_total_tokens = 12
    assert len(make_service().next_step(1).samples) == 8


def test_held_out_prompts_that_no_engine_can_take_are_refused_too(
    make_service, make_config, engine, tmp_path
):
    """An evaluation at step 100 would end the run."""
    engine.max_total_tokens = 20
    paths = make_config().data.paths
    sets = {"long": {"paths": paths, "max_new_tokens": 17}}
    with pytest.raises(
        ConfigError,
        match=r"longest prompt has 4 in addition to evaluation\.sets\.long\.max_new_tokens \(17",
    ):
        make_service(evaluation={"sets": sets})
    sets["long"]["max_new_tokens"] = 16
    make_service(evaluation={"sets": sets})


# --- filters --------------------------------------------------------------------------------------


def test_filtered_groups_are_counted_and_replaced(make_service):
    service = make_service(rollout={"prompts_per_step": 3, "filters": ["user_parts:even_draws"]})
    rollouts = service.next_step(1)
    assert sorted({s.draw for s in rollouts.samples}) == [0, 2, 4]
    assert rollouts.metrics["rollout/dropped_even_draws"] == 2.0
    assert service.ledger.state(1) == "dropped by even_draws"


def test_surplus_groups_go_back_to_the_stream(make_service):
    service = make_service(rollout={"oversample": 1.5})
    first = service.next_step(1)
    assert first.metrics["rollout/requeued_prompts"] == 2.0
    assert sorted({s.draw for s in service.next_step(2).samples}) == [4, 5, 6, 7]


def test_a_batch_that_filters_empty_says_what_dropped_what(make_service, tmp_path):
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "9+9=", "label": "18"}) + "\n")
    service = make_service(rollout={"prompts_per_step": 2, "filters": ["zero_variance"]})
    with pytest.raises(
        RunFailed, match="step 1 has 0 of 2 groups after 32 draws: zero_variance dropped 32"
    ):
        service.next_step(1)
    assert service.ledger.balance()["dropped by zero_variance"] == 32


# --- resumption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [[], ["user_parts:even_draws"]])
def test_a_resumed_service_continues_the_undisturbed_run(make_service, filters):
    section = {"prompts_per_step": 3, "filters": filters, "oversample": 1.5}
    service = make_service(rollout=section)
    steps = [service.next_step(step) for step in range(1, 13)]
    for at in (1, 4, 9):
        resumed = make_service(rollout=section)
        resumed.restore(json.loads(json.dumps(steps[at - 1].snapshot)))
        again = [resumed.next_step(step) for step in range(at + 1, 13)]
        assert [addresses(s) for s in again] == [addresses(s) for s in steps[at:]]
        assert [s.epoch for s in again] == [s.epoch for s in steps[at:]]
        assert resumed.ledger.balance() == service.ledger.balance()


def test_a_step_that_fails_can_be_repeated(make_service, engine):
    expected = addresses(make_service().next_step(1))
    service = make_service()
    engine.failure = RuntimeError("out of memory")
    with pytest.raises(RunFailed, match="engine fake failed: RuntimeError: out of memory"):
        service.next_step(1)
    assert service.ledger.balance()["requeued"] == 4
    snapshot = service.snapshot()
    engine.failure = None
    assert addresses(service.next_step(1)) == expected
    resumed = make_service()
    resumed.restore(json.loads(json.dumps(snapshot)))
    assert addresses(resumed.next_step(1)) == expected


def test_unsettled_draws_of_a_snapshot_are_drawn_again(make_service):
    service = make_service()
    expected = addresses(service.next_step(1))
    # two in flight, two finished
    unsettled = {"codes": [-1, -2], "lengths": [2, 2], "filters": []}
    resumed = make_service()
    resumed.restore({"stream": service.snapshot()["stream"], "ledger": unsettled})
    assert addresses(resumed.next_step(1)) == expected


def test_other_data_is_refused_on_restore(make_service, tmp_path):
    state = make_service().next_step(1).snapshot
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "1+2=", "label": "3"}) + "\n")
    with pytest.raises(DataError, match=r"saved with 20 prompts.*now gives 1"):
        make_service().restore(state)


def test_another_label_is_refused_on_restore_by_its_row(make_service, tmp_path):
    state = make_service().next_step(1).snapshot
    path = tmp_path / "sums.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join([*lines[:6], lines[6].replace('"label": "', '"label": "9'), *lines[7:]])
    )
    with pytest.raises(DataError, match=r"sums\.jsonl:7 differs; resume with the same data"):
        make_service().restore(state)


def test_changed_held_out_rows_are_named_on_restore(make_service, tmp_path, caplog):
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"prompt": "9+9=", "label": "18"}\n{"prompt": "7+1=", "label": "8"}\n')
    evaluation = {"paths": [str(path)], "max_new_tokens": 5}
    service = make_service(evaluation=evaluation)
    service.next_step(1)
    state = json.loads(json.dumps(service.snapshot()))
    make_service(evaluation=evaluation).restore(state)
    assert "held-out rows" not in caplog.text
    path.write_text(path.read_text().replace('"8"', '"9"'))
    make_service(evaluation=evaluation).restore(state)
    assert f"{path}:2 differs; measurements from here" in caplog.text


# --- the end --------------------------------------------------------------------------------------


def test_close_leaves_no_thread_and_no_process(make_service, engine):
    before = {thread.ident for thread in threading.enumerate()}
    service = make_service(reward={"parts": {"f": {"function": "user_parts:nan"}}})
    assert len(psutil.Process().children()) == 2
    service.close()
    service.close()
    assert engine.closed
    assert psutil.Process().children() == []
    left = [thread for thread in threading.enumerate() if thread.ident not in before]
    for thread in left:
        thread.join(60)  # one that ends may still be there
    assert not [thread.name for thread in left if thread.is_alive()]
