"""What supervised fine-tuning trains on under chat templates that models were published with.

The oracle renders each turn by transformers' `apply_chat_template` alone: the prompt is the chat
before the turn as the model is asked with it, and prompt and answer together are the chat with it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlcore.config import Config
from rlcore.data.batch import RolloutBatch
from rlcore.data.packing.sharing import beginnings_of, share_prefixes
from rlcore.errors import DataError
from rlcore.trainer.sources import RowSource
from tests.unit.rollout.conversation.kit import make_tokenizer
from tests.unit.rollout.conversation.test_public_templates import KNOWN, template_text

Message = dict[str, Any]
THOUGHT = "<think>\nhm{}\n</think>\n\n"


def chat(answers: list[str]) -> list[Message]:
    messages: list[Message] = []
    for number, answer in enumerate(answers):
        messages.append({"role": "user", "content": f"question{number}"})
        messages.append({"role": "assistant", "content": answer})
    return messages


PLAIN = chat(["one", "two", "three"])
THOUGHTS = chat([THOUGHT.format(n) + word for n, word in enumerate(("one", "two", "three"))])
FIELDS = [
    {**message, "reasoning_content": "hm", "thinking": "hm"}
    if message["role"] != "user"
    else message
    for message in PLAIN
]


def tokenizer_of(name: str) -> Any:
    stop = KNOWN[name][0].split()[0]
    tokenizer = make_tokenizer(template_text(name), stops=KNOWN[name][0].split())
    tokenizer.eos_token = stop
    return tokenizer


def samples_of(write_rows: Any, tokenizer: Any, messages: list[Message], **data: Any) -> list[Any]:
    given = {
        "run": {"name": "sft"},
        "model": {"path": "unused"},
        "data": {"paths": [write_rows([{"messages": messages}])], **data},
        "training": {"steps": 1, "batch_size": 1},
        "algorithm": {"loss": {"name": "sft"}},
    }
    return RowSource(Config.model_validate(given), tokenizer).next_step(1).samples


def rendered(tokenizer: Any, messages: list[Message], *, ask: bool, **kwargs: Any) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=ask, **kwargs
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def oracle(tokenizer: Any, messages: list[Message], **kwargs: Any) -> list[tuple[list, list]]:
    """Prompt and answer of each turn of the assistant, the answer up to the first end of turn."""
    turns = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = rendered(tokenizer, messages[:place], ask=True, **kwargs)
            whole = rendered(tokenizer, messages[: place + 1], ask=False, **kwargs)
            assert whole[: len(prompt)] == prompt
            answer = whole[len(prompt) :]
            eos = tokenizer.eos_token_id
            turns.append(
                (prompt, [*(answer[: answer.index(eos)] if eos in answer else answer), eos])
            )
    return turns


def parted(sample: Any) -> tuple[list[int], list[int]]:
    """Prompt and answer of a sample with one turn, at its end."""
    begin = len(sample.tokens) - sample.num_trainable
    assert sample.loss_mask.tolist() == [0] * begin + [1] * sample.num_trainable
    return sample.tokens[:begin].tolist(), sample.tokens[begin:].tolist()


ASKED_AS_WRITTEN = [
    name for name in KNOWN if name not in ("deepseek_r1_distill", "nemotron_3_nano", "minimax_m2")
]


WRITTEN = {"plain": PLAIN, "inline": THOUGHTS, "field": FIELDS}
# What a template cannot be given: gpt-oss has thoughts as fields alone, the other is asked not to
# think.
NOT_GIVEN = {("gptoss", "inline"), ("qwen3_5_nothink", "inline"), ("qwen3_5_nothink", "field")}
CASES = [
    (name, kind) for name in ASKED_AS_WRITTEN for kind in WRITTEN if (name, kind) not in NOT_GIVEN
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_each_turn_is_trained_as_the_model_is_asked_there(write_rows, name, kind) -> None:
    messages = WRITTEN[kind]
    tokenizer = tokenizer_of(name)
    samples = samples_of(write_rows, tokenizer, messages, train_turns="each")
    turns = oracle(tokenizer, messages)
    assert [parted(sample) for sample in samples] == turns
    # by default the same tokens are trained, behind the same ones, in at most as many sequences
    joined = samples_of(write_rows, tokenizer, messages)
    assert len(joined) <= len(samples)
    seen = [
        (sample.tokens[:at].tolist(), int(sample.tokens[at]))
        for sample in joined
        for at in sample.loss_mask.nonzero()[0]
    ]
    assert seen == [
        ([*prompt, *answer[:at]], token)
        for prompt, answer in turns
        for at, token in enumerate(answer)
    ]
    [last] = samples_of(write_rows, tokenizer, messages, train_turns="last")
    assert parted(last) == turns[-1]


@pytest.mark.parametrize(
    ("name", "messages", "sequences"),
    [
        ("qwen2_5", PLAIN, 1),
        ("llama3_1", THOUGHTS, 1),
        ("qwen3", PLAIN, 3),
        ("qwen3", THOUGHTS, 3),
        ("glm4moe", PLAIN, 1),
        ("glm4moe", THOUGHTS, 3),
        ("gptoss", PLAIN, 3),
        ("deepseek_r1_distill", PLAIN, 3),
    ],
)
def test_turns_share_a_sequence_where_the_template_keeps_them(
    write_rows, name, messages, sequences
) -> None:
    tokenizer = tokenizer_of(name)
    samples = samples_of(write_rows, tokenizer, messages)
    assert len(samples) == sequences
    batch = RolloutBatch.from_samples(samples)
    sharing = share_prefixes(batch.tokens, batch.lengths)
    begun = beginnings_of(batch.tokens, batch.cu_tokens, batch.vectors["group_ids"])
    # what is shared are the prompts, from the start up to where the template begins to differ
    assert (sharing.num_shared > 0) == (begun.shared.sum() > 0) == (sequences > 1)


def test_calls_of_tools_between_two_questions_stay_one_sequence_of_qwen3(write_rows) -> None:
    """Its template keeps the thoughts behind the last question, and drops those before."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
    steps = [
        {"role": "assistant", "content": THOUGHT.format(1), "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": THOUGHT.format(2), "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    messages = [PLAIN[0], *steps, THOUGHTS[1], *THOUGHTS[2:4]]
    tokenizer = tokenizer_of("qwen3")
    turns = oracle(tokenizer, messages)
    joined = samples_of(write_rows, tokenizer, messages)
    assert [len(sample.tokens) for sample in joined] == [
        sum(map(len, turns[2])),
        sum(map(len, turns[3])),
    ]
    assert [sample.num_trainable for sample in joined] == [
        sum(len(answer) for _, answer in turns[:3]),
        len(turns[3][1]),
    ]
    each = samples_of(write_rows, tokenizer, messages, train_turns="each")
    assert [parted(sample) for sample in each] == turns


@pytest.mark.parametrize(
    ("name", "content", "fields", "written"),
    [
        # DeepSeek-R1's template cuts the thought from every message, though the prompt opens one
        ("deepseek_r1_distill", "<think>\nhm\n</think>\n\nyes", {}, "hm\n</think>\n\nyes"),
        ("deepseek_r1_distill", "<think>hm</think>yes", {}, "hm</think>yes"),
        ("deepseek_r1_distill", "hm\n</think>\n\nyes", {}, "hm\n</think>\n\nyes"),
        ("deepseek_r1_distill", "<b>yes</b>", {}, "\n</think>\n\n<b>yes</b>"),
        ("deepseek_r1_distill", "yes", {"reasoning_content": "hm\n"}, "hm\n</think>\n\nyes"),
        ("deepseek_r1_distill", "yes", {"reasoning": "hm"}, "hm\n</think>\n\nyes"),
        # Nemotron's prompt ends the mark with a line break, which its template leaves out here
        ("nemotron_3_nano", "yes", {}, "</think>yes"),
        ("nemotron_3_nano", "<think>\nhm\n</think>\n\nyes", {}, "hm\n</think>\n\nyes"),
    ],
)
def test_a_thought_that_the_prompt_opens_is_trained(
    write_rows, name, content, fields, written
) -> None:
    answer = {"role": "assistant", "content": content, **fields}
    messages = [PLAIN[0], answer, PLAIN[2], answer]
    tokenizer = tokenizer_of(name)
    samples = samples_of(write_rows, tokenizer, messages, train_turns="each")
    answers = [*tokenizer(written, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert [parted(sample) for sample in samples] == [
        (rendered(tokenizer, messages[:place], ask=True), answers) for place in (1, 3)
    ]
    assert tokenizer.decode(samples[0].tokens).count("<think>") == 1


def test_a_thought_that_a_template_cuts_is_trained_where_the_prompt_opens_none(write_rows) -> None:
    """The first template of DeepSeek-R1 asked without `<think>`."""
    tokenizer = tokenizer_of("deepseek_r1_distill")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<｜Assistant｜><think>\\n", "<｜Assistant｜>"
    )
    [sample] = samples_of(write_rows, tokenizer, THOUGHTS[:2])
    _, answer = parted(sample)
    assert tokenizer.decode(answer[:-1]) == THOUGHTS[1]["content"]


def test_a_thought_behind_a_prompt_that_forbids_it_is_refused(write_rows) -> None:
    tokenizer = tokenizer_of("qwen3")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: message 2: .* does not think, and the mess"
    ):
        samples_of(write_rows, tokenizer, THOUGHTS, **off)
    samples = samples_of(write_rows, tokenizer, PLAIN, train_turns="each", **off)
    assert [parted(s) for s in samples] == oracle(tokenizer, PLAIN, enable_thinking=False)


def called(arguments: Any, **fields: Any) -> Message:
    """A message of the assistant with one call of each of these arguments."""
    calls = [{"function": {"name": "find", "arguments": given}} for given in arguments]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


MAP = {"city": "Zürich", "days": [1, 2.5], "deep": {"on": True, "no": None}}
JSON = json.dumps(MAP, ensure_ascii=False)
RESULT = {"role": "tool", "content": "sunny"}


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3"])
@pytest.mark.parametrize(
    "message",
    [
        called([MAP]),
        called([JSON]),
        called([json.dumps(MAP)]),
        called([MAP], content=""),
        called([JSON, MAP]),
    ],
)
def test_calls_are_trained_by_templates_that_take_json(write_rows, name, message) -> None:
    """They add the arguments to a text, beside a content that is null.

    The oracle is the template itself: `apply_chat_template` removes what is null, and then fails.
    """
    tokenizer = tokenizer_of("deepseek_r1_distill")
    tokenizer.chat_template = template_text(name)
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        template_text(name)
    )

    def written_by(messages: list[Message], *, ask: bool) -> str:
        return template.render(
            messages=messages, add_generation_prompt=ask, bos_token=tokenizer.bos_token
        )

    calls = [
        {"type": "function", "function": {"name": "find", "arguments": JSON}}
        for _ in message["tool_calls"]
    ]
    as_text = [PLAIN[0], {**message, "content": None, "tool_calls": calls}, RESULT, PLAIN[1]]
    samples = samples_of(
        write_rows, tokenizer, [PLAIN[0], message, RESULT, PLAIN[1]], train_turns="each"
    )
    eos = tokenizer.eos_token
    prompts = [written_by(as_text[:place], ask=True) for place in (1, 3)]
    opened = prompts[0].partition("<think>")
    written = written_by(as_text[:2], ask=False).removeprefix(opened[0]).partition(eos)[0]
    assert written.count(JSON) == len(calls)
    answers = [
        ("\n</think>\n\n" if opened[1] else "") + written + eos,
        written_by(as_text, ask=False).removeprefix(prompts[1]),
    ]
    texts = [tokenizer([*pair], add_special_tokens=False) for pair in zip(prompts, answers)]
    assert [[*parted(sample)] for sample in samples] == [text["input_ids"] for text in texts]


@pytest.mark.parametrize(
    ("name", "message", "reason"),
    [
        # a message with a content has no calls to this template
        ("deepseek_r1_distill", called([MAP], content="I look."), "leaves out calls of tools"),
        ("deepseek_r1_distill", called([MAP], content="I find it."), "leaves out calls of tools"),
        ("llama3", called([MAP]), "leaves out calls of tools"),
        # it ends the turn behind every call but the first
        (
            "deepseek_r1_distill",
            called([MAP, MAP, MAP]),
            "ends the turn before the last of its tool calls",
        ),
    ],
)
def test_calls_that_a_template_leaves_out_are_refused(write_rows, name, message, reason) -> None:
    for messages in ([PLAIN[0], message], [PLAIN[0], message, RESULT, PLAIN[1]]):
        with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{reason}"):
            samples_of(write_rows, tokenizer_of(name), messages, train_turns="each")


def test_a_tool_that_is_described_is_no_call_that_is_shown(write_rows) -> None:
    tokenizer = tokenizer_of("llama3")
    described = "{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}"
    tokenizer.chat_template = described + tokenizer.chat_template
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    with pytest.raises(DataError, match="leaves out calls of tools"):
        samples_of(write_rows, tokenizer, [PLAIN[0], called([MAP])], tools=[tool])
