from __future__ import annotations

import pytest

from rlcore.tracking.screen import BARS, PLAIN_BARS, Screen, sparkline, trend

ROW = {
    "rollout/reward": 0.5,
    "objective/kl": 0.0031,
    "val/sequence_lengths": 5.72,
    "policy/entropy_avg": 0.61,
    "rollout/staleness_mean": 1.21,
    "rollout/staleness_max": 3.0,
    "rollout/zero_std_groups": 3.0,
    "rollout/reward_errors": 1.0,
    "rollout/reward_timeouts": 1.0,
    "rollout/buffered_groups": 6.0,
    "rollout/in_flight_groups": 12.0,
    "rollout/engines_serving": 4.0,
    "perf/tokens_per_second": 4930.0,
    "perf/trainer_idle_fraction": 0.31,
    "perf/engine_idle_fraction": 0.12,
    "time/step": 2.0,
    "time/generation": 1.2,
    "time/engine": 1.1,
    "time/training": 0.5,
    "time/publish": 0.2,
    "time/logprobs": 0.05,
    "time/transfer": 0.03,
    "time/advantages": 0.02,
    "time/from_scratch": 999.0,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_run_is_read_at_a_glance() -> None:
    clock = Clock()
    screen = Screen("addition", 400, clock=clock)
    assert dict(screen.lines()) == {
        "run": "addition  step 0/400 (0%)  0.00 s",
        "reward": "(after the first step)",
    }
    screen.log(0, {"eval/score": 0.4})
    for step in range(1, 41):
        screen.log(step, ROW | {"rollout/reward": 0.01 * step})
    screen.log(41, ROW | {"eval/score": 0.7, "eval/aime/score": 0.2})
    screen.log(42, ROW | {"eval/score": 0.6})
    screen.seconds_left = 1680
    screen.notices = ["the entropy has collapsed"]
    clock.now = 725
    assert screen.lines() == [
        ("run", "addition  step 42/400 (10%)  12m05s  28m00s left"),
        (
            "reward",
            "0.500  ▁▁▁▁▂▂▂▂▂▂▂▃▃▃▃▃▃▄▄▄▄▄▄▄▅▅▅▅▅▅▅▆▆▆▆▆▆▇██  +0.414 over 40"
            "  kl 0.00310  length 5.72  entropy 0.610",
        ),
        ("evaluation", "0.600 (step 42; best 0.700, step 41)  aime 0.200 (step 41)"),
        (
            "rollouts",
            "staleness 1.21 (most 3)  3 groups without variance  2 rewards failed"
            "  6 groups ready  12 groups in flight",
        ),
        ("speed", "4.93k tok/s  2.0 s/step  4 engines  trainer idle 31%  engine idle 12%"),
        ("time", "generation 60%  training 25%  publish 10%  logprobs 2%  transfer 2%  other 1%"),
        ("LOOKS WRONG", "the entropy has collapsed"),
    ]


def test_a_supervised_run_shows_its_loss() -> None:
    screen = Screen("sft", 10, bars=PLAIN_BARS)
    for step, loss in enumerate((3.0, 2.0, 1.0), 1):
        screen.log(step, {"loss/policy_avg": loss})
    assert dict(screen.lines())["loss"] == "1.00   #+_  -2.00 over 3"


def test_curves() -> None:
    assert sparkline([0.0, 1.0, 0.5], BARS) == "▁█▅"
    assert sparkline([2.0, 2.0], BARS) == "▁▁"
    assert sparkline([0.0, float("nan"), 1.0], PLAIN_BARS) == "_?#"
    assert sparkline([float("inf")], BARS) == "?"
    assert trend([1.0, 2.0]) is None
    assert trend([1.0, 2.0, 3.0]) == pytest.approx(2.0)
    assert trend([1.0, float("nan"), 3.0]) is None
