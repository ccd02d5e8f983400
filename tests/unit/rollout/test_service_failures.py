"""What fails or hangs in the service is named; bad input is refused before the first step."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time

import pytest
from deadlines_kit import once_it_says
from fake_engine import FakeEngine, addresses, random_reply

from rlcore.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    EmptyBatch,
    EngineFailed,
    ModelError,
    RunFailed,
    TooManyFailed,
)
from rollout.collection.attempts import MAX_WITHOUT_TOKENS

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
    ("sections", "message"),
    [
        (
            {"policy": {"logprobs": {"keep_sets": True}}},
            "policy.logprobs.keep_sets is on, but a sample has no sampling_mask",
        ),
        (
            {"policy": {"routing_replay": "engine"}},
            "policy.routing_replay is on, but a sample has no routed_experts",
        ),
        (
            {"rollout": {"workflow": "user_parts:WronglyProcessed"}},
            r"WronglyProcessed failed on .*: sample 0 of draw 3: token_rewards must be .*\(2,\)",
        ),
        (
            {"rollout": {"filters": ["user_parts:broken_filter"]}},
            r"broken_filter failed on .*no groups \(.*\.py:\d+ in broken_filter\)",
        ),
        ({"rollout": {"filters": ["user_parts:vague_filter"]}}, "returned None"),
        # its code 0 would pass for success
        (
            {"rollout": {"filters": ["user_parts:leaves"]}},
            r"filter leaves failed on .*: SystemExit: 0",
        ),
    ],
)
def test_a_part_that_makes_a_step_impossible_is_named(make_service, sections, message):
    with pytest.raises(RunFailed, match=message):
        make_service(**sections).next_step(1)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ("negative token", r"token \d+ is -7, expected ids from 0 to \d+, the model's vocabulary"),
        ("large token", r"token 0 is 2000000000, expected ids"),
        ("log-prob of nan", r"the log-prob of trainable token 0 is nan, expected a finite number"),
        ("log-prob above 0", r"the log-prob of trainable token 0 is 5\.0, expected"),
        ("version", r"tokens of policy version 999, expected versions of its completions"),
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"workflow": "single_tern"},
            r"rollout\.workflow: 'single_tern' is unknown; did you mean 'single_turn'",
        ),
        ({"filters": ["zero_varianse"]}, r"rollout\.filters.*did you mean 'zero_variance'"),
        ({"filters": ["nowhere:keep"]}, r"rollout\.filters.*cannot import nowhere"),
        ({"filters": ["user_parts:missing"]}, r"rollout\.filters.*has no 'missing'"),
        ({"filters": ["user_parts:stale"]}, r"rollout\.filters.*cannot be called 'stale'.*rename"),
        (
            {"filters": ["zero_variance"], "samples_per_prompt": 1},
            "zero_variance drops every group",
        ),
    ],
)
def test_a_part_that_cannot_be_is_refused(make_service, given, message):
    with pytest.raises(ConfigError, match=message):
        make_service(rollout=given)


def test_an_engine_that_hangs_is_named_at_its_deadline(make_service):
    engine = FakeEngine(random_reply(31), name="engine-7", delay_s=600)
    service = make_service(
        engines=[engine],
        rollout={"engine": {"progress_timeout_s": 0.2, "health_every_s": 0.05, "retries": 0}},
    )
    start = time.monotonic()
    with pytest.raises(
        EngineFailed,
        match=r"engine-7 .*no token for 0\.2 s \(rollout\.engine\.progress_timeout_s\)",
    ):
        service.next_step(1)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("rollout", "reward", "message"),
    [
        (
            {"workflow": "user_parts:Stuck"},
            {},
            "1 of the prompts wait for workflow .*Stuck.*; 3 of .* wait for the gate",
        ),
        pytest.param(
            {},
            {"on_error": 1.0},
            "4 of the prompts wait for the reward, the first is .*sums.jsonl",
            marks=pytest.mark.rest,
        ),
    ],
)
def test_a_step_that_hangs_names_who_is_waited_for(
    make_service, rollout, reward, message, monkeypatch
):
    if reward:
        monkeypatch.setattr("rollout.rewards.scorer.Scorer.score", lambda *_: asyncio.sleep(600))
    monkeypatch.setattr("rollout.service.within", once_it_says(message))
    service = make_service(rollout={"timeout_s": 0.3, **rollout}, reward=reward)
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
    engine.abort_next = MAX_WITHOUT_TOKENS + 5
    rollouts = make_service().next_step(1)
    assert addresses(rollouts) == expected
    assert rollouts.metrics["rollout/requeued_prompts"] == 4.0


def test_nan_rewards_are_counted(make_service):
    reward = {
        "parts": {"nan": {"function": "user_parts:nan_for_odd"}},
        "on_error": -2.0,
        "max_failed": 0.5,
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
    assert rollouts.metrics["rollout/unscored_samples"] == 4.0
    assert rollouts.metrics["rollout/scored_samples"] == 8.0
    assert rollouts.unscored == []


FAILS_OFTEN = {"parts": {"nan": {"function": "user_parts:nan_for_odd"}}, "workers": 1}


def test_a_sample_whose_reward_failed_leaves_its_group(make_service):
    """Two of the four samples of a group have a score: those are trained on, and filtered."""
    seen: list[int] = []

    def keeps(group):
        seen.append(len(group))
        return all(sample.is_scored for sample in group)

    service = make_service(
        reward={**FAILS_OFTEN, "max_failed": 0.5}, rollout={"samples_per_prompt": 4}
    )
    service._filters._filters["keeps"] = keeps
    rollouts = service.next_step(1)
    assert [(s.draw, s.index, s.reward) for s in rollouts.samples] == [
        (draw, index, 1.0) for draw in range(4) for index in (0, 2)
    ]
    assert [(s.draw, s.index) for s in rollouts.unscored] == [
        (draw, index) for draw in range(4) for index in (1, 3)
    ]
    assert all(math.isnan(s.reward) for s in rollouts.unscored)
    assert seen == [2, 2, 2, 2]
    assert rollouts.metrics["rollout/unscored_samples"] == 8.0
    assert rollouts.metrics["rollout/failed_groups"] == 0.0


def test_a_group_with_too_few_scores_is_given_up(make_service):
    """One scored sample is no group for GRPO, and one for an estimator without groups."""
    few = {**FAILS_OFTEN, "max_failed": 1.0}
    service = make_service(reward=few)
    with pytest.raises(EmptyBatch, match=r"64 had too few scores; the com.*: reward\.parts\.nan"):
        service.next_step(1)
    assert service.ledger.balance()["failed"] >= 64
    alone = {"estimator": {"name": "reinforce++"}}
    rollouts = make_service(reward=few, algorithm=alone).next_step(1)
    assert [(s.draw, s.index) for s in rollouts.samples] == [(draw, 0) for draw in range(4)]


@pytest.mark.parametrize("filters", [[], ["zero_variance"]])
@pytest.mark.parametrize("on_error", ["drop", 0.0])
def test_rewards_that_fail_too_often_end_the_run(make_service, filters, on_error):
    reward = {"parts": {"nan": {"function": "user_parts:nan"}}, "workers": 1, "on_error": on_error}
    service = make_service(reward=reward, rollout={"filters": filters})
    with pytest.raises(
        TooManyFailed,
        match=r"step 1: 8 of 8 rewards failed, which is more than reward\.max_failed \(0\.1\)"
        r" allows; the commonest failure, 8 times: reward\.parts\.nan \(user_parts:nan\) failed on"
        r" sample .*returned nan.*user_parts\.py:\d+ in nan",
    ):
        service.next_step(1)
    assert service.ledger.unsettled() == []


def test_an_evaluation_without_any_score_ends_the_run_unless_there_was_one(make_service, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "7+1=", "label": "8"}\n')
    reward = {"parts": {"nan": {"function": "user_parts:nan"}}, "workers": 1}
    service = make_service(reward=reward, evaluation={"paths": [str(tmp_path / "held_out.jsonl")]})
    with pytest.raises(TooManyFailed, match="rewards of all 1 samples of the evaluation failed"):
        service.evaluate()
    service._evaluator.sets[0].has_scores = True
    metrics, (sample,) = service.evaluate()
    assert not sample.is_scored
    assert metrics["eval/unscored"] == metrics["eval/reward_errors"] == 1.0
    assert "eval/score" not in metrics


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
