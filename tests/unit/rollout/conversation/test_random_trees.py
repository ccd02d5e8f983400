"""Trees: each token that the model wrote is trained once, or counted with the reason."""

from __future__ import annotations

import asyncio
import random
import string
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlcore.algorithms import conversation_metrics
from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.data.batch import RolloutBatch
from rlcore.data.generation import Completion, GenerateRequest
from rlcore.data.sample import Sample, VersionSpan
from rlcore.errors import RolloutFailed
from rollout.conversation.conversation import Conversation
from rollout.conversation.tree import Node, Tree

from .kit import STOP, ScriptedModel, ids, make_context, make_prompt, make_tokenizer

TOKENIZER = make_tokenizer()
REASONS = ("superseded", "lost")
DROPPED = "conversation/untrained_"


@dataclass
class Turn:
    """What the engine was asked, and wrote."""

    request: GenerateRequest
    completion: Completion
    text: str
    left_out: str = ""
    reward: float | None = None


@dataclass
class Engine:
    """Writes up to five tokens, when it pleases; their log-probs are numbers of their own."""

    choose: random.Random
    aborts: bool
    max_tokens: int | None
    context: int
    turns: dict[int, Turn] = field(default_factory=dict)
    begun: int = 0
    written: int = 0

    async def __call__(self, request: GenerateRequest) -> list[Completion]:
        self.begun += 1
        size = request.sampling.max_new_tokens
        assert len(request.prompt) + size <= self.context
        assert self.max_tokens is None or self.written + size <= self.max_tokens
        await self.pause()
        # begins with a letter of its own, so that the tokens alone tell what goes on from what
        text = string.ascii_letters[request.turn] + "abcde"[: self.choose.randint(0, 5)]
        whole = ids(TOKENIZER, text + STOP)
        tokens = whole[:size]
        reason: Any = "stop" if len(tokens) == len(whole) else "length"
        if self.aborts and self.choose.random() < 0.2:
            tokens = tokens[: self.choose.randint(0, len(tokens))]
            reason = "abort"
        numbers = np.arange(self.written, self.written + len(tokens), dtype=np.float32)
        self.written += len(tokens)
        made = Completion(tokens, -numbers, reason, (VersionSpan(request.turn, 0, len(tokens)),))
        assert request.turn not in self.turns
        self.turns[request.turn] = Turn(request, made, text[: len(tokens)])
        return [made]

    async def pause(self) -> None:
        for _ in range(self.choose.randint(0, 3)):
            await asyncio.sleep(0)


@dataclass
class Rollout:
    """A tree that was grown at random, and what its engine and its budgets say of it."""

    engine: Engine
    root: Conversation
    samples: list[Sample]
    max_turns: int | None

    @property
    def kept(self) -> list[Turn]:
        return [turn for turn in self.engine.turns.values() if not turn.left_out]

    @property
    def ends(self) -> int:
        """Turns that no other one was asked behind."""
        turns = self.engine.turns.values()
        paths = [[*t.request.prompt.tolist(), *t.completion.tokens.tolist()] for t in turns]
        asked = [t.request.prompt.tolist() for t in turns]
        return sum(not any(prompt[: len(p)] == p for prompt in asked) for p in paths)

    def size(self, left_out: str) -> int:
        turns = self.engine.turns.values()
        return sum(len(t.completion.tokens) for t in turns if t.left_out == left_out)


class Grower:
    """Chooses what happens next to a branch."""

    def __init__(self, choose: random.Random, draw: int) -> None:
        self.choose = choose
        self.max_turns = choose.choice((None, None, 3, 9))
        max_tokens = choose.choice((None, None, 12, 30))
        context = choose.choice((10_000, 150))
        self.engine = Engine(choose, choose.random() < 0.2, max_tokens, context)
        limits = {"max_tokens": max_tokens, "max_turns": self.max_turns}
        self.root = make_context(
            TOKENIZER, max_new_tokens=5, context=context,
            settings=WorkflowConfig.model_validate(limits),
        ).conversation(make_prompt(TOKENIZER, "1+2?"), draw, 1, self.engine)  # fmt: skip
        self.all = [self.root]

    async def grow(self) -> Rollout:
        await self.answer(self.root)
        for _ in range(self.choose.randint(0, 16)):
            act = self.choose.choice((self.go_on, self.go_on, self.side_by_side, self.split))
            await act(self.choose.choice(self.all))
        samples = []
        with suppress(RolloutFailed):  # where no turn is kept; that is asserted of all
            samples = self.root.samples(1.0)
        return Rollout(self.engine, self.root, samples, self.max_turns)

    async def answer(self, branch: Conversation) -> None:
        """A turn of the model, unless a budget is spent; it may be rewarded, and left out."""
        begun = self.engine.begun
        limit = self.choose.choice((None, None, 2))
        reply = await branch.generate(limit)
        if branch.completion is None:
            assert reply.finish_reason in ("length", "context", "turns")
            assert reply.raw == ""
            return
        assert self.engine.begun > begun
        turn = next(t for t in self.engine.turns.values() if t.completion is branch.completion)
        if self.choose.random() < 0.3:
            turn.reward = self.choose.choice((0.25, -1.0, 2.0))
            branch.reward(turn.reward)
        if self.choose.random() < 0.25:
            turn.left_out = self.choose.choice(REASONS)
            branch.discard(turn.left_out)

    async def go_on(self, branch: Conversation) -> None:
        if branch.completion is not None:
            await branch.append([{"role": "user", "content": self.choose.choice("xyz")}])
        if self.choose.random() < 0.8:
            await self.answer(branch)

    async def side_by_side(self, branch: Conversation) -> None:
        """Several at once: of other branches, and of one that is gone on from twice."""
        waiting = [b for b in self.all if b.completion is None][:2]
        if branch.completion is None:
            self.all.append(branch.fork())
            waiting = [*{*waiting, branch, self.all[-1]}]
        await asyncio.gather(*(self.answer(b) for b in waiting))

    async def split(self, branch: Conversation) -> None:
        kind = self.choose.choice(("fork", "compact", "quote"))
        if kind == "fork":
            self.all.append(branch.fork())
        else:  # rendered anew, with turns of the model as context
            quoted = branch.messages if kind == "quote" else []
            self.all.append(branch.fork([*quoted, {"role": "user", "content": "in short"}]))


def grow(seed: int, draw: int) -> Rollout:
    return asyncio.run(Grower(random.Random(f"{seed}-{draw}"), draw).grow())


def check_samples(rollout: Rollout) -> None:
    """Each turn that is not left out is trained in one sample, behind what the model was sent."""
    turns = rollout.engine.turns
    spans = [span.turn for sample in rollout.samples for span in sample.turn_spans]
    kept = [number for number, turn in turns.items() if not turn.left_out]
    assert sorted(spans) == sorted(kept)
    for sample in rollout.samples:
        assert sample.outcome == {"reward": 1.0}
        places = np.flatnonzero(sample.loss_mask)
        assert sample.turn_ids().tolist() == sample.token_versions().tolist()
        rewards = np.zeros(sample.num_trainable, dtype=np.float32)
        for span in sample.turn_spans:
            turn = turns[span.turn]
            size = span.end - span.start
            made = turn.completion
            assert sample.rollout_logprobs[span.start : span.end].tolist() == made.logprobs.tolist()
            message = (sample.messages or [])[span.message]
            assert (message["role"], message["content"]) == ("assistant", turn.text)
            if size:
                start = int(places[span.start])
                assert sample.tokens[:start].tolist() == turn.request.prompt.tolist()
                assert sample.tokens[start : start + size].tolist() == made.tokens.tolist()
                assert places[span.start : span.end].tolist() == [*range(start, start + size)]
                rewards[span.end - 1] = turn.reward or 0.0
        given = np.zeros_like(rewards) if sample.token_rewards is None else sample.token_rewards
        assert given.tolist() == rewards.tolist()
    aborted = any(turn.completion.finish_reason == "abort" for turn in turns.values())
    assert {sample.finish_reason == "abort" for sample in rollout.samples} <= {aborted}


@settings(max_examples=80, deadline=None, phases=[Phase.generate])  # a smaller seed is no simpler
@given(seed=st.integers(0, 2**32))
def test_every_token_is_trained_once_or_counted_with_the_reason(seed: int) -> None:
    """In the samples, in what each rollout measured, and in the metrics of the whole batch."""
    rollouts = [grow(seed, draw) for draw in range(3)]
    for rollout in rollouts:
        engine = rollout.engine
        assert rollout.max_turns is None or engine.begun <= rollout.max_turns
        if all(len(turn.completion.tokens) for turn in engine.turns.values()):
            assert rollout.root.branches == max(0, rollout.ends - 1)
        # one without samples is a failed rollout
        assert bool(rollout.samples) == bool(rollout.kept)
        check_samples(rollout)
        trained = [-x for sample in rollout.samples for x in sample.rollout_logprobs.tolist()]
        left_out = {
            -x
            for turn in engine.turns.values()
            if turn.left_out
            for x in turn.completion.logprobs.tolist()
        }
        assert sorted(trained) == sorted({*map(float, range(engine.written))} - left_out)
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    counted = [rollout for rollout in rollouts if rollout.samples]
    metrics = conversation_metrics([sample.measured for sample in samples])
    if not counted:
        assert metrics == {}
        return
    expected: Counter[str] = Counter()
    for rollout in counted:
        expected["generated_tokens"] += rollout.engine.written
        expected["trained_tokens"] += rollout.size("")
        expected["turns"] += len(rollout.engine.turns)
        expected["branches"] += rollout.root.branches
        for reason in {turn.left_out for turn in rollout.engine.turns.values()} - {""}:
            expected[f"untrained_{reason}"] += rollout.size(reason)
    for name, total in expected.items():
        assert metrics[f"conversation/{name}"] == pytest.approx(total / len(counted)), name
    untrained = {name: value for name, value in metrics.items() if name.startswith(DROPPED)}
    assert {*untrained} <= {f"conversation/{name}" for name in expected}
    assert metrics["conversation/generated_tokens"] == pytest.approx(
        metrics["conversation/trained_tokens"] + sum(untrained.values())
    )
    batch = RolloutBatch.from_samples(samples)
    assert batch.num_trainable == expected["trained_tokens"]
    assert batch.num_rollouts == len(counted)
    if expected["generated_tokens"]:
        share = batch.num_trainable / expected["generated_tokens"]
        assert metrics["conversation/merge_ratio"] == pytest.approx(share)


USER = {"role": "user", "content": "1+2?"}
SAID = {"role": "assistant", "content": "a"}


def tokens(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def made(*ids: int) -> Completion:
    size = len(ids)
    return Completion(tokens(*ids), np.zeros(size, np.float32), "stop", (VersionSpan(0, 0, size),))


def two_turns() -> tuple[Tree, Node, Node]:
    """A user's 1 2, the model's 3, a user's 4, the model's 5; and a branch with 6 for the 5."""
    tree = Tree()
    root = tree.context(None, tokens(1, 2), [USER])
    first = tree.turn(root, 0, made(3), SAID)
    between = tree.context(first, tokens(4), [USER])
    tree.turn(between, 1, made(6), SAID)
    return tree, first, tree.turn(between, 2, made(5), SAID)


def test_the_last_turn_that_the_tokens_begin_with_is_found() -> None:
    tree, first, second = two_turns()
    assert tree.last_turn_in(tokens(1, 2, 3, 4, 5, 7), 5) is second
    assert tree.last_turn_in(tokens(1, 2, 3, 4, 9, 7), 5) is first
    assert tree.last_turn_in(tokens(1, 2, 3, 9), 3) is first


def test_what_is_no_turn_or_nothing_new_is_not_gone_on_from() -> None:
    tree, first, _ = two_turns()
    assert tree.last_turn_in(tokens(1, 2, 9), 2) is None  # the context alone
    assert tree.last_turn_in(tokens(1, 2, 3), 3) is None  # nothing behind it
    assert tree.last_turn_in(tokens(1, 2, 3, 4, 5), 5) is first
    # the same tokens in fewer messages: nothing is left to stand behind the turn
    assert tree.last_turn_in(tokens(1, 2, 3, 4, 5, 7), 4) is first
    assert tree.last_turn_in(tokens(1, 2, 3, 9), 2) is None


async def test_its_sample_has_each_message_and_turn_once() -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, lambda *_: "a")

    conversation = make_context(tokenizer).conversation(make_prompt(tokenizer, "1+2?"), 0, 0, model)
    await conversation.generate()
    quoted = conversation.fork([USER, SAID, {"role": "user", "content": "on"}])
    await quoted.generate()
    (sample,) = conversation.samples()
    assert conversation.branches == 0
    assert [m["content"] for m in sample.messages or ()] == ["1+2?", "a", "on", "a"]
    assert [(span.turn, span.message) for span in sample.turn_spans] == [(0, 1), (1, 3)]
    assert sample.tokens[: len(model.requests[1].prompt)].tolist() == (
        model.requests[1].prompt.tolist()
    )
