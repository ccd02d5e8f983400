"""Evaluation by the service: greedy, by named sets, and without a trace in training."""

from __future__ import annotations

import psutil
import pytest
from deadlines_kit import once_it_says
from fake_engine import FakeEngine, addresses, random_reply

from rlcore.algorithms.metric_table import METRICS, metric_spec
from rlcore.errors import DeadlineExceeded


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
        "eval/unscored": 0.0,
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
        "eval/easy/unscored": 0.0,
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


def test_an_evaluation_that_hangs_names_the_set(make_service, engine, tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.service.within", once_it_says("set easy: .*set hard: "))
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
