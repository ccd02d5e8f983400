"""The service, driven as the trainer drives it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time

import numpy as np
import psutil
import pytest
from fake_engine import FakeEngine, random_reply

from rlcore.algorithms.metric_table import METRICS, metric_spec
from rlcore.data.batch import RolloutBatch
from rlcore.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    EmptyBatch,
    EngineFailed,
    ModelError,
    RunFailed,
)
from rollout.collection.attempts import MOST_IN_VAIN


def addresses(rollouts) -> list[tuple[int, int, str, tuple[int, ...]]]:
    return [(s.draw, s.index, s.prompt_id, tuple(s.tokens.tolist())) for s in rollouts.samples]


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


def test_overhead_outside_the_engine_is_small(make_service):
    """256 samples take some 10 ms of CPU time, the fake engine's share and the checks of samples
    included, several times that on a busy machine; the limit is of what grows with the square.
    """
    service = make_service(
        engines=[FakeEngine(lambda request, sample: [3, 4, 1])],
        rollout={
            "prompts_per_step": 32,
            "samples_per_prompt": 8,
            "sampling": {"max_new_tokens": 8},
        },
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
            "samples_per_prompt": 2,
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
    engines = [FakeEngine(random_reply(31), name=name, delay_s=0.01) for name in "ab"]
    service = make_service(
        engines=engines,
        rollout={
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "sampling": {"max_new_tokens": 4},
            "engine": {"kind": "sglang"},
        },
    )
    service.next_step(1)
    assert [[[r.draw for r in call] for call in e.calls] for e in engines] == [
        [[0], [2]],
        [[1], [3]],
    ]


def test_turns_of_many_workflows_share_batches(make_service, engine):
    service = make_service(rollout={"prompts_per_step": 4, "workflow": "user_parts:TwoTries"})
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


# --- resumption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [[], ["user_parts:even_draws"]])
def test_a_resumed_service_continues_the_undisturbed_run(make_service, filters):
    section = {
        "prompts_per_step": 3,
        "samples_per_prompt": 2,
        "filters": filters,
        "oversample": 1.5,
    }
    section["sampling"] = {"max_new_tokens": 8}
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


# --- filters --------------------------------------------------------------------------------------


def test_filtered_groups_are_counted_and_replaced(make_service):
    service = make_service(
        rollout={
            "prompts_per_step": 3,
            "samples_per_prompt": 2,
            "filters": ["user_parts:even_draws"],
            "sampling": {"max_new_tokens": 8},
        }
    )
    rollouts = service.next_step(1)
    assert sorted({s.draw for s in rollouts.samples}) == [0, 2, 4]
    assert rollouts.metrics["rollout/dropped_even_draws"] == 2.0
    assert service.ledger.state(1) == "dropped by even_draws"


def test_surplus_groups_go_back_to_the_stream(make_service):
    service = make_service(
        rollout={"prompts_per_step": 4, "oversample": 1.5, "sampling": {"max_new_tokens": 8}}
    )
    first = service.next_step(1)
    assert first.metrics["rollout/requeued_prompts"] == 2.0
    assert sorted({s.draw for s in service.next_step(2).samples}) == [4, 5, 6, 7]


def test_a_batch_that_filters_empty_says_what_dropped_what(make_service, tmp_path):
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "9+9=", "label": "18"}) + "\n")
    service = make_service(
        rollout={
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "filters": ["zero_variance"],
            "sampling": {"max_new_tokens": 8},
        }
    )
    with pytest.raises(
        RunFailed, match="step 1 has 0 of 2 groups after 32 draws: zero_variance dropped 32"
    ):
        service.next_step(1)
    assert service.ledger.balance()["dropped by zero_variance"] == 32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero_varianse", "did you mean 'zero_variance'"),
        ("nowhere:keep", "cannot import nowhere"),
        ("user_parts:missing", "has no 'missing'"),
        ("user_parts:stale", "cannot be called 'stale'.*rename"),
        ("user_parts:rolled_back", "cannot be called 'rolled_back'.*rename"),
    ],
)
def test_an_unknown_filter_is_refused(make_service, name, message):
    with pytest.raises(ConfigError, match=f"rollout.filters.*{message}"):
        make_service(rollout={"filters": [name]})


def test_zero_variance_of_single_samples_is_refused(make_service):
    with pytest.raises(ConfigError, match="zero_variance drops every group"):
        make_service(rollout={"filters": ["zero_variance"], "samples_per_prompt": 1})


@pytest.mark.parametrize(
    ("name", "message"),
    [("broken_filter", "broken_filter failed on .*no groups"), ("vague_filter", "returned None")],
)
def test_a_broken_filter_is_named(make_service, name, message):
    with pytest.raises(RunFailed, match=message):
        make_service(rollout={"filters": [f"user_parts:{name}"]}).next_step(1)


# --- failures and deadlines -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        (
            "user_parts:Broken",
            r"workflow user_parts:Broken failed on .*sums\.jsonl:\d+ \(draw \d\): KeyError: 'tool'"
            r" \(.*user_parts\.py:\d+ in __call__\)",
        ),
        (
            "user_parts:Cancelled",
            (
                r"workflow user_parts:Cancelled failed on .*sums\.jsonl:\d+ \(draw \d\):"
                r" it was cancelled from within"
            ),
        ),
        ("user_parts:Empty", "it returned list, expected a list of at least one Sample"),
    ],
)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_broken_workflow_is_named(make_service, workflow, message, staleness):
    service = make_service(
        rollout={"workflow": workflow, "max_staleness": staleness, "timeout_s": 20.0}
    )
    service.published(0, 0, 0)
    with pytest.raises(RunFailed, match=message):
        service.next_step(1)


def test_no_batch_holds_a_part_of_a_group_that_failed(make_service, monkeypatch):
    """What its other rollouts asked meanwhile would make batches depend on who failed when."""
    monkeypatch.setattr("rollout.collection.attempts.RETRY_S", 0.01)
    engine = FakeEngine(random_reply(31))
    service = make_service(engines=[engine], rollout={"workflow": "user_parts:FailsOnce"})
    done = service.next_step(1)
    assert sorted({sample.draw for sample in done.samples}) == [0, 1, 3, 4]
    addresses = [[(r.draw, r.first_sample, r.turn) for r in call] for call in engine.calls]
    everyone = [(draw, sample) for draw in range(4) for sample in range(2)]
    others = [(draw, sample) for draw, sample in everyone if draw != 2]
    assert addresses == [
        [(*rollout, 0) for rollout in everyone],
        [(*rollout, 1) for rollout in others],
        [(4, 0, 0), (4, 1, 0)],
        [(4, 0, 1), (4, 1, 1)],
    ]
    assert service.ledger.state(2) == "failed"
    metrics = done.metrics
    assert (metrics["rollout/failed_groups"], metrics["rollout/failed_tries"]) == (1.0, 2.0)
    assert metrics["rollout/failed_tries_error"] == 2.0
    assert "rollout/failed_tries_error" not in service.next_step(2).metrics


@pytest.mark.parametrize(
    ("policy", "missing"),
    [
        (
            {"logprobs": {"keep_sets": True}},
            "policy.logprobs.keep_sets is on, but a sample has no sampling_mask",
        ),
        (
            {"routing_replay": "engine"},
            "policy.routing_replay is on, but a sample has no routed_experts",
        ),
    ],
)
def test_a_record_that_the_trainer_needs_must_come_with_every_sample(make_service, policy, missing):
    with pytest.raises(RunFailed, match=missing):
        make_service(policy=policy).next_step(1)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ("negative token", r"token \d+ is -7, expected ids from 0 to \d+, the model's vocabulary"),
        ("large token", r"token 0 is 2000000000, expected ids"),
        ("log-prob of nan", r"the log-prob of trainable token 0 is nan, expected a finite number"),
        ("log-prob above 0", r"the log-prob of trainable token 0 is 5\.0, expected"),
        ("version", r"tokens of policy version 999, expected versions that its completions have"),
    ],
)
def test_what_no_policy_can_have_made_is_a_failed_rollout(
    make_service, monkeypatch, caplog, lie, said
):
    """It would be trained on without a word, or end the run."""
    monkeypatch.setattr("rollout.collection.attempts.RETRY_S", 0.01)
    workflow = {"name": "user_parts:Lies", "lie": lie}
    done = make_service(rollout={"workflow": workflow}).next_step(1)
    assert done.metrics["rollout/failed_tries"] == 1.0
    assert done.metrics["rollout/failed_groups"] == 0.0
    assert re.search(
        rf"user_parts:Lies failed on .*sums\.jsonl:\d+ \(draw \d\): .*{said}", caplog.text
    )
    assert all((sample.tokens >= 0).all() for sample in done.samples)


def test_a_filter_that_exits_is_named(make_service):
    """Its code 0 would pass for success."""
    with pytest.raises(RunFailed, match=r"filter leaves failed on .*: SystemExit: 0"):
        make_service(rollout={"filters": ["user_parts:leaves"]}).next_step(1)


def test_an_unknown_workflow_is_refused(make_service):
    with pytest.raises(
        ConfigError,
        match=r"rollout\.workflow: 'single_tern' is unknown; did you mean 'single_turn'",
    ):
        make_service(rollout={"workflow": "single_tern"})


def test_an_engine_that_hangs_is_named_at_its_deadline(make_service):
    engine = FakeEngine(random_reply(31), name="engine-7", delay_s=600)
    service = make_service(
        engines=[engine],
        rollout={
            "engine": {"progress_timeout_s": 0.2, "health_every_s": 0.05, "retries": 0},
        },
    )
    start = time.monotonic()
    with pytest.raises(
        EngineFailed,
        match=r"engine-7 .*no token for 0\.2 s \(rollout\.engine\.progress_timeout_s\)",
    ):
        service.next_step(1)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("rollout", "reward", "message"),
    [
        (
            {"workflow": "user_parts:Stuck"},
            {},
            "1 of the prompts wait for workflow .*Stuck.*; 3 of .* wait for the gate",
        ),
        ({}, {"on_error": 1.0}, "4 of the prompts wait for the reward, the first is .*sums.jsonl"),
    ],
)
def test_a_step_that_hangs_names_who_is_waited_for(
    make_service, rollout, reward, message, monkeypatch
):
    if reward:
        monkeypatch.setattr("rollout.rewards.scorer.Scorer.score", lambda *_: asyncio.sleep(600))
    service = make_service(
        rollout={"prompts_per_step": 4, "timeout_s": 0.3, **rollout}, reward=reward
    )
    with pytest.raises(
        DeadlineExceeded,
        match=rf"step 1 has no rollouts after 0\.3 s \(rollout\.timeout_s\): {message}",
    ):
        service.next_step(1)
    assert service.ledger.balance()["requeued"] == 4


def test_a_blocked_loop_is_no_hang(make_service, engine, monkeypatch):
    monkeypatch.setattr("rollout.asyncio_utils.LOOP_GRACE_S", 0.2)
    monkeypatch.setattr("rollout.service.GIVE_UP_S", 0.2)
    service = make_service(rollout={"timeout_s": 0.2})
    release = threading.Event()
    engine.reply = lambda request, sample: release.wait(3) or [1]
    with pytest.raises(DeadlineExceeded, match="blocks the rollout thread"):
        service.next_step(1)
    release.set()


def test_an_engine_that_does_not_start_is_named(make_service, engine, monkeypatch):
    monkeypatch.setattr(FakeEngine, "start", lambda self: asyncio.sleep(600))
    monkeypatch.setattr("rollout.fleet.fleet.TRANSPORT_GRACE_S", 0.2)
    with pytest.raises(DeadlineExceeded, match=r"engine fake was not ready after 0\.2 s"):
        make_service(rollout={"engine": {"start_timeout_s": 0.2}})
    assert engine.closed


def test_aborted_responses_go_on(make_service, engine):
    whole = make_service().next_step(1)
    assert (
        whole.metrics["rollout/resumed_responses"] == whole.metrics["rollout/resumed_tokens"] == 0.0
    )
    engine.abort_next = 1
    service = make_service()
    rollouts = service.next_step(1)
    assert addresses(rollouts) == addresses(whole)
    assert rollouts.metrics["rollout/requeued_prompts"] == 0.0
    assert rollouts.metrics["rollout/resumed_responses"] == 8.0
    assert rollouts.metrics["rollout/resumed_tokens"] == sum(
        s.num_trainable // 2 for s in whole.samples
    )
    assert service.next_step(2).metrics["rollout/resumed_responses"] == 0.0


def test_groups_that_are_aborted_again_and_again_are_drawn_again(make_service, engine):
    expected = addresses(make_service().next_step(1))
    engine.abort_next = MOST_IN_VAIN + 5
    rollouts = make_service().next_step(1)
    assert addresses(rollouts) == expected
    assert rollouts.metrics["rollout/requeued_prompts"] == 4.0


def test_nan_rewards_are_counted(make_service):
    reward = {
        "parts": {"nan": {"function": "user_parts:nan_for_odd"}},
        "on_error": -2.0,
        "workers": 1,
    }
    rollouts = make_service(reward=reward).next_step(1)
    assert [s.reward for s in rollouts.samples] == 4 * [1.0, -2.0]
    assert (
        rollouts.samples[1]
        .metadata["reward_error"]
        .startswith("nan: returned nan, expected a finite number")
    )
    assert rollouts.metrics["rollout/reward_errors"] == 4.0
    assert rollouts.metrics["rollout/scored_samples"] == 8.0


@pytest.mark.parametrize("filters", [[], ["zero_variance"]])
def test_a_reward_that_fails_on_the_whole_first_step_ends_it(make_service, filters):
    reward = {"parts": {"nan": {"function": "user_parts:nan"}}, "workers": 1}
    with pytest.raises(
        EmptyBatch,
        match=r"reward\.parts\.nan \(user_parts:nan\) failed on all \d+ samples of step 1.*returned"
        r" nan.*user_parts\.py:\d+ in nan",
    ):
        make_service(reward=reward, rollout={"filters": filters}).next_step(1)


def test_a_reward_that_fails_on_the_whole_first_evaluation_ends_it(make_service, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "7+1=", "label": "8"}\n')
    reward = {"parts": {"nan": {"function": "user_parts:nan"}}, "workers": 1}
    service = make_service(reward=reward, evaluation={"paths": [str(tmp_path / "held_out.jsonl")]})
    with pytest.raises(EmptyBatch, match="failed on all 1 samples of the evaluation"):
        service.evaluate()


# --- bad input ------------------------------------------------------------------------------------


def test_a_tokenizer_larger_than_the_policy_names_both_sizes(make_service, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 30}))
    with pytest.raises(ModelError, match="vocabulary of 30, its tokenizer one of 31"):
        make_service()


def test_a_verifier_needs_labels(make_service, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"reward\.parts\.exact_match compares with a label, but data\.label_key is null",
    ):
        make_service(data={"paths": [str(tmp_path / "sums.jsonl")], "label_key": None})
    (tmp_path / "sums.jsonl").write_text(
        '{"prompt": "1=", "label": "1"}\n{"prompt": "2=", "label": null}\n'
    )
    with pytest.raises(
        DataError, match=r"sums\.jsonl:2: the label must be text or a number.*got null"
    ):
        make_service()


# --- evaluation -----------------------------------------------------------------------------------


def test_evaluation_is_greedy_and_disturbs_nothing(make_service, engine, tmp_path):
    (tmp_path / "held_out.jsonl").write_text(
        '{"prompt": "9+9=", "label": "18"}\n{"prompt": "7+1=", "label": "8"}\n'
    )
    undisturbed = make_service()
    expected = [addresses(undisturbed.next_step(step)) for step in (1, 2)]
    service = make_service(
        evaluation={"paths": [str(tmp_path / "held_out.jsonl")], "max_new_tokens": 5}
    )
    got = [addresses(service.next_step(1))]
    before = service.snapshot()
    engine.calls.clear()
    metrics, samples = service.evaluate()
    assert service.snapshot() == before
    (call,) = engine.calls
    assert [(r.draw, r.n, r.sampling.temperature, r.sampling.max_new_tokens) for r in call] == [
        (0, 1, 0.0, 5),
        (1, 1, 0.0, 5),
    ]
    assert {r.seed for r in call}.isdisjoint({1})
    assert [s.response_text for s in samples] == ["19", "8"]
    assert metrics == {
        "eval/score": 0.5,
        "eval/accuracy": 0.5,
        "eval/sequence_lengths": 2.5,
        "eval/stop_token_rate": 1.0,
        "eval/reward_errors": 0.0,
        "eval/reward_timeouts": 0.0,
        "eval/failed": 0.0,
    }
    assert [*got, addresses(service.next_step(2))] == expected
    assert undisturbed.evaluate() == ({}, [])


HALF = {"parts": {"half": {"function": "user_parts:half"}}}


def test_accuracy_needs_something_that_says_right_or_wrong(make_service, tmp_path):
    """A reward above 0 does not: with it a partial credit of 0.5 was an accuracy of 1."""
    evaluation = {"paths": [str(tmp_path / "sums.jsonl")], "max_prompts": 3, "k": [1]}
    metrics, _ = make_service(evaluation=evaluation, reward=HALF).evaluate()
    assert metrics["eval/score"] == metrics["eval/score_low"] == 0.5
    assert not [name for name in metrics if "accuracy" in name or "@" in name]


def named_sets(tmp_path):
    """One easy set, greedy, and one with four samples of each prompt, of which two are right."""
    (tmp_path / "easy.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 3)
    (tmp_path / "hard.jsonl").write_text(
        '{"question": "1+2=", "label": "3"}\n{"question": "9+9=", "label": "18"}\n'
    )
    hard = {"paths": [str(tmp_path / "hard.jsonl")], "samples_per_prompt": 4, "temperature": 0.6}
    return {
        "max_new_tokens": 5,
        "sets": {
            "easy": {"paths": [str(tmp_path / "easy.jsonl")], "k": []},
            "hard": {**hard, "top_p": 0.9, "k": [1, 2, 3], "prompt_key": "question"},
        },
    }


def test_named_sets_are_generated_together_and_scored_apart(make_service, engine, tmp_path):
    service = make_service(evaluation=named_sets(tmp_path))
    engine.calls.clear()
    metrics, samples = service.evaluate(["easy", "hard"])
    sent = [request for call in engine.calls for request in call]
    assert [(r.draw, r.n, r.sampling.temperature, r.sampling.top_p) for r in sent] == [
        *((row, 1, 0.0, 1.0) for row in range(3)),
        *((row, 4, 0.6, 0.9) for row in range(2)),
    ]
    assert len({(r.seed, r.draw) for r in sent}) == 5, "no two share their random numbers"
    assert [s.metadata["evaluation_set"] for s in samples] == ["easy"] * 3 + ["hard"] * 8
    assert {name: metrics[name] for name in metrics if name.startswith("eval/easy")} == {
        "eval/easy/score": 1.0,
        "eval/easy/accuracy": 1.0,
        "eval/easy/sequence_lengths": 2.0,
        "eval/easy/stop_token_rate": 1.0,
        "eval/easy/reward_errors": 0.0,
        "eval/easy/reward_timeouts": 0.0,
        "eval/easy/failed": 0.0,
    }
    hard = {name: metrics[f"eval/hard/{name}"] for name in ("score", "accuracy", "avg@4", "pass@1")}
    assert hard == dict.fromkeys(hard, 0.25), "two of four are right for one of two prompts"
    # of "3", "4", "3", "4": 1 - C(2,2)/C(4,2); a vote of three has a majority, right half the time
    assert metrics["eval/hard/pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert metrics["eval/hard/pass@3"] == pytest.approx(0.5)
    assert metrics["eval/hard/maj@3"] == pytest.approx(0.25)
    assert 0 <= metrics["eval/hard/pass@2_low"] < 5 / 12 < metrics["eval/hard/pass@2_high"] <= 1
    assert all(metric_spec(name) for name in metrics)
    assert metric_spec("eval/pass@8_low") is METRICS["eval/<metric>_low"]


def test_failed_rewards_are_those_of_this_evaluation(make_service, tmp_path):
    """The runner counts all since its start."""
    reward = {"parts": {"nan": {"function": "user_parts:nan_for_odd"}}, "workers": 1}
    service = make_service(evaluation=named_sets(tmp_path), reward=reward)
    for _ in range(2):
        metrics, samples = service.evaluate(["hard"])
        assert metrics["eval/hard/reward_errors"] == 4.0
        assert metrics["eval/hard/reward_timeouts"] == 0.0
        assert sum("reward_error" in sample.metadata for sample in samples) == 4


def test_a_set_gives_the_same_samples_whichever_are_scored_beside_it(make_service, tmp_path):
    def service():
        return make_service(engines=[FakeEngine(random_reply(31))], evaluation=named_sets(tmp_path))

    _, both = service().evaluate()
    one = service()
    _, alone = one.evaluate(["hard"])
    assert [s.response_text for s in alone] == [s.response_text for s in both[3:]]
    assert one.evaluate([]) == ({}, [])


def test_a_set_may_have_a_reward_of_its_own(make_service, tmp_path):
    given = named_sets(tmp_path)
    given["sets"]["easy"]["reward"] = HALF
    service = make_service(evaluation=given)
    metrics, _ = service.evaluate()
    assert metrics["eval/easy/score"] == 0.5
    assert "eval/easy/accuracy" not in metrics
    assert metrics["eval/hard/accuracy"] == 0.25
    service.close()
    assert psutil.Process().children() == []


def test_an_evaluation_that_hangs_names_the_set(make_service, engine, tmp_path):
    service = make_service(evaluation=named_sets(tmp_path), rollout={"timeout_s": 0.5})
    engine.delay_s = 30
    with pytest.raises(
        DeadlineExceeded, match=r"has not ended after 0.5 s .*set easy: .*set hard: "
    ):
        service.evaluate()


def test_evaluation_can_be_limited(make_service, tmp_path):
    service = make_service(
        evaluation={
            "paths": [str(tmp_path / "sums.jsonl")],
            "max_prompts": 3,
            "samples_per_prompt": 2,
        }
    )
    _, samples = service.evaluate()
    assert len(samples) == 6


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
        thread.join(10)  # one that ends may still be there
    assert not [thread.name for thread in left if thread.is_alive()]


def test_random_replies_depend_on_the_address_alone(make_service):
    engine = FakeEngine(random_reply(31))
    one = make_service(engines=[engine]).next_step(1)
    two = make_service(engines=[FakeEngine(random_reply(31))]).next_step(1)
    assert addresses(one) == addresses(two)
    assert len({tuple(s.tokens[s.loss_mask == 1].tolist()) for s in one.samples}) == 8
    assert all(s.rollout_logprobs.dtype == np.float32 for s in one.samples)
