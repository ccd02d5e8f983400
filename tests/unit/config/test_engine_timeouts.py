"""The time that engines may take, and the time that other ranks wait for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlcore.config.derived import all_engines_timeout_s, max_request_s
from rlcore.config.load import Loaded

LONG = ("rollout.sampling.max_new_tokens=32768", "policy.max_tokens_per_microbatch=40000")
TWO = ("policy.parallel.tensor=2", "cluster.processes_per_node=2")


@pytest.mark.parametrize(
    ("overrides", "remarks"),
    [
        (TWO, 0),
        ([*TWO, "rollout.engine.update_timeout_s=555"], 0),
        ([*TWO, "rollout.engine.update_timeout_s=556"], 1),
        ([*TWO, "cluster.collective_timeout_s=300"], 1),
        (["rollout.engine.update_timeout_s=900"], 0),  # nobody waits for the only rank
    ],
)
def test_an_engine_may_not_hold_up_a_collective(
    load: Callable[..., Loaded], overrides: list[str], remarks: int
) -> None:
    notes = [
        note for note in load(*overrides).warnings if "rollout.engine.update_timeout_s" in note
    ]
    assert len(notes) == remarks
    assert all("cluster.collective_timeout_s" in note for note in notes)


def test_the_other_ranks_wait_for_every_answer_of_a_publication(
    load: Callable[..., Loaded],
) -> None:
    config = load("rollout.engine.update_timeout_s=100").config
    engine = config.rollout.engine
    without = engine.start_timeout_s + engine.restart.max_backoff_s + max_request_s(config)
    assert all_engines_timeout_s(config) >= without + 6 * 100


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ([*LONG], 600 + 32768),
        (["rollout.sampling.max_new_tokens=100", "evaluation.paths=e.jsonl",
         "evaluation.max_new_tokens=400"], 1000),
        ([*LONG, "rollout.engine.request_timeout_s=7"], 7),
    ],
)  # fmt: skip
def test_a_request_has_a_second_for_each_token(
    load: Callable[..., Loaded], overrides: list[str], seconds: float
) -> None:
    assert max_request_s(load(*overrides).config) == seconds


@pytest.mark.parametrize(("seconds", "remarks"), [(600, 1), (1700, 0)])
def test_a_limit_that_long_responses_will_reach_is_told(
    load: Callable[..., Loaded], seconds: int, remarks: int
) -> None:
    given = (*LONG, f"rollout.engine.request_timeout_s={seconds}")
    notes = [note for note in load(*given).warnings if "rollout.engine.request_timeout_s" in note]
    assert len(notes) == remarks
    assert all("must make 55 tokens a second" in note for note in notes)
