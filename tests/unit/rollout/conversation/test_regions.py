"""The reader of whole turns gives what transformers' own parser gives, whatever is written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from rollout.conversation.formats import FORMATS, HEAD
from rollout.conversation.regions import RegionReader

from .test_parsers import TOOLS, WRITTEN

TEMPLATES = {name: load_response_template(form.template) for name, form in FORMATS.items()}
READERS = {name: RegionReader(template) for name, template in TEMPLATES.items()}
# Whole marks, halves of them and what stands between: each format's, so that they meet by chance.
PARTS = [
    "<think>", "</think>", "hm", " ", "\n", ";", "{", "}", ")", "`", "<", "<tool_call>",
    "</tool_call>", '{"name": "weather", "arguments": {"days": "3", "of": "[1]"}}', '{"name": "f"}',
    '{"name": "weather", "parameters": {"exact": "true"}}', "<tool_call", "<function=weather>",
    "</function>", "<parameter=days>", "2", "</parameter>", "weather", "<arg_key>", "days",
    "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "function", "<｜tool▁sep｜>", "```json\n", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<|channel|>", "analysis", "commentary", "final", " to=functions.weather", "<|message|>",
    "<|start|>assistant", "<|constrain|>", "json", "<|end|>", "<|call|>", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", "[THINK]", "[/THINK]", "[", "]", "<|python_tag|>", "weather.call(", 'days="3"',
]  # fmt: skip
# A random text of marks rarely holds a call, and calls are what matters: some are given.
WHOLE = [written[1] for written in WRITTEN] + [
    f"<tool_call>{PARTS[13]}</tool_call>",
    "<tool_call><function=weather><parameter=days>3</parameter></function></tool_call>",
    "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
]


def read_by_transformers(name: str, head: str, text: str) -> dict[str, Any]:
    found = parse_response(text, TEMPLATES[name], prefix=HEAD + head, tools=TOOLS)
    return {key: value for key, value in found.items() if key != "role"}


def read_by_ours(name: str, head: str, text: str) -> dict[str, Any]:
    found = READERS[name](head + text, TOOLS)
    return {key: value for key, value in found.items() if value not in (None, "", [], {})}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=300, deadline=None)
@given(
    head=st.sampled_from(["", "<think>", "<think>\n", "<think>\n\n</think>\n\n"]),
    parts=st.lists(st.sampled_from([*PARTS, *WHOLE]), max_size=8),
)
def test_random_turns_are_read_as_transformers_reads_them(
    name: str, head: str, parts: list[str]
) -> None:
    text = "".join(parts)
    try:
        expected = read_by_transformers(name, head, text)
    except ValueError:
        with pytest.raises(ValueError):
            read_by_ours(name, head, text)
        return
    assert read_by_ours(name, head, text) == expected


def test_arguments_have_the_types_of_the_tools_that_are_given() -> None:
    read = READERS["hermes"]
    text = '<tool_call>{"name": "weather", "arguments": {"days": "3"}}</tool_call>'

    def days(tools: list[dict[str, Any]]) -> object:
        return read(text, tools)["tool_calls"][0]["function"]["arguments"]["days"]

    assert [days(TOOLS), days([]), days([{"name": "weather"}]), days(TOOLS)] == [3, "3", "3", 3]
