from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from rlcore.algorithms.metric_table import metric_spec
from rlcore.config.schema import known_keys
from rlcore.tracking.notice_rules import RULES, Rule
from rlcore.tracking.notices import Notice, Notices, read_notices

GOOD = {
    "rollout/reward": 0.4,
    "rollout/reward_std": 0.4,
    "rollout/rewarded_prompt_overlap": 0.25,
    "rollout/rewarded_truncated": 0.2,
    "rollout/commonest_response": 0.1,
    "objective/kl": 0.2,
    "val/sequence_lengths": 20.0,
    "val/stop_token_rate": 0.98,
    "policy/step_kl": 0.004,
    "policy/entropy_avg": 0.8,
    "rollout/zero_std_groups": 1.0,
    "rollout/train_rollout_logprob_diff": 0.01,
    "rollout/ess": 0.98,
    "rollout/scored_samples": 64.0,
    "rollout/reward_errors": 1.0,
    "rollout/engines_serving": 2.0,
    "perf/tokens_per_second": 4000.0,
    "train/grad_norm": 0.5,
    "train/optimizer_steps": 2.0,
    "train/updates_without_signal": 1.0,
}
BAD: dict[str, dict[str, float]] = {
    "the KL runs away": {"objective/kl": 1.2},
    "one step moves the policy far": {"policy/step_kl": 5.0},
    "the reward has collapsed": {"rollout/reward": 0.1, "val/stop_token_rate": 0.5},
    "the entropy has collapsed": {"policy/entropy_avg": 0.07},
    "no group has a variance": {"rollout/zero_std_groups": 4.0},
    "a step trained nothing": {"train/updates_without_signal": 2.0},
    "engines and trainer are apart": {"rollout/ess": 0.4},
    "most tokens are not trained on": {"correction/stale_fraction": 1.0},
    "the reward fails": {"rollout/reward_errors": 2.0, "rollout/reward_timeouts": 3.0},
    "a number is not finite": {"train/grad_norm": math.nan},
    "the run has become slow": {"perf/tokens_per_second": 1500.0},
    "an engine is out": {"rollout/engines_serving": 1.0},
    "rewarded responses repeat the prompt": {
        "rollout/reward": 0.7,
        "rollout/rewarded_prompt_overlap": 0.4,
    },
    "rewarded responses are cut off": {"rollout/reward": 0.7, "rollout/rewarded_truncated": 0.8},
    "one response answers all prompts": {"rollout/reward": 0.7, "rollout/commonest_response": 0.9},
    "rewarded responses grow": {"rollout/reward": 0.7, "val/sequence_lengths": 45.0},
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_names_keys_and_metrics_that_there_are(rule: Rule) -> None:
    sections = ("algorithm", "data", "policy", "reward", "rollout", "training")
    named = re.findall(rf"\b(?:{'|'.join(sections)})\.[\w.]*\w", rule.look_at)
    assert all(any(f"{key}.".startswith(f"{one}.") for key in known_keys()) for one in named), named
    metrics = re.findall(
        r"\b(?!rollouts/)[a-z]+/[a-z_]+\b", f"{rule.look_at} {' '.join(BAD[rule.name])}"
    )
    assert all(metric_spec(one) for one in metrics), metrics


def checked(path: Path, rows: list[dict[str, float]], **given: Any) -> tuple[Notices, list[Notice]]:
    notices = Notices(path, **given)
    return notices, [n for row in rows for n in notices.check(int(row["step"]), row)]


def rows_of(
    path: Path, rows: list[dict[str, float]], *, first: int = 1, groups: int = 4
) -> list[Notice]:
    numbered = [{"step": step, **row} for step, row in enumerate(rows, first)]
    return checked(path, numbered, groups=groups)[1]


def test_supervised_fine_tuning_is_there_to_lower_the_entropy(tmp_path: Path) -> None:
    falling = [GOOD | {"policy/entropy_avg": 3.5}] * 10 + [{"policy/entropy_avg": 0.01}] * 4
    for groups, said in ((4, ["the entropy has collapsed"]), (0, [])):
        found = rows_of(tmp_path / f"{groups}.jsonl", falling, groups=groups)
        assert [n.notice for n in found if "entropy" in n.notice] == said


def test_a_good_run_is_left_in_peace(tmp_path: Path) -> None:
    path = tmp_path / "notices.jsonl"
    assert rows_of(path, [{"eval/score": 0.1}, *[GOOD] * 40, {}], first=0) == []
    assert not path.exists()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_is_said_once_until_it_is_over(rule: Any, tmp_path: Path) -> None:
    bad = GOOD | BAD[rule.name]
    path = tmp_path / "notices.jsonl"
    calm = rule.calm or rule.patience
    long = calm + 30  # more rows than it compares with
    rows = [GOOD] * 8 + [bad] * long + [GOOD] * long
    found = rows_of(path, rows)
    assert [(n.notice, n.state) for n in found] == [(rule.name, "raised"), (rule.name, "cleared")]
    assert [n.step for n in found] == [8 + rule.patience, 8 + long + calm]
    raised = found[0]
    assert raised.text
    assert raised.look_at == rule.look_at.format(step=raised.step)
    assert str(raised).startswith(f"NOTICE of step {raised.step}: {rule.name}: ")
    assert rule.check.__doc__
    assert read_notices(path) == found


def test_a_task_whose_responses_are_always_cut_off_is_left_in_peace(tmp_path: Path) -> None:
    cut = GOOD | {"rollout/rewarded_truncated": 1.0}
    assert rows_of(tmp_path / "n", [cut] * 8 + [cut | {"rollout/reward": 0.7}] * 8) == []


def test_a_large_step_is_said_at_once_and_a_middling_one_the_second_time(tmp_path: Path) -> None:
    moves = [0.004, 0.3, 0.004, 0.3, 0.3, *[0.004] * 5, 1.2]
    found = rows_of(tmp_path / "n", [GOOD | {"policy/step_kl": moved} for moved in moves])
    assert [(n.step, n.state) for n in found] == [(5, "raised"), (10, "cleared"), (11, "raised")]
    assert {n.notice for n in found} == {"one step moves the policy far"}


COLLAPSE = {"policy/step_kl": 20.0}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        # a large step, and what it did to the responses: as recorded at a learning rate of 1e-2
        ([COLLAPSE], {"rollout/reward": 0.0, "policy/step_kl": 0.0}, "policy/step_kl was up to 20"),
        ([], {"val/stop_token_rate": 0.3}, "70% of the responses are cut off, where 2% were"),
        ([], {"policy/entropy_avg": 3.0}, "policy/entropy_avg is 3.00, where it was 0.800"),
        ([], {"policy/entropy_avg": 0.1}, "policy/entropy_avg is 0.100, where it was 0.800"),
        # prompts that are harder
        ([], {}, ""),
        # responses that grow, with a reward that holds
        ([], {"rollout/reward": 0.35, "val/stop_token_rate": 0.3}, ""),
        ([COLLAPSE], {"rollout/reward": 0.3}, ""),
    ],
)
@pytest.mark.parametrize("usual", [1, 3, 12])
def test_a_reward_has_collapsed_where_the_policy_shows_it(
    usual: int, before: list[dict[str, float]], after: dict[str, float], said: str, tmp_path: Path
) -> None:
    rows = [*[GOOD] * usual, *(GOOD | row for row in before)]
    rows += [GOOD | {"rollout/reward": 0.1} | after] * 30
    found = [n for n in rows_of(tmp_path / "n", rows) if n.notice == "the reward has collapsed"]
    assert [(n.step, n.state) for n in found] == [(len(rows) - 28, "raised")] * bool(said)
    assert all(f"to {rows[-1]['rollout/reward']:.3g}".rstrip("0") in n.text for n in found)
    assert all(said in n.text for n in found)


def test_a_reward_that_swings_has_not_collapsed(tmp_path: Path) -> None:
    """A few prompts a step: the mean moves by more than half a standard deviation, and comes back.

    In a steady run the same fall is a collapse.
    """
    for swing, said in ((0.25, False), (0.0, True)):
        rows = [
            GOOD | {"rollout/reward": 0.5 + swing * (-1) ** step, "policy/step_kl": 0.15}
            for step in range(12)
        ]
        rows += [GOOD | {"rollout/reward": 0.25}] * 2
        names = [n.notice for n in rows_of(tmp_path / f"{swing}", rows)]
        assert ("the reward has collapsed" in names) == said


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"correction/stale_fraction": 1.0}, "100% of the tokens are older than"),
        ({"correction/masked_fraction": 0.8}, "masks the policy loss of 80% of the tokens"),
        ({"correction/stale_fraction": 0.5, "correction/masked_fraction": 0.5}, ""),
    ],
)
def test_what_no_token_is_left_of_is_said(row: dict[str, float], said: str, tmp_path: Path) -> None:
    """Bounds that are too narrow mask a step, though engine and trainer hardly differ."""
    found = rows_of(tmp_path / "n", [GOOD | row] * 3)
    assert [said in notice.text for notice in found] == [True] * bool(said)


def test_what_is_bad_for_a_moment_is_not_said(tmp_path: Path) -> None:
    bad = GOOD | BAD["no group has a variance"]
    assert rows_of(tmp_path / "n", [GOOD, bad, GOOD, bad, GOOD]) == []


def test_a_drift_is_no_runaway(tmp_path: Path) -> None:
    """The KL of a healthy run grows, and its entropy falls, slowly."""
    rows = [
        GOOD | {"objective/kl": 0.01 * 1.05**step, "policy/entropy_avg": 0.97**step}
        for step in range(1, 120)
    ]
    assert rows_of(tmp_path / "n", rows) == []


def test_a_resumed_run_says_again_only_what_it_makes_again(tmp_path: Path) -> None:
    path = tmp_path / "notices.jsonl"
    bad = GOOD | BAD["an engine is out"]
    rows = [GOOD] * 6 + [bad] * 4
    first = rows_of(path, rows)
    assert [n.step for n in first] == [8]
    path.write_text(path.read_text() + '{"step": 10, "notice": "to')  # torn by a kill

    def resumed(after: int) -> list[Notice]:
        earlier = [{"step": at, **row} for at, row in enumerate(rows[:after], 1)]
        notices = Notices(path, groups=4, earlier=lambda: earlier)
        return [n for step in range(after + 1, 15) for n in notices.check(step, bad)]

    assert resumed(9) == [], "it was said, and is not over"
    assert [n.step for n in resumed(5)] == [7], "it is over with the steps that were undone"
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [7]


def test_a_run_without_groups_or_engines_has_nothing_to_say(tmp_path: Path) -> None:
    sft = {"loss/policy_avg": 2.0, "train/grad_norm": 1.0, "perf/tokens_per_second": 100.0}
    assert rows_of(tmp_path / "n", [sft] * 29, groups=0) == []


# --- rewards that are gamed -----------------------------------------------------------------------

GAMED = [rule.name for rule in RULES if rule.name.startswith(("rewarded", "one response"))]


@pytest.mark.parametrize("name", GAMED)
def test_without_a_rising_reward_nothing_is_gamed(name: str, tmp_path: Path) -> None:
    odd = {key: value for key, value in BAD[name].items() if key != "rollout/reward"}
    assert len(GAMED) == 4
    assert rows_of(tmp_path / "n", [GOOD] * 8 + [GOOD | odd] * 6) == []


@pytest.mark.parametrize("name", GAMED)
def test_a_gamed_reward_names_the_samples_to_look_at(name: str, tmp_path: Path) -> None:
    (found,) = rows_of(tmp_path / "n", [GOOD] * 8 + [GOOD | BAD[name]] * 2)
    assert found.notice == name
    assert "the reward has risen from 0.400 to 0.700" in found.text
    assert "samples of step 10 with the highest reward" in found.look_at
    assert "rollouts/step_000010.parquet" in found.look_at


def recorded(run: str) -> list[dict[str, float]]:
    path = Path(__file__).parent / "recorded" / f"{run}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_recorded_run_that_was_gamed_is_flagged_before_step_10(tmp_path: Path) -> None:
    """GRPO of a model of 135 M parameters on sums, with a grader that took 59+63 for 122."""
    rows = recorded("gamed")
    assert (rows[0]["rollout/reward"], rows[11]["rollout/reward"]) == (0.1406, 0.9219)
    notices, found = checked(tmp_path / "n", rows, groups=8)
    assert [(n.step, n.notice) for n in found] == [(8, "rewarded responses repeat the prompt")]
    assert notices.current == ["rewarded responses repeat the prompt"]


@pytest.mark.parametrize(("run", "groups"), [("honest", 8), ("quickstart", 32)])
def test_recorded_runs_that_learn_are_left_in_peace(run: str, groups: int, tmp_path: Path) -> None:
    """The same model and sums with a grader that takes the number alone; the quickstart."""
    rows = recorded(run)
    assert rows[-1]["rollout/reward"] > rows[0]["rollout/reward"] + 0.15
    assert checked(tmp_path / "n", rows, groups=groups)[1] == []


def test_a_recorded_collapse_is_said_within_two_steps_and_stays(tmp_path: Path) -> None:
    """The quickstart at a hundred times its learning rate: all rewards are 0 from step 2 on."""
    rows = recorded("collapsed")
    assert [row["rollout/reward"] for row in rows[:3]] == [0.3984, 0.0, 0.0]
    notices, found = checked(tmp_path / "n", rows, groups=32)
    assert [(n.step, n.notice) for n in found if n.state == "raised"][:2] == [
        (1, "one step moves the policy far"),
        (3, "the reward has collapsed"),
    ]
    assert "from 0.398 to 0, and policy/step_kl was up to 20.4" in found[1].text
    assert "the reward has collapsed" in notices.current, "20 steps later"


def test_a_resumed_run_remembers_what_a_collapse_fell_from(tmp_path: Path) -> None:
    rows = recorded("collapsed")
    for step in (2, 3, 12):
        path = tmp_path / f"{step}"
        checked(path, rows[:step], groups=32)
        checked(path, rows[step:], groups=32, earlier=lambda step=step: rows[:step])
        said = [(n.step, n.state) for n in read_notices(path) if "collapsed" in n.notice]
        assert said == [(3, "raised")]


def test_a_resumed_run_remembers_how_it_began(tmp_path: Path) -> None:
    rows = recorded("gamed")
    _, found = checked(tmp_path / "n", rows[6:], groups=8, earlier=lambda: rows[:6])
    assert [n.step for n in found] == [8]
