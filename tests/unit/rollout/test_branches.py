"""Rollouts that come as several samples: scored once, numbered apart, each a call of an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import FakeEngine

from rlcore.data.generation import Generate, GenerateRequest
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rlcore.launch.commands.init_model import ALPHABETS, char_tokenizer
from rollout.collection.group_runner import training_runner
from rollout.service import RolloutService
from rollout.workflows.context import WorkflowContext

TOKENIZER = char_tokenizer(ALPHABETS["addition"])
HERE = __name__


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


class Branches:
    """Answers, and then tries two more answers behind it."""

    def __init__(self, context: WorkflowContext, *, outcome: Any = 1.0) -> None:
        self.context = context
        self.outcome = outcome

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        first = self.context.conversation(prompt, draw, index, generate)
        await first.generate()
        second = first.fork()
        for branch, word in ((first, "x"), (second, "y")):
            branch.append_tokens(ids(word))
            await branch.generate()
        return first.samples(self.outcome)


def digits(request: GenerateRequest, sample: int) -> list[int]:
    return [*ids(str(request.turn)), TOKENIZER.eos_token_id]


def branching(make_service: Any, **sections: Any) -> RolloutService:
    workflow = {"name": f"{HERE}:Branches", **sections.pop("workflow", {})}
    service: RolloutService = make_service(
        engines=[FakeEngine(digits)],
        rollout={"workflow": workflow, "prompts_per_step": 20},
        **sections,
    )
    return service


def test_each_rollout_is_scored_once_by_its_last_sample(make_service: Any) -> None:
    reward = {"parts": {"env": {"source": "workflow"}, "same": {"function": "exact_match"}}}
    samples = branching(make_service, reward=reward).next_step(1).samples
    assert len(samples) == 20 * 2 * 2
    by_rollout: dict[int, list[Sample]] = {}
    for sample in samples:
        by_rollout.setdefault(sample.rollout_id, []).append(sample)
    assert {len(branches) for branches in by_rollout.values()} == {2}
    for first, last in by_rollout.values():
        assert (first.response_text, last.response_text) == ("1", "2")
        right = last.label == "2"  # the first branch alone would be right where the label is 1
        for sample in (first, last):
            assert sample.reward == 1.0 + right
            assert sample.reward_parts == {"env": 1.0, "same": float(right)}
            assert sample.metadata["correct"] is right
    assert {"1", "2"} <= {sample.label for sample in samples}


def test_samples_of_a_draw_are_numbered_apart(make_service: Any) -> None:
    reward = {"parts": {"env": {"source": "workflow"}}}
    samples = branching(make_service, reward=reward).next_step(1).samples
    assert len({sample.sequence_id for sample in samples}) == len(samples)
    for draw in {sample.draw for sample in samples}:
        assert [s.index for s in samples if s.draw == draw] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("outcome", "reward", "correct", "error"),
    [
        ({"env": 0.5, "reward": 9.0}, 0.5, None, ""),
        ({"reward": 0.25, "correct": 1.0}, 0.25, True, ""),
        ({"other": 1.0}, 0.0, None, "the workflow gave no reward 'env' (it gave: other)"),
        (None, 0.0, None, "the workflow gave no reward 'env' (it gave: none)"),
    ],
)
def test_the_reward_of_a_workflow(
    make_service: Any, outcome: Any, reward: float, correct: bool | None, error: str
) -> None:
    parts = {"parts": {"env": {"source": "workflow"}}}
    service = branching(make_service, workflow={"outcome": outcome}, reward=parts)
    if error:
        with pytest.raises(Exception, match="40 of 40 rewards failed") as caught:
            service.next_step(1)
        assert error in str(caught.value)
        return
    for sample in service.next_step(1).samples:
        assert (sample.reward, sample.metadata.get("correct")) == (reward, correct)


def test_a_penalty_takes_every_end_that_is_no_answer(make_service: Any) -> None:
    reward = {"parts": {"env": {"source": "workflow"}}, "non_stop_penalty": -3.0}
    stopped = branching(make_service, reward=reward).next_step(1).samples
    assert {sample.reward for sample in stopped} == {1.0}
    service = branching(make_service, workflow={"max_turns": 1}, reward=reward)
    samples = service.next_step(1).samples
    assert {sample.finish_reason for sample in samples} == {"turns"}
    assert {sample.reward for sample in samples} == {-3.0}


def test_a_group_takes_a_call_for_each_of_its_rollouts(make_service: Any, make_config: Any) -> None:
    service = branching(make_service, reward={"parts": {"env": {"source": "workflow"}}})
    for workflow, calls in ((f"{HERE}:Branches", 2), ("single_turn", 1)):
        config = make_config(rollout={"workflow": workflow})
        runner = training_runner(
            config, TOKENIZER, service._dispatcher, service._scorer, greedy_baseline=False
        )
        runner.batched = False
        assert runner.room(2) == service._dispatcher.free_calls // calls


def test_a_group_with_more_calls_than_engines_have_places_begins_when_all_are_free(
    make_service: Any, make_config: Any
) -> None:
    reward = {"parts": {"env": {"source": "workflow"}}}
    service = branching(make_service, reward=reward)
    config = make_config(rollout={"workflow": f"{HERE}:Branches"})
    dispatcher = service._dispatcher
    runner = training_runner(config, TOKENIZER, dispatcher, service._scorer, greedy_baseline=False)
    runner.batched = False
    dispatcher.config = dispatcher.config.model_copy(update={"max_in_flight": 1})
    assert runner.room(2) == 1
    dispatcher.config = dispatcher.config.model_copy(update={"max_in_flight": 3})
    assert runner.room(2) == 1
    lease = dispatcher.fleet.router._give(dispatcher.fleet.members[0], ())
    assert runner.room(2) == 1
    dispatcher.config = dispatcher.config.model_copy(update={"max_in_flight": 1})
    assert runner.room(2) == 0
    dispatcher.fleet.router.release(lease)
    dispatcher.fleet.draining(dispatcher.fleet.members[0].engine)
    assert runner.room(2) == 0, "none serves"


def test_the_greedy_baseline_of_a_conversation_keeps_its_reward_for_itself(
    make_service: Any,
) -> None:
    """Its only rollout has the number of the first one that is trained on."""
    reward = {"parts": {"env": {"source": "workflow"}}}
    workflow = {"name": f"{HERE}:Graded"}
    service = make_service(
        engines=[FakeEngine(digits)],
        options={"greedy_baseline": True},
        rollout={"workflow": workflow, "prompts_per_step": 2},
        reward=reward,
    )
    samples = service.next_step(1).samples
    assert [(s.index, s.reward, s.baseline_reward) for s in samples] == [
        (0, 1.0, 0.25), (1, 2.0, 0.25),
    ] * 2  # fmt: skip


class Graded(Branches):
    """One turn, with a reward by the rollout's number; a quarter for the greedy one."""

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        conversation = self.context.conversation(prompt, draw, index, generate)
        await conversation.generate()
        greedy = self.context.sampling.temperature == 0.0
        return conversation.samples(0.25 if greedy else 1.0 + index)


def test_a_penalty_of_length_sees_all_samples_of_a_rollout(make_service: Any) -> None:
    """Each branch makes two tokens, behind the two that they share."""
    parts = {
        "env": {"source": "workflow"},
        "long": {"function": "overlong", "args": {"buffer": 4, "max_tokens": 8}},
    }
    samples = branching(make_service, reward={"parts": parts}).next_step(1).samples
    assert {sample.num_trainable for sample in samples} == {4, 2}
    assert {sample.reward_parts["long"] for sample in samples} == {-0.5}
    measured = [sample.measured for sample in samples if sample.measured]
    assert len(measured) == len(samples) / 2, "it counts once"


def test_a_column_that_is_called_like_a_verdict_is_none_in_any_sample(
    make_service: Any, tmp_path: Any
) -> None:
    rows = [{"prompt": "1+2=", "label": "3", "correct": "column", "reward_info": "column"}]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    service = branching(
        make_service,
        reward={"parts": {"env": {"source": "workflow"}}},
        data={"paths": [str(tmp_path / "more.jsonl")]},
    )
    for sample in service.next_step(1).samples:
        assert not {"correct", "reward_info"} & set(sample.metadata)


def test_a_conversation_ends_where_a_server_takes_no_longer_prompt(
    make_service: Any, make_config: Any, tmp_path: Any
) -> None:
    """SGLang's longest prompt is five tokens shorter than prompt and answer may be together."""
    model = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 100}
    service = branching(make_service, reward={"parts": {"env": {"source": "workflow"}}})
    [member] = service.fleet.members
    for kind, most, of_pool in (("sglang", 94, 46), ("embedded", 100, 50)):
        config = make_config(rollout={"workflow": f"{HERE}:Branches", "engine": {"kind": kind}})
        (tmp_path / "config.json").write_text(json.dumps(model))
        scorer = service._scorer
        runner = training_runner(
            config, TOKENIZER, service._dispatcher, scorer, greedy_baseline=False
        )
        context = runner.workflow.context
        member.engine.max_total_tokens = None
        assert context.max_total_tokens == most
        member.engine.max_total_tokens = 50
        assert context.max_total_tokens == of_pool
