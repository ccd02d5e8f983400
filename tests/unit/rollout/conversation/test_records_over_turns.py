"""What engines record, over turns: versions, sampling masks, experts, also of a turn that a
publication cut in two.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlcore.algorithms import stale_tokens
from rlcore.data.batch import RolloutBatch
from rlcore.data.generation import Completion, GenerateRequest
from rlcore.data.sample import Sample, SamplingMasks, VersionSpan
from rlcore.runs.rollouts import write_rollouts
from rlcore.trainer.sources import ReplaySource
from rollout.collection.attempts import PartialRollouts

from .kit import (
    STOP,
    ScriptedModel,
    converse,
    go_on,
    ids,
    make_context,
    make_prompt,
    make_tokenizer,
)

TEXTS = ("first", "second", "third")
CUT_TURN, CUT_AT = 1, 3


class PublishingEngine:
    """Writes TEXTS turn by turn; a publication aborts the second turn after three tokens.

    Pass i is made by version i, and its experts are all i: those of each token that it was fed.
    """

    def __init__(self, scripted: ScriptedModel) -> None:
        self.scripted = scripted
        self.passes: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest) -> list[Completion]:
        number = len(self.passes)
        self.passes.append(request)
        (whole,) = await self.scripted(replace(request, prefixes=()))
        begun = len(request.made(0))
        cut = request.turn == CUT_TURN and not request.prefixes
        end = CUT_AT if cut else len(whole.tokens)
        tokens = whole.tokens[begun:end]
        fed = len(request.prompt) + end - 1
        return [
            Completion(
                tokens,
                whole.logprobs[begun:end],
                "abort" if cut else whole.finish_reason,
                (VersionSpan(number, 0, len(tokens)),),
                SamplingMasks(tokens, np.ones(len(tokens), np.int32)),
                np.full((fed, 2, 1), number, np.int16),
                cached_tokens=0,
            )
        ]


def talk() -> tuple[Sample, PublishingEngine]:
    tokenizer = make_tokenizer()
    engine = PublishingEngine(ScriptedModel(tokenizer, lambda _, request: TEXTS[request.turn]))
    partial = PartialRollouts(tokenizer)

    async def generate(request: GenerateRequest) -> list[Completion]:
        return await partial.whole(engine, request)

    conversation = make_context(tokenizer).conversation(
        make_prompt(tokenizer, "1+2?"), 3, 1, generate
    )
    (sample,) = asyncio.run(converse(conversation, "x", "x")).samples(1.0)
    return sample, engine


def lengths() -> list[int]:
    tokenizer = make_tokenizer()
    return [len(ids(tokenizer, text + STOP)) for text in TEXTS]


def test_a_publication_in_the_middle_of_a_turn_parts_its_versions_alone() -> None:
    sample, engine = talk()
    a, b, c = lengths()
    assert [request.turn for request in engine.passes] == [0, 1, 1, 2]
    text = make_tokenizer().decode(sample.tokens[sample.loss_mask == 1].tolist())
    assert text == STOP.join([*TEXTS, ""])
    assert sample.token_versions().tolist() == [0] * a + [1] * CUT_AT + [2] * (b - CUT_AT) + [3] * c
    assert [(s.turn, s.start, s.end) for s in sample.turn_spans] == [
        (0, 0, a),
        (1, a, a + b),
        (2, a + b, a + b + c),
    ]
    batch = RolloutBatch.from_samples([sample])
    assert batch.versions is not None
    old = stale_tokens(batch.versions.each(), 4, 2)
    assert old.tolist() == [True] * (a + CUT_AT) + [False] * (b - CUT_AT + c)


def test_masks_stand_at_trained_tokens_and_experts_at_all_that_were_fed() -> None:
    sample, engine = talk()
    trained = sample.tokens[sample.loss_mask == 1]
    assert sample.sampling_mask is not None
    assert sample.sampling_mask.tokens.tolist() == trained.tolist()
    assert sample.routed_experts is not None
    # a token has the experts of the first pass that was fed it; the last was never fed
    ends = [len(engine.passes[0].prompt) + lengths()[0] - 1]
    ends.append(len(engine.passes[1].prompt) + CUT_AT - 1)
    ends.append(len(engine.passes[2].prompt) + lengths()[1] - 1)
    ends.append(len(sample.tokens) - 1)
    expected = np.repeat(np.arange(4), np.diff([0, *ends]))
    assert sample.routed_experts[:, 0, 0].tolist() == expected.tolist()
    batch = RolloutBatch.from_samples([sample])
    assert batch.routed_experts is not None
    assert batch.routed_experts[:, 0, 0].tolist() == [*expected.tolist(), -1]
    assert batch.sampling_mask is not None
    assert batch.sampling_mask.offsets.tolist() == list(range(len(trained) + 1))


async def test_a_shared_turn_keeps_the_experts_that_it_was_made_with() -> None:
    tokenizer = make_tokenizer()
    engine = PublishingEngine(ScriptedModel(tokenizer, lambda *_: "word"))

    context = make_context(tokenizer)
    conversation = context.conversation(make_prompt(tokenizer, "1+2?"), 3, 1, engine)
    await converse(conversation)
    fork = conversation.fork()
    for branch in (conversation, fork):
        await go_on(branch, "x")
    _, second = conversation.samples()
    first_fed = len(engine.passes[0].prompt) + len("word")
    assert second.routed_experts is not None
    expected = [0] * first_fed + [2] * (len(second.tokens) - 1 - first_fed)
    assert second.routed_experts[:, 0, 0].tolist() == expected


def test_a_recorded_conversation_is_replayed_as_it_was(tmp_path: Path) -> None:
    sample, _ = talk()
    path = tmp_path / "step_000001.parquet"
    write_rollouts(path, 1, [sample], version=4)
    recorded = {"sampling_mask": "policy.logprobs.keep_sets"}
    (again,) = ReplaySource(path, vocab_size=1000, recorded=recorded).next_step(1).samples
    for name in ("messages", "turn_spans", "outcome", "measured", "versions", "turns"):
        assert getattr(again, name) == getattr(sample, name)
    assert again.turn_ids().tolist() == sample.turn_ids().tolist()
    assert np.array_equal(again.tokens, sample.tokens)
    assert np.array_equal(again.routed_experts, sample.routed_experts)
