"""Means over rollouts of what conversations measured."""

from __future__ import annotations

from rlcore.algorithms import conversation_metrics, metric_spec

ROWS = [
    {"turns": 2.0, "generated_tokens": 30.0, "trained_tokens": 30.0, "cached_tokens": 8.0},
    {},  # another segment of the same rollout
    {
        "turns": 4.0,
        "generated_tokens": 50.0,
        "trained_tokens": 30.0,
        "untrained_lost": 20.0,
        "doors": 3.0,
    },
]


def test_means_are_over_rollouts_that_measured() -> None:
    found = conversation_metrics(ROWS)
    assert found == {
        "conversation/turns": 3.0,
        "conversation/generated_tokens": 40.0,
        "conversation/trained_tokens": 30.0,
        "conversation/untrained_lost": 10.0,  # 0 where nothing was lost
        "conversation/merge_ratio": 0.75,
        "conversation/cached_tokens": 8.0,  # one engine did not tell
        "conversation/doors": 3.0,
    }
    assert [name for name in found if metric_spec(name) is None] == []
    spec = metric_spec("conversation/untrained_lost")
    assert spec is not None
    assert spec.unit == "tokens"


def test_a_measurement_of_a_workflow_alone_counts_no_token() -> None:
    rows = [{"generated_tokens": 10.0, "trained_tokens": 5.0}, {"doors": 1.0}]
    assert conversation_metrics(rows)["conversation/merge_ratio"] == 0.5


def test_without_conversations_there_are_none() -> None:
    assert conversation_metrics([{}, {}]) == {}
