"""The greedy baseline: one more response to each prompt, of which only the reward is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from fake_engine import FakeEngine

from rlcore.data.batch import RolloutBatch
from rlcore.data.generation import Completion, GenerateRequest
from rlcore.data.sample import Sample
from rollout.collection.attempts import MAX_WITHOUT_TOKENS

GREEDY = {"greedy_baseline": True}


def is_greedy(request: GenerateRequest) -> bool:
    return request.sampling.temperature == 0.0


@pytest.fixture
def uneven(engine: FakeEngine) -> FakeEngine:
    """Greedy responses are right for even draws, sampled ones for even samples."""
    adds = engine.reply
    engine.reply = lambda request, sample: adds(
        request, request.draw % 2 if is_greedy(request) else sample
    )
    return engine


def addresses(samples: Sequence[Sample]) -> list[tuple[object, ...]]:
    return [
        (s.draw, s.index, s.prompt_id, s.tokens.tolist(), s.reward, s.baseline_reward)
        for s in samples
    ]


def test_every_sample_knows_the_reward_of_the_greedy_response(make_service, uneven):
    rollouts = make_service(options=GREEDY).next_step(1)
    assert [(s.draw, s.index) for s in rollouts.samples] == [
        (d, i) for d in range(4) for i in range(2)
    ]
    assert [s.baseline_reward for s in rollouts.samples] == [1.0, 1.0, 0.0, 0.0] * 2
    assert [s.reward for s in rollouts.samples] == [1.0, 0.0] * 4
    (call,) = uneven.calls
    assert [(r.draw, r.n, is_greedy(r)) for r in call] == [
        (d, n, n == 1) for d in range(4) for n in (2, 1)
    ]
    assert len({r.rid for r in call}) == 8, "engines tell requests apart by their address"
    assert {(r.sampling.max_new_tokens, r.sampling.top_p, r.sampling.top_k) for r in call} == {
        (8, 1.0, -1)
    }
    assert {r.sampling.stop_token_ids for r in call} == {(1,)}
    assert (
        RolloutBatch.from_samples(rollouts.samples).vectors["baseline_rewards"].tolist()
        == [1, 1, 0, 0] * 2
    )


def test_without_need_there_is_none(make_service, engine):
    rollouts = make_service().next_step(1)
    assert not any(is_greedy(request) for call in engine.calls for request in call)
    assert all(sample.baseline_reward is None for sample in rollouts.samples)
    assert "baseline_rewards" not in RolloutBatch.from_samples(rollouts.samples).vectors


def test_it_changes_nothing_else(make_service):
    """Samples, the input of filters and the accounting stay the same."""
    section = {"filters": ["user_parts:pairs"]}
    with_it = make_service(options=GREEDY, rollout=section)
    without = make_service(rollout=section)
    for step in (1, 2):
        one = with_it.next_step(step)
        two = without.next_step(step)
        assert [row[:-1] for row in addresses(one.samples)] == [
            row[:-1] for row in addresses(two.samples)
        ]
        assert one.snapshot == two.snapshot
        assert one.metrics.keys() == two.metrics.keys()
        assert one.metrics["rollout/dropped_pairs"] == one.metrics["rollout/reward_errors"] == 0.0


def test_a_workflow_of_several_turns_has_one_too(make_service, engine):
    """Its turns share the batches of the others; several samples count with their mean."""
    service = make_service(
        options=GREEDY, rollout={"prompts_per_step": 2, "workflow": "user_parts:TwoTries"}
    )
    assert [s.baseline_reward for s in service.next_step(1).samples] == [1.0, 1.0]
    expected = [[(d, t, greedy) for d in (0, 1) for greedy in (False, True)] for t in (0, 1)]
    assert [[(r.draw, r.turn, is_greedy(r)) for r in call] for call in engine.calls] == expected
    both = make_service(
        options=GREEDY, rollout={"prompts_per_step": 2, "workflow": "user_parts:BothTries"}
    )
    assert [s.baseline_reward for s in both.next_step(1).samples] == [0.5] * 4


@dataclass
class CutsOneGreedy(FakeEngine):
    """After its first token, and then at once, as often as anybody asks for the rest."""

    cut_draw: int | None = None
    cuts_left: int = 1 + MAX_WITHOUT_TOKENS

    def _complete(self, request: GenerateRequest, place: int, aborted: bool) -> Completion:
        if is_greedy(request) and self.cuts_left and self.cut_draw in (None, request.draw):
            self.cut_draw = request.draw
            self.cuts_left = self.cuts_left - 1
            aborted = True
        return super()._complete(request, place, aborted)


def test_a_group_whose_baseline_does_not_end_is_drawn_again(make_service, uneven):
    engine = CutsOneGreedy(uneven.reply)
    service = make_service(engines=[engine], options=GREEDY, rollout={"engine": {"kind": "sglang"}})
    rollouts = service.next_step(1)
    assert engine.cuts_left == 0
    assert rollouts.metrics["rollout/requeued_prompts"] == 1.0
    assert sum(is_greedy(r) for call in engine.calls for r in call) == 5 + MAX_WITHOUT_TOKENS
    assert sorted({s.draw for s in rollouts.samples}) == [0, 1, 2, 3]
    assert all(s.baseline_reward == (s.draw + 1) % 2 for s in rollouts.samples)


def test_a_reward_that_fails_on_it_gives_on_error_and_is_counted(make_service, uneven):
    reward = {
        "parts": {"f": {"function": "user_parts:right_or_fails"}},
        "on_error": -3.0,
        "workers": 1,
    }
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 1}
    rollouts = make_service(options=GREEDY, reward=reward, rollout=rollout).next_step(1)
    assert [(s.reward, s.baseline_reward) for s in rollouts.samples] == [(1.0, 1.0), (1.0, -3.0)]
    assert rollouts.metrics["rollout/reward_errors"] == 1.0


def test_a_resumed_service_has_the_same_baselines(make_service, uneven):
    service = make_service(options=GREEDY)
    steps = [service.next_step(step) for step in (1, 2, 3)]
    resumed = make_service(options=GREEDY)
    resumed.restore(json.loads(json.dumps(steps[0].snapshot)))
    assert [addresses(resumed.next_step(k).samples) for k in (2, 3)] == [
        addresses(step.samples) for step in steps[1:]
    ]


def test_evaluation_has_none(make_service, engine, tmp_path):
    service = make_service(
        options=GREEDY, evaluation={"paths": [str(tmp_path / "sums.jsonl")], "max_prompts": 3}
    )
    _, samples = service.evaluate()
    assert len(samples) == sum(len(call) for call in engine.calls) == 3
    assert all(sample.baseline_reward is None for sample in samples)


# --- process rewards ------------------------------------------------------------------------------


def test_a_workflow_may_reward_tokens(make_service):
    rollouts = make_service(rollout={"workflow": "user_parts:Processed"}).next_step(1)
    batch = RolloutBatch.from_samples(rollouts.samples)
    parts = batch.vectors["token_rewards"].split(batch.num_trainable_each)
    assert [set(part.tolist()) for part in parts] == [{0.5}, {0.0}] * (len(parts) // 2)
    again = [
        Sample.from_record(json.loads(json.dumps(sample.to_record())))
        for sample in rollouts.samples
    ]
    assert again[1].token_rewards is None
    assert (
        RolloutBatch.from_samples(again).vectors["token_rewards"].tolist()
        == batch.vectors["token_rewards"].tolist()
    )
