"""Rows in every public format: what is recognised, what becomes of them, and what is refused."""

from __future__ import annotations

import logging
import re

import public_rows as public
import pytest

from rlcore.config.sections.data import DataConfig
from rlcore.data.examples import check_label, open_examples
from rlcore.data.loading import load_prompts
from rlcore.errors import ConfigError, DataError
from rlcore.trainer.sft_answers import with_answer
from tests.unit.data.prompt_sets import load_set


def examples(path: str, **data):
    return open_examples(DataConfig(paths=[path], **data))


@pytest.mark.parametrize(
    ("make", "format_", "source"),
    [
        (public.verl_gsm8k, "verl", "openai/gsm8k"),
        (public.dapo_17k, "verl", "math_dapo"),
        (public.openai_chat, "openai", None),
        (public.trl, "trl", None),
        (public.open_instruct, "open-instruct", "gsm8k"),
        (public.slime, "slime", None),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_public_format_is_recognised(
    write_rows, tmp_path, caplog, make, format_, source, kind
):
    rows = [make("1+2", "3"), make("30+4", "34")]
    if kind == "parquet" and make is public.slime:
        for row in rows:
            row["tools"][0]["function"]["parameters"] = {"type": "object"}  # no empty structs
    path = (
        write_rows(rows)
        if kind == "jsonl"
        else public.write_parquet(tmp_path / "rows.parquet", rows)
    )
    with caplog.at_level(logging.INFO):
        found = examples(path)
    assert f"{path}: 2 rows, format {format_}, " in caplog.text
    assert found.parts[0].format == format_
    assert [e.label for e in found] == ["3", "34"]
    assert [e.prompt[-1] for e in found] == [
        {"role": "user", "content": "1+2"},
        {"role": "user", "content": "30+4"},
    ]
    assert [e.extra.get("source") for e in found] == [source] * 2
    assert found[1] == list(found)[1], "one row alone and all in turn are the same"


def test_columns_of_text(write_rows):
    assert [(e.prompt, e.label) for e in examples(write_rows([public.plain("1+2=", "3")]))] == [
        ("1+2=", "3")
    ]
    gsm8k = examples(write_rows([public.openai_gsm8k("1+2=", "3")]))
    assert gsm8k.parts[0].format == "openai"
    assert (gsm8k[0].prompt, gsm8k[0].label[-6:]) == ("1+2=", "#### 3")
    problems = examples(write_rows([{"problem": "1+2=", "solution": "3"}]))
    assert (problems[0].prompt, problems[0].label) == ("1+2=", "3")


def test_slimes_metadata_become_columns_and_tools_reach_the_template(write_rows, tokenizer):
    path = write_rows([public.slime("1+2", "3")])
    assert examples(path)[0].extra["rm_type"] == "math"
    tokenizer.chat_template = "{{ tools | length }}={{ messages[0]['content'] }}"
    assert load_set([path], tokenizer)[0].text == "1=1+2"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the row has tools.*data\.tools_key"):
        load_set([path], tokenizer)


def test_tools_may_be_json_text_or_come_from_the_configuration(write_rows):
    as_text = {"prompt": "1", "label": "2", "tools": '[{"function": {"name": "f"}}]'}
    assert examples(write_rows([as_text]))[0].tools == [{"function": {"name": "f"}}]
    given = examples(write_rows([public.plain("1", "2")]), tools=[{"name": "g"}])
    assert given[0].tools == [{"name": "g"}]
    with pytest.raises(DataError, match=r":1: 'tools' must be a list of tools"):
        examples(write_rows([{"prompt": "1", "label": "2", "tools": {"f": 1}}]))[0]
    with pytest.raises(DataError, match=r":1: 'tools' is text that is not JSON"):
        examples(write_rows([{"prompt": "1", "label": "2", "tools": "add"}]))[0]


def test_keys_that_are_set_win_over_the_format(write_rows):
    row = public.verl_gsm8k("1+2", "3")
    found = examples(write_rows([row]), prompt_key="extra_info.question", label_key="ability")[0]
    assert (found.prompt, found.label) == ("1+2", "math")
    assert examples(write_rows([row]), label_key=None)[0].label is None
    dotted = {"prompt": "1", "a.b": "column", "a": {"b": "inside"}}
    assert examples(write_rows([dotted]), label_key="a.b")[0].label == "column"


def test_a_format_that_is_set_is_not_guessed(write_rows):
    path = write_rows([{**public.slime("1", "2"), "solution": "3"}])
    found = examples(path, format="trl")
    assert (found.parts[0].format, found[0].label) == ("trl", "3")
    with pytest.raises(DataError, match=r"no key 'reward_model\.ground_truth'"):
        examples(path, format="verl")[0]


# --- the nearest attempts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"label_key": "reward_model"},
            "text or a number for reward.parts.right, got a map with 'style', 'ground_truth': set"
            " data.label_key to reward_model.ground_truth",
        ),
        (
            {"label_key": "ground_truth"},
            "no key 'ground_truth' (data.label_key; null for prompts without labels); the row has"
            " 'data_source', 'prompt', 'ability', 'reward_model', 'extra_info'; set data.label_key"
            " to reward_model.ground_truth",
        ),
        ({"label_key": "label"}, "'extra_info'; set data.label_key to reward_model.ground_truth"),
        (
            {"prompt_key": "question"},
            "no key 'question' (data.prompt_key); the row has 'data_source', 'prompt', 'ability',"
            " 'reward_model', 'extra_info'; set data.prompt_key to extra_info.question",
        ),
        ({"label_key": "extra_info"}, "set data.label_key to extra_info.answer"),
    ],
)
def test_a_wrong_key_is_answered_with_the_likely_one(write_rows, data, message):
    path = write_rows([public.verl_gsm8k("1+2", "3")])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*" + re.escape(message)):
        check_label(examples(path, **data)[0], "reward.parts.right")


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, "got null: set data.label_key to extra.answer$"),
        (["3"], r"got list: \['3'\]"),
        (True, "got bool: True"),
        ({"style": 1.5}, "got a map with 'style'$"),
    ],
)
def test_a_label_that_no_verifier_can_read(write_rows, label, message):
    path = write_rows([{"prompt": "1", "answer": label, "extra": {"answer": "2"}}])
    with pytest.raises(DataError, match=f":1: the label must be text or a number for x, {message}"):
        check_label(examples(path, label_key="answer")[0], "x")
    for fine in ("3", 3, 0.5):
        check_label(examples(write_rows([{"prompt": "1", "label": fine}]))[0], "x")


# --- messages -------------------------------------------------------------------------------------


BIG = 123456789012345678901234567890  # beyond 64 bits


def test_messages_with_tool_calls_nulls_and_parts(write_rows, tmp_path, tokenizer):
    call = {"id": "c1", "type": "function"}
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**call, "function": {"name": "add", "arguments": f'{{"a": {BIG}}}'}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "user", "content": "4"},
    ]
    found = examples(write_rows([{"prompt": messages, "label": "3"}]))[0].prompt
    assert found[0]["content"] == "1+2"
    assert found[1]["tool_calls"][0]["function"]["arguments"] == {"a": BIG}
    assert found[1]["content"] is None
    assert found[2] == messages[2]
    assert found[3] == {"role": "assistant", "content": ""}
    # parquet gives every call the arguments of all others, as nulls
    twice = [
        {"role": "assistant", "content": None,
         "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
        for name, arguments in (("f", {"a": 1}), ("g", {"b": 2}))
    ]  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": "1"}, *twice], "label": "3"}]
    chat = examples(public.write_parquet(tmp_path / "calls.parquet", rows))[0].prompt
    assert [m["tool_calls"][0]["function"]["arguments"] for m in chat[1:]] == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "message 2 of 'prompt': part 1 of its content is of type 'image_url'.*no vision",
        ),
        ({"role": "user", "content": [{"type": "image"}]}, "of type 'image'"),
        ({"role": "user", "content": None}, "each message must be .*null next to tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "null next to tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": ["f"]}, "a tool call must be"),
        ({"role": "assistant", "content": "", "tool_calls": 1.5}, "tool_calls must be a list; got"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]},
            "the arguments of the call of 'f' are not JSON",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": "[NaN]"}}],
            },
            "the arguments of the call of 'f' are not JSON",
        ),
    ],
)
def test_a_message_that_cannot_be_rendered_is_named(write_rows, message, error):
    path = write_rows([{"prompt": [{"role": "user", "content": "1"}, message], "label": "3"}])
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: message 2 of 'prompt'.*{error}|{error}"):
        examples(path)[0]


# --- templates ------------------------------------------------------------------------------------


def test_system_prompt_and_template_go_where_they_belong(write_rows):
    data = {"system_prompt": "S", "prompt_template": "[{prompt}] {}"}
    rows = [
        {"prompt": "1", "label": "2"},
        {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
         "label": "2"},
    ]  # fmt: skip
    text, chat = examples(write_rows(rows), **data)
    assert text.prompt == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "[1] {}"},
    ]
    assert [m["content"] for m in chat.prompt] == ["own", "a", "b", "[c] {}"]
    assert examples(write_rows(rows), prompt_template="{prompt}!")[0].prompt == "1!"
    assert examples(write_rows(rows), as_chat=True)[0].prompt == [{"role": "user", "content": "1"}]
    with pytest.raises(ValueError, match=r"a text with \{prompt\} in it"):
        DataConfig(paths=["x"], prompt_template="Think.")


def test_variables_of_the_chat_template(write_rows, tokenizer, make_run):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}+{% endif %}"
    )
    path = write_rows([{"prompt": [{"role": "user", "content": "1"}], "label": "2"}])
    text = [
        load_prompts(make_run(paths=[path], chat_template_kwargs=given), tokenizer)[0].text
        for given in ({}, {"enable_thinking": False}, {"enable_thinking": True})
    ]
    assert text == ["1", "1+", "1"]
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs\.thinking: .*not read it"):
        load_prompts(make_run(paths=[path], chat_template_kwargs={"thinking": False}), tokenizer)


@pytest.mark.parametrize("role_of", ["prompt", "messages", "completion"])
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (None, "must be a map, .*got None"),
        ([1], "must be a map, .*got \\[1\\]"),
        (5, "must be a map, .*got 5"),
        ("null", "must be a map, .*got None"),
        ("[1]", "must be a map"),
        ("5", "must be a map"),
        ('"x"', "must be a map, .*got x"),
        ("so", "are not JSON"),
        ('{"a": 1, "a": 2}', "are not JSON .*'a' twice"),
        ('{"a": 1e999}', "are not JSON"),
        ('{"a": 1} {}', "are not JSON"),
    ],
)
def test_arguments_that_are_no_map_are_refused_with_file_and_row(
    write_rows, role_of, arguments, error
):
    """In a history, in the answer of a chat, and in the completion of a row of TRL's form."""
    user = {"role": "user", "content": "1"}
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    row = {
        "prompt": {"prompt": [user, answer, user], "completion": "2"},
        "messages": {"messages": [user, answer]},
        "completion": {"prompt": [user], "completion": [answer]},
    }[role_of]
    path = write_rows([row])
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: message .*of 'f' {error}"):
        with_answer(examples(path)[0])
