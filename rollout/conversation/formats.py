"""How models write reasoning and calls of tools, as response templates of transformers.

A response template says where each part of an answer begins and ends. Formats have the names that
SGLang's `--tool-call-parser` has for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEAD = "head of the turn:"  # stands for the head that a chat template writes
REASONING = {"open": "<think>", "close": "</think>", "content": "text"}
NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
# What does not parse stays a text, which becomes a call with a problem.
JSON = {"content": "json", "content_args": {"allow_non_json": True}}
TEXT = {"content": "text"}
TEXTS = {"content": "text", "repeats": True, "join": "\n"}  # else the last of them replaces others

# Fields of a response template beside `tool_calls` and `content` that hold the same.
MORE_CALLS = ("named_calls", "python_calls")
FINAL = "final"


@dataclass(frozen=True)
class Format:
    """One way to write calls.

    Attributes:
        marks: texts that a chat template of this format has, all of them.
        fields: of the response template, in the order of precedence.
    """

    marks: tuple[str, ...]
    fields: Mapping[str, Any]

    @property
    def template(self) -> dict[str, Any]:
        """The response template."""
        return {
            "start_anchor": HEAD,
            "defaults": {"role": "assistant"},
            "fields": {**self.fields, "content": TEXTS},
        }


def _called(**call: Any) -> dict[str, Any]:
    """Return the fields of a format whose reasoning stands in <think>."""
    return {"reasoning_content": REASONING, "tool_calls": {"repeats": True, **call}}


_TAGGED = r"<\|message\|>"
_SPEAKER = r"(?:<\|start\|>assistant)?"
_TO = r" to=(?:functions\.)?(?P<name>[^\s<]+)"
_CHANNEL = r"<\|channel\|>(?:commentary|analysis)"
_TYPE = r"\s*(?:<\|constrain\|>)?\s*(?:json|code)?\s*"

# some models write the kind in front
_LLAMA_CALL = r"\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?\"name\"\s*:"

# By name. The first one whose marks are in the chat template is the default.
FORMATS: Mapping[str, Format] = {
    # Qwen3-Coder, Qwen3.5: <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    "qwen3_coder": Format(
        ("<function=",),
        _called(
            open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            close_pattern=r"</function>\s*</tool_call>",
            content="xml-inline",
            content_args={
                # of the white space around a value one line break on each side is the template's
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            },
            transform=NAMED_CALL,
        ),
    ),
    # GLM-4.5 to 4.7: <tool_call>f <arg_key>x</arg_key> <arg_value>1</arg_value></tool_call>
    "glm45": Format(
        ("<arg_key>",),
        _called(
            open_pattern=r"\s*<tool_call>\s*(?P<name>[^\s<]+)",
            close="</tool_call>",
            content="xml-inline",
            content_args={
                "tag_pattern": r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>"
                r"\s*<arg_value>(?P<value>.*?)</arg_value>"
            },
            transform=NAMED_CALL,
        ),
    ),
    # Hermes, Qwen2.5, Qwen3: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    "hermes": Format(
        ("<tool_call>",),
        _called(
            open_pattern=r"\s*<tool_call>",
            close="</tool_call>",
            transform={"type": "function", "function": "{content}"},
            **JSON,
        ),
    ),
    # DeepSeek-V3, R1: ...begin｜>function<｜tool▁sep｜>f ```json {"x": 1} ```<｜tool▁call▁end｜>
    "deepseekv3": Format(
        ("<｜tool▁sep｜>", "```json"),
        _called(
            open_pattern=r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*function"
            r"<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
            close_pattern=r"\s*```\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
            transform=NAMED_CALL,
            **JSON,
        ),
    ),
    # DeepSeek-V3.1: ...begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>
    "deepseekv31": Format(
        ("<｜tool▁sep｜>",),
        _called(
            open_pattern=r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
            r"(?P<name>[^<]+)<｜tool▁sep｜>",
            close_pattern=r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
            transform=NAMED_CALL,
            **JSON,
        ),
    ),
    # gpt-oss: <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
    "gpt-oss": Format(
        ("<|channel|>", "<|call|>"),
        {
            "tool_calls": {
                "open_pattern": f"{_SPEAKER}(?:{_TO}{_CHANNEL}|{_CHANNEL}{_TO}){_TYPE}{_TAGGED}",
                "close_pattern": r"<\|(?:call|end|return)\|>",
                "repeats": True,
                "transform": NAMED_CALL,
                **JSON,
            },
            "reasoning_content": {
                "open_pattern": rf"{_SPEAKER}<\|channel\|>analysis{_TAGGED}",
                "close_pattern": r"<\|(?:end|return)\|>",
                **TEXTS,
            },
            FINAL: {
                "open_pattern": rf"{_SPEAKER}<\|channel\|>(?:final|commentary)\s*"
                rf"(?:<\|constrain\|>\w+)?{_TAGGED}",
                "close_pattern": r"<\|(?:end|return)\|>",
                **TEXTS,
            },
        },
    ),
    # Mistral: [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]; since version 11 of its
    # tokenizer: [TOOL_CALLS]f[ARGS]{"x": 1}
    "mistral": Format(
        ("[TOOL_CALLS]",),
        {
            "reasoning_content": {
                "open_pattern": r"\[THINK\]|<think>",
                "close_pattern": r"\[/THINK\]|</think>",
                **TEXT,
            },
            "tool_calls": {"open_pattern": r"\s*\[TOOL_CALLS\]\s*(?=\[)", **JSON},
            "named_calls": {
                "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)\s*"
                r"(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?",
                "close_pattern": r"(?=\[TOOL_CALLS\])",
                "repeats": True,
                "transform": NAMED_CALL,
                **JSON,
            },
        },
    ),
    # Llama 3: {"name": "f", "parameters": {"x": 1}}, several apart by ";", and for tools that the
    # model knows by itself <|python_tag|>f.call(x="1")
    "llama3": Format(
        ('"parameters": ', "ipython"),
        {
            "tool_calls": {
                "open_pattern": r"(?:\s*<\|python_tag\|>|\A|(?<=\}\s*;)|(?<=\}\s*\n))\s*"
                rf"(?={_LLAMA_CALL})",
                "close_pattern": rf"\s*[;\n](?=\s*{_LLAMA_CALL})",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
                **JSON,
            },
            "python_calls": {
                "open_pattern": r"\s*<\|python_tag\|>(?P<name>\w+)\.call\(",
                "close_pattern": r"\)\s*\Z",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"(?P<key>\w+)\s*=\s*\"(?P<value>[^\"]*)\""},
                "transform": NAMED_CALL,
            },
        },
    ),
}
