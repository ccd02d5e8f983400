"""What a conversation sends, and what its samples hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.data.generation import Completion, GenerateRequest
from rlcore.data.prompts import Prompt
from rlcore.data.sample import SamplingMasks
from rlcore.errors import ConfigError, RolloutFailed, RunFailed
from rollout.conversation.chat_template import ChatTemplate
from rollout.conversation.conversation import Conversation

from .kit import (
    DROPS_THOUGHTS,
    STOP,
    TEMPLATE,
    ScriptedModel,
    by_turn,
    converse,
    go_on,
    ids,
    make_context,
    make_prompt,
    make_tokenizer,
    user,
)

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def begin(
    model: ScriptedModel,
    settings: dict[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] = (),
    **given: Any,
) -> Conversation:
    context = make_context(
        model.tokenizer, settings=WorkflowConfig.model_validate(settings or {}), **given
    )
    prompt = make_prompt(model.tokenizer, "1+2?")
    return context.conversation(prompt, 3, 1, model, tools=tools)


async def test_tokens_are_those_of_full_rendering() -> None:
    """The last request holds what the template makes of all messages, as the model wrote them."""
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, by_turn(CALL, "It is 3."))
    conversation = begin(model, tools=TOOLS)
    reply = await conversation.generate()
    assert [(c.name, c.arguments) for c in reply.calls] == [("add", {"a": 1, "b": 2})]
    await conversation.append([{"role": "tool", "tool_call_id": reply.calls[0].id, "content": "3"}])
    assert (await conversation.generate()).text == "It is 3."
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    rendered = tokenizer.apply_chat_template(conversation.messages, tools=TOOLS, tokenize=False)
    (sample,) = conversation.samples(1.0)
    assert tokenizer.decode(sample.tokens.tolist()) == rendered.removesuffix("\n")
    trained = sample.tokens[sample.loss_mask == 1]
    assert tokenizer.decode(trained.tolist()) == CALL + STOP + "It is 3." + STOP
    assert sample.rollout_logprobs.tolist() == (-np.arange(len(trained))).tolist()
    assert [(s.turn, s.message, s.start, s.end) for s in sample.turn_spans] == [
        (0, 1, 0, len(CALL) + 1),
        (1, 3, len(CALL) + 1, len(trained)),
    ]
    assert [(s.version, s.end - s.start) for s in sample.versions] == [(0, len(CALL) + 1), (1, 9)]
    assert sample.turn_ids().tolist() == [0] * (len(CALL) + 1) + [1] * 9
    assert (sample.outcome, sample.turns, sample.rollout_id) == ({"reward": 1.0}, 2, (3 << 20) + 1)
    again = type(sample).from_record(sample.to_record())
    assert (again.turn_spans, again.messages, again.outcome) == (
        sample.turn_spans,
        sample.messages,
        sample.outcome,
    )


def test_requests_grow_by_suffixes_and_have_addresses_of_their_own() -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, by_turn("a", "b", "c"))
    asyncio.run(converse(begin(model), "go on", "and on"))
    assert [r.rid for r in model.requests] == ["5-3-1-0", "5-3-1-1", "5-3-1-2"]
    first, second, third = (r.prompt for r in model.requests)
    assert np.array_equal(second[: len(first)], first)
    assert np.array_equal(third[: len(second)], second)
    assert tokenizer.decode(second[len(first) :].tolist()) == (
        f"a{STOP}\n<|im_start|>user\ngo on{STOP}\n<|im_start|>assistant\n"
    )


def test_a_turn_that_was_cut_is_ended_in_the_context() -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, by_turn("abcdefgh", "x"))
    (sample,) = asyncio.run(converse(begin(model, max_new_tokens=4), "shorter")).samples()
    assert tokenizer.decode(sample.tokens[sample.loss_mask == 1].tolist()) == f"abcdx{STOP}"
    assert f"abcd{STOP}\n<|im_start|>user" in tokenizer.decode(sample.tokens.tolist())


@pytest.mark.parametrize(
    ("settings", "given", "reason", "made"),
    [
        ({}, {"context": 40}, "context", 40),
        ({"max_tokens": 10}, {}, "length", 10),
        ({"max_turns": 2}, {}, "turns", 12),
    ],
)
async def test_budgets(
    settings: dict[str, Any], given: dict[str, int], reason: str, made: int
) -> None:
    """The engine's context, tokens of the rollout, and turns; no request goes beyond them."""
    model = ScriptedModel(make_tokenizer(), lambda *_: "hello")
    conversation = begin(model, settings, max_new_tokens=6, **given)
    for _ in range(9):  # a budget that nobody counts would have no end
        reply = await conversation.generate()
        if reply.finish_reason != "stop":
            break
        assert reply.tokens_left == conversation.tokens_left
        await conversation.append(user("x"))
    assert reply.finish_reason == reason
    assert reply.tokens_left == 0
    (sample,) = conversation.samples()
    assert sample.finish_reason == reason
    if reason == "context":
        assert len(sample.tokens) <= made
    else:
        assert sample.num_trainable == made


async def test_engines_may_have_room_for_less_than_the_models_context() -> None:
    """Where their memory holds fewer tokens; it is known once they run."""
    model = ScriptedModel(make_tokenizer(), lambda *_: "hello")
    told: list[int | None] = [None]

    conversation = begin(model, context=60, served=lambda: told[0])
    assert (await conversation.generate()).finish_reason == "stop"
    left = conversation.tokens_left
    told[0] = 80
    assert conversation.tokens_left == left, "the model has no more"
    told[0] = 60 - left + 4
    assert conversation.tokens_left == 4
    await conversation.append(user("x" * 9))
    assert (await conversation.generate()).finish_reason == "context"
    (sample,) = conversation.samples()
    assert sample.finish_reason == "context"
    assert len(model.requests) == 1


@pytest.mark.parametrize(
    ("context", "asks", "why"),
    [
        (8, True, r"\d+ tokens of messages and tools leave no room in 8"),
        (1000, False, "the model was never asked"),
    ],
)
def test_a_rollout_without_a_turn_says_why(context: int, asks: bool, why: str) -> None:
    model = ScriptedModel(make_tokenizer(), lambda *_: "hello")
    conversation = begin(model, context=context)
    asyncio.run(conversation.append(user("x" * 30)))
    if asks:
        assert asyncio.run(conversation.generate()).finish_reason == "context"
    with pytest.raises(RolloutFailed, match=f"no turn of the model to train on: {why}"):
        conversation.samples()


def test_a_turn_may_lower_its_limit_and_add_stops() -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, lambda *_: "hello")
    context = make_context(tokenizer)
    context = replace(context, sampling=replace(context.sampling, stop=("END",)))
    conversation = context.conversation(make_prompt(tokenizer, "1+2?"), 3, 1, model)

    for limit in (4, 900):
        asyncio.run(conversation.generate(limit, stop=["!"]))
        asyncio.run(conversation.append(user("x")))
    asked = [r.sampling for r in model.requests]
    assert [(s.max_new_tokens, s.stop) for s in asked] == [(4, ("END", "!")), (400, ("END", "!"))]


def test_rewards_of_turns_stand_at_their_last_tokens() -> None:
    model = ScriptedModel(make_tokenizer(), by_turn("ab", "cd"))
    conversation = begin(model)
    with pytest.raises(RunFailed, match="no turn to reward"):
        conversation.reward(1.0)
    asyncio.run(converse(conversation))
    conversation.reward(0.25)
    asyncio.run(go_on(conversation, "x"))
    conversation.reward(0.5)
    conversation.reward(0.5)
    (sample,) = conversation.samples()
    assert sample.token_rewards is not None
    assert sample.token_rewards.tolist() == [0, 0, 0.25, 0, 0, 1.0]


def test_a_template_that_drops_thoughts_asks_for_a_choice() -> None:
    tokenizer = make_tokenizer(DROPS_THOUGHTS)

    async def talk(history: str | None) -> tuple[Conversation, list[GenerateRequest]]:
        model = ScriptedModel(tokenizer, by_turn("<think>hm</think>yes", "no"))
        conversation = begin(model, {"history": history})
        assert (await conversation.generate()).reasoning == "hm"
        await go_on(conversation, "more")
        return conversation, model.requests

    with pytest.raises(ConfigError, match=r"rollout\.workflow\.history: .*changes earlier turns"):
        asyncio.run(talk(None))
    kept, requests = asyncio.run(talk("keep"))
    assert "<think>hm</think>yes" in tokenizer.decode(requests[1].prompt.tolist())
    assert [s.num_trainable for s in kept.samples()] == [21 + 3]
    branched, requests = asyncio.run(talk("branch"))
    assert "hm" not in tokenizer.decode(requests[1].prompt.tolist())
    first, second = branched.samples()
    assert (first.num_trainable, second.num_trainable) == (21, 3)
    assert branched.branches == 1
    assert first.rollout_id == second.rollout_id


def test_branches_are_counted_however_they_begin() -> None:
    model = ScriptedModel(make_tokenizer(), lambda *_: "a")
    conversation = asyncio.run(converse(begin(model)))
    shared = conversation.fork()
    asyncio.run(converse(shared.fork(user("in short"))))
    assert conversation.branches == 1  # one of which nothing came is none
    for branch in (conversation, shared):
        asyncio.run(go_on(branch, "on"))
    assert conversation.branches == 2
    first, *others = conversation.samples()
    assert len(others) == 2
    first.metadata["correct"] = True
    assert [other.metadata for other in others] == [{}, {}]


async def test_a_fork_stays_where_it_began() -> None:
    model = ScriptedModel(make_tokenizer(), by_turn("a", "b", "c"))
    conversation = await converse(begin(model))
    fork = conversation.fork()
    said = fork.messages
    await go_on(conversation, "x")
    assert fork.messages == said
    await go_on(fork, "y")
    assert [m["content"] for m in fork.messages] == ["1+2?", "a", "y", "c"]
    assert conversation.branches == 1
    assert [s.num_trainable for s in conversation.samples()] == [4, 2]


async def test_a_rollout_is_measured_once() -> None:
    tokenizer = make_tokenizer()
    scripted = ScriptedModel(tokenizer, by_turn("ab", "cd", "e"))

    async def telling(request: GenerateRequest) -> list[Completion]:
        (made,) = await scripted(request)
        return [replace(made, cached_tokens=10 * request.turn)]

    conversation = make_context(tokenizer).conversation(
        make_prompt(tokenizer, "1+2?"), 3, 1, telling
    )
    await conversation.generate()
    branch = conversation.fork()
    await conversation.fork().append(user("never sent"))
    for one in (conversation, branch):
        await go_on(one, "x")
    branch.discard("superseded")
    conversation.measure("doors", 2)
    conversation.measure("doors", 1)
    (sample,) = conversation.samples()
    prompts = [len(request.prompt) for request in scripted.requests]
    assert sample.measured.pop("engine_s") > 0
    assert sample.measured == {
        "turns": 3,
        "branches": 1,
        "tool_calls": 0,
        "tool_errors": 0,
        "tool_s": 0,
        "generated_tokens": 3 + 3 + 2,
        "trained_tokens": 6,
        "untrained_superseded": 2,
        "context_tokens": prompts[0] + 2 * (prompts[1] - prompts[0] - 3),
        "cached_tokens": 10 + 20,
        "prefilled_tokens": sum(prompts) - 30,
        "doors": 3,
    }
    again = type(sample).from_record(sample.to_record())
    assert again.measured == sample.measured


def test_a_turn_that_is_left_out_in_the_middle_is_context() -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, by_turn("ab", "cd"))
    conversation = asyncio.run(converse(begin(model)))
    conversation.discard("lost")
    (sample,) = asyncio.run(go_on(conversation, "x")).samples()
    assert tokenizer.decode(sample.tokens[sample.loss_mask == 1].tolist()) == "cd" + STOP
    assert [span.turn for span in sample.turn_spans] == [1]
    assert sample.turns == 2


def test_a_turn_of_a_frozen_policy_is_context_with_random_numbers_of_its_own() -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, by_turn("ab", "cd", "ef"))
    context = make_context(tokenizer, policies=("earlier",))

    async def play() -> Conversation:
        conversation = context.conversation(make_prompt(tokenizer, "hi"), 3, 0, model)
        await conversation.generate(policy="earlier")
        return await go_on(conversation, "x", "y")

    (sample,) = asyncio.run(play()).samples()
    assert tokenizer.decode(sample.tokens[sample.loss_mask == 1].tolist()) == f"cd{STOP}ef{STOP}"
    assert [request.policy for request in model.requests] == ["earlier", None, None]
    other, own, again = (request.seed for request in model.requests)
    assert own == again == context.seed != other
    assert sample.measured["untrained_earlier"] == 3


def test_an_evaluation_of_a_frozen_policy_has_all_turns_from_it() -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, by_turn("ab", "cd"))
    context = make_context(tokenizer, policies=("earlier",), policy="earlier")
    conversation = context.conversation(make_prompt(tokenizer, "hi"), 3, 0, model)
    (sample,) = asyncio.run(converse(conversation, "x")).samples()
    assert [request.policy for request in model.requests] == ["earlier"] * 2
    assert [span.turn for span in sample.turn_spans] == [0, 1]


@pytest.mark.parametrize("policy", [None, "earlier"])
def test_a_judge_that_is_named_is_context_whoever_is_evaluated(policy: str | None) -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, by_turn("ab", "cd"))
    context = make_context(tokenizer, policies=("earlier",), policy=policy)

    async def play() -> Conversation:
        conversation = context.conversation(make_prompt(tokenizer, "hi"), 3, 0, model)
        await conversation.generate()
        await conversation.append(user("right?"))
        await conversation.generate(policy="earlier")
        return conversation

    (sample,) = asyncio.run(play()).samples()
    assert sample.response_text == "ab"
    assert sample.measured["untrained_earlier"] == 3


def test_the_routing_of_another_policy_is_not_replayed() -> None:
    """Its routers saw other states; the record of the next turn covers the same tokens."""
    tokenizer = make_tokenizer()
    scripted = ScriptedModel(tokenizer, by_turn("ab", "cd"))

    async def routed(request: GenerateRequest) -> list[Completion]:
        [one] = await scripted(request)
        tokens = len(request.prompt) + len(one.tokens) - 1
        chosen = 7 if request.policy else 1
        return [replace(one, routed_experts=np.full((tokens, 1, 2), chosen, dtype=np.int16))]

    context = make_context(tokenizer, policies=("earlier",))

    async def play() -> Conversation:
        conversation = context.conversation(make_prompt(tokenizer, "hi"), 3, 0, routed)
        await conversation.generate(policy="earlier")
        return await go_on(conversation, "x")

    (sample,) = asyncio.run(play()).samples()
    assert sample.routed_experts is not None
    assert (sample.routed_experts == 1).all()
    assert len(sample.routed_experts) == len(sample.tokens) - 1


def test_order_of_calls_is_held() -> None:
    model = ScriptedModel(make_tokenizer(), lambda *_: "a")
    conversation = asyncio.run(converse(begin(model)))
    with pytest.raises(RunFailed, match="has just answered"):
        asyncio.run(conversation.generate())
    asyncio.run(conversation.append(user("x")))
    with pytest.raises(RunFailed, match="between two turns in one call"):
        asyncio.run(conversation.append(user("y")))


def test_a_request_begins_with_what_was_sent_and_answered() -> None:
    model = ScriptedModel(make_tokenizer(), lambda *_: "a")
    conversation = asyncio.run(converse(begin(model)))
    asyncio.run(conversation.append(user("x")))
    conversation.tokens[0] += 1
    with pytest.raises(RunFailed, match="does not begin with the tokens that the model was"):
        asyncio.run(conversation.generate())
    assert len(model.requests) == 1


def test_results_of_tools_are_rendered_together() -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, by_turn(CALL + CALL, "3 and 3"))
    conversation = begin(model, tools=TOOLS)
    reply = asyncio.run(conversation.generate())
    assert [c.id for c in reply.calls] == ["call00000", "call00001"]
    results = [{"role": "tool", "tool_call_id": c.id, "content": "3"} for c in reply.calls]
    asyncio.run(conversation.append(results))
    asyncio.run(conversation.generate())
    behind = tokenizer.decode(model.requests[1].prompt.tolist()).rpartition("</tool_call>")[2]
    assert behind == (
        f"{STOP}\n<|im_start|>user\n<tool_response>3</tool_response>"
        f"<tool_response>3</tool_response>{STOP}\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("at", ["front", "end", "needed"])
def test_tools_are_rendered_again_where_the_template_writes_them_behind_a_turn(at: str) -> None:
    here = "<{{ tools[0].function.name if tools else 'none' }}>"
    written = {
        "front": here + TEMPLATE,
        "end": TEMPLATE + here,
        "needed": TEMPLATE + "{%- if not tools %}{{ raise_exception('no tools') }}{% endif %}",
    }
    tokenizer = make_tokenizer(written[at])
    template = ChatTemplate(tokenizer, [tokenizer.eos_token_id])
    tools = [{"type": "function", "function": {"name": "add"}}]
    result = {"role": "tool", "tool_call_id": "call00000", "content": "3"}
    tokens = template.suffix([result], tools, last_token=tokenizer.eos_token_id)
    text = f"\n<|im_start|>user\n<tool_response>3</tool_response>{STOP}\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokens.tolist()) == text + ("<add>" if at == "end" else "")


def test_a_call_that_is_no_json_is_told_and_kept_as_it_was() -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, by_turn("<tool_call>{add 1 2}</tool_call>", "sorry"))
    conversation = begin(model, tools=TOOLS)
    (call,) = asyncio.run(conversation.generate()).calls
    assert call.arguments is None
    assert "must be JSON" in call.error
    result = {"role": "tool", "tool_call_id": call.id, "content": "error"}
    asyncio.run(conversation.append([result]))
    (sample,) = asyncio.run(converse(conversation)).samples()
    text = tokenizer.decode(sample.tokens.tolist())
    assert "<tool_call>{add 1 2}</tool_call>" + STOP in text
    assert len(ids(tokenizer, text)) == len(sample.tokens)


def test_a_text_prompt_goes_on_by_tokens_alone() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    model = ScriptedModel(tokenizer, by_turn("5", "6"))
    prompt = Prompt("rows:1", ids(tokenizer, "2+3="), "2+3=")
    conversation = make_context(tokenizer).conversation(prompt, 0, 0, model)

    asyncio.run(converse(conversation))
    conversation.append_tokens(ids(tokenizer, "sure?"))
    (sample,) = asyncio.run(converse(conversation)).samples()
    assert tokenizer.decode(sample.tokens.tolist()) == f"2+3=5{STOP}sure?6{STOP}"
    assert (sample.response_text, sample.num_trainable, sample.turns) == ("6", 4, 2)
    with pytest.raises(ConfigError, match=r"messages need a chat, .*data\.as_chat"):
        asyncio.run(conversation.append(user("x")))


def test_masks_and_experts_of_all_turns_are_joined_and_an_abort_aborts_all() -> None:
    tokenizer = make_tokenizer()
    scripted = ScriptedModel(tokenizer, by_turn("ab", "c"))

    async def recorded(request: GenerateRequest) -> list[Completion]:
        (made,) = await scripted(request)
        size = len(made.tokens)
        fed = len(request.prompt) + size - 1
        return [
            replace(
                made,
                finish_reason="abort" if request.turn else "stop",
                sampling_mask=SamplingMasks(made.tokens, np.ones(size, np.int32)),
                routed_experts=np.full((fed, 2, 1), request.turn, np.int16),
            )
        ]

    conversation = make_context(tokenizer).conversation(
        make_prompt(tokenizer, "1+2?"), 3, 1, recorded
    )
    (sample,) = asyncio.run(converse(conversation, "x")).samples()
    assert sample.finish_reason == "abort"
    assert sample.sampling_mask is not None
    assert sample.sampling_mask.tokens.tolist() == sample.tokens[sample.loss_mask == 1].tolist()
    assert sample.routed_experts is not None
    first = len(scripted.requests[0].prompt) + 2  # all but the last token of the first turn
    assert len(sample.routed_experts) == len(sample.tokens) - 1
    assert sample.routed_experts[:, 0, 0].tolist() == [0] * first + [1] * (
        len(sample.tokens) - 1 - first
    )
