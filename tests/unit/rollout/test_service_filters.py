"""Groups that filters drop are counted and replaced; what no step can be made of ends the run."""

from __future__ import annotations

import json

import pytest

from rlcore.errors import ConfigError, RunFailed


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
    [
        ("broken_filter", r"broken_filter failed on .*no groups \(.*\.py:\d+ in broken_filter\)"),
        ("vague_filter", "returned None"),
    ],
)
def test_a_broken_filter_is_named(make_service, name, message):
    with pytest.raises(RunFailed, match=message):
        make_service(rollout={"filters": [f"user_parts:{name}"]}).next_step(1)
