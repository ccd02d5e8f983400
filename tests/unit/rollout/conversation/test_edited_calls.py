"""No edit of a valid call becomes another call.

An edit deletes a character, inserts one, or cuts the turn off. The calls that may be run then are
those that were there; where the edit lies in a value, the call may have the value that stands there
now, as an independent reader has it.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.conversation.formats import FORMATS
from rollout.conversation.reply_parser import ReplyParser

from .kit import make_tokenizer
from .test_parsers import (
    BEGIN,
    CALL,
    DSML,
    END,
    ENDS,
    KIMI,
    KIMI_ARGUMENTS,
    KIMI_END,
    SECTION,
    SECTION_END,
    SEP,
)

# Optional arguments have defaults, with which a call of fewer arguments would run.
TOOLS: list[dict[str, Any]] = [
    {
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "of": {"type": "array", "items": {"type": "string"}},
                },
            },
        }
    },
    {"function": {"name": "halt", "parameters": {"type": "object", "properties": {}}}},
]
PARSERS = {name: ReplyParser(make_tokenizer(), name) for name in FORMATS}
JSON = {"city": '"Bern; {1}"', "days": "3", "of": '["a", "b"]'}
PLAIN = {**JSON, "city": "Bern; {1}"}
IN_LINES = {key: f"\n{text}\n" for key, text in PLAIN.items()}
MAP = '{"city": @city@, "days": @days@, "of": @of@}'


def tagged(before: str, between: str, after: str) -> str:
    return "".join(f"{before}{key}{between}@{key}@{after}" for key in JSON)


# Of each format turns of two calls, the second of them without arguments: @key@ stands for a value.
TURNS: list[tuple[str, dict[str, str], str]] = [
    ("qwen3_coder", IN_LINES,
     "I look.\n<tool_call>\n<function=weather>\n" + tagged("<parameter=", ">", "</parameter>\n")
     + "</function>\n</tool_call>\n<tool_call>\n<function=halt>\n</function>\n</tool_call>"),
    ("glm45", PLAIN,
     "I look.\n<tool_call>weather\n"
     + tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
     + "</tool_call>\n<tool_call>halt</tool_call>"),
    ("hermes", JSON,
     'I look.\n<tool_call>\n{"name": "weather", "arguments": ' + MAP
     + '}\n</tool_call>\n<tool_call>\n{"name": "halt", "arguments": {}}\n</tool_call>'),
    ("deepseekv3", JSON,
     f"I look.{BEGIN}{CALL}function{SEP}weather\n```json\n{MAP}"
     f"\n```{END}\n{CALL}function{SEP}halt\n```json\n{{}}\n```{END}{ENDS}"),
    ("deepseekv31", JSON,
     f"I look.{BEGIN}{CALL}weather{SEP}{MAP}{END}{CALL}halt{SEP}{{}}{END}{ENDS}"),
    ("seed_oss", PLAIN | {"of": "['a', 'b']"},
     "I look.\n<seed:tool_call>\n<function=weather>\n"
     + tagged("<parameter=", ">", "</parameter>\n")
     + "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=halt>\n</function>\n"
     "</seed:tool_call>"),
    ("minimax-m2", PLAIN,
     'I look.\n<minimax:tool_call>\n<invoke name="weather">\n'
     + tagged('<parameter name="', '">', "</parameter>\n")
     + '</invoke>\n<invoke name="halt">\n</invoke>\n</minimax:tool_call>'),
    ("deepseekv32", PLAIN,
     f'I look.\n\n<{DSML}function_calls>\n<{DSML}invoke name="weather">\n'
     f'<{DSML}parameter name="city" string="true">@city@</{DSML}parameter>\n'
     f'<{DSML}parameter name="days" string="false">@days@</{DSML}parameter>\n'
     f'<{DSML}parameter name="of" string="false">@of@</{DSML}parameter>\n</{DSML}invoke>\n'
     f'<{DSML}invoke name="halt">\n</{DSML}invoke>\n</{DSML}function_calls>'),
    ("kimi_k2", JSON,
     f"I look.{SECTION}{KIMI}functions.weather:0{KIMI_ARGUMENTS}{MAP}{KIMI_END}"
     f"{KIMI}functions.halt:1{KIMI_ARGUMENTS}{{}}{KIMI_END}{SECTION_END}"),
    ("gpt-oss", JSON,
     "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>"
     f"commentary to=functions.weather <|constrain|>json<|message|>{MAP}"
     "<|call|><|start|>assistant to=functions.halt<|channel|>commentary json<|message|>{}<|call|>"),
    ("mistral", JSON,
     'I look.[TOOL_CALLS] [{"name": "weather", "arguments": ' + MAP
     + '}, {"name": "halt", "arguments": {}}]'),
    ("mistral", JSON,
     f"I look.[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{MAP}[TOOL_CALLS]halt[ARGS]{{}}"),
    ("llama3", JSON,
     'I look. {"name": "weather", "parameters": ' + MAP
     + '}; and {"type": "function", "name": "halt", "parameters": {}} I think.'),
    ("llama3", {**PLAIN, "of": "[]"},
     '<|python_tag|>weather.call(city="@city@", days="@days@", of="@of@")'
     "<|python_tag|>halt.call()"),
]  # fmt: skip
CASES = [pytest.param(*turn, id=f"{turn[0]}-{number}") for number, turn in enumerate(TURNS)]


def whole(values: dict[str, str], turn: str) -> str:
    for key, text in values.items():
        turn = turn.replace(f"@{key}@", text)
    return turn


FEW = '\n,"\\}<>/=1'
INSERTED = FEW + " ;:'{[]()|`_｜▁0-.eEnula"


def edits(text: str, inserted: str) -> Iterator[tuple[int, int, str]]:
    """Where an edit begins, how many characters it takes away, and what it puts there."""
    for at in range(len(text)):
        yield at, len(text) - at, ""
        yield at, 1, ""
    for at in range(len(text) + 1):
        yield from ((at, 0, character) for character in inserted)


def value_of(name: str, key: str, text: str, *, as_json: bool) -> Any:
    """What a value that was edited says. Raises ValueError if it says nothing of its type."""
    if key == "city" and not as_json:
        margin = "\n?" if name == "qwen3_coder" else ""
        found = re.fullmatch(f"{margin}(.*?){margin}", text, re.DOTALL)
        assert found
        return found[1]
    if key == "days" and not re.fullmatch(r"\s*-?(0|[1-9]\d*)(\.0+)?([eE]\d+)?\s*", text):
        raise ValueError(text)
    if name != "seed_oss":
        return json.loads(text)
    try:
        return ast.literal_eval(text)
    except SyntaxError as error:
        raise ValueError(text) from error


def runnable(name: str, text: str) -> list[tuple[str, Any]]:
    calls = PARSERS[name]("", text, TOOLS).calls
    assert all(call.error or call.arguments is not None for call in calls)
    return [(call.name, call.arguments) for call in calls if not call.error]


def subsequence(found: list[Any], of: list[Any]) -> bool:
    rest = iter(of)
    return all(any(one == other for other in rest) for one in found)


@pytest.mark.parametrize("inserted", [FEW, pytest.param(INSERTED, marks=pytest.mark.rest)])
@pytest.mark.parametrize(("name", "values", "turn"), CASES)
def test_no_edit_of_a_call_becomes_another_call(
    name: str, values: dict[str, str], turn: str, inserted: str
) -> None:
    text = whole(values, turn)
    as_json = '"city": ' in text
    calls = runnable(name, text)
    assert [call[0] for call in calls] == ["weather", "halt"]
    assert as_json is (name not in TAGS or (name == "llama3" and "call(" not in text))
    (_, arguments), halt = calls
    starts = {key: len(whole(values, turn.partition(f"@{key}@")[0])) for key in values}
    places = [(start, start + len(values[key]), key) for key, start in starts.items()]
    counts: Counter[str] = Counter()
    for at, taken, put in edits(text, inserted):
        edited = text[:at] + put + text[at + taken :]
        found = runnable(name, edited)
        allowed = [calls]
        for start, end, key in places:
            behind = text[end:]
            inside = edited[start : len(edited) - len(behind)]
            # all else stands as it did
            if text[:start] + inside + behind == edited:
                try:
                    value = value_of(name, key, inside, as_json=as_json)
                except ValueError:
                    continue
                allowed.append([("weather", {**arguments, key: value}), halt])
        assert any(subsequence(found, one) for one in allowed), (edited, found)
        same = found == calls
        counts["same" if same else "fewer" if subsequence(found, calls) else "the value"] += 1
    assert counts["same"]
    assert counts["the value"]
    assert counts["fewer"] > counts["the value"]


# Whole marks, halves of them and what stands between: each format's, so that they meet by chance.
PARTS = [
    "<think>", "</think>", "hm", " ", "\n", ";", "{", "}", ")", "`", "<", "<tool_call>",
    "</tool_call>", '{"name": "weather", "arguments": {"days": 3, "of": ["1"]}}',
    '{"name": "halt"}', '{"name": "weather", "parameters": {"city": "x"}}', "<tool_call",
    "<function=weather>", "<function=halt>", "</function>", "<parameter=days>", "2",
    "</parameter>", "weather", "halt", "<arg_key>", "days", "</arg_key>", "<arg_value>",
    "</arg_value>", BEGIN, CALL, "function", SEP, "```json\n", "```", END, ENDS, "<|channel|>",
    "analysis", "commentary", "final", " to=functions.weather", " to=halt", "<|message|>",
    "<|start|>assistant", "<|constrain|>", "json", "<|end|>", "<|call|>", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", "[THINK]", "[/THINK]", "[", "]", "<|python_tag|>", "weather.call(", "halt.call(",
    SECTION, KIMI, KIMI_ARGUMENTS, KIMI_END, SECTION_END, "functions.weather:0", "halt:1",
    "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>",
    '<invoke name="weather">', '<invoke name="halt">', '<parameter name="days">', "</invoke>",
    f"<{DSML}function_calls>", f"</{DSML}function_calls>", f'<{DSML}invoke name="weather">',
    f'<{DSML}invoke name="halt">', f'<{DSML}parameter name="days" string="false">',
    f"</{DSML}parameter>", f"</{DSML}invoke>", 'days="3"', "{}", '{"city": "y"}', ",", "NaN",
]  # fmt: skip
# What stands around the arguments of a call that is whole, the name left open.
AROUND: dict[str, list[tuple[str, str]]] = {
    "qwen3_coder": [(r"<tool_call>\s*<function=%s>", r"\s*</function>\s*</tool_call>")],
    "glm45": [(r"<tool_call>\s*%s\s*", r"\s*</tool_call>")],
    "hermes": [("<tool_call>", r"\s*(</tool_call>|\Z)")],
    "deepseekv3": [(rf"{CALL}\s*function{SEP}%s\n```json\n", rf"\s*```\s*{END}")],
    "deepseekv31": [(f"{CALL}%s{SEP}", rf"\s*{END}")],
    "seed_oss": [(r"<seed:tool_call>\s*<function=%s>", r"\s*</function>\s*</seed:tool_call>")],
    "minimax-m2": [(r'<invoke name="%s">', r"\s*</invoke>")],
    "deepseekv32": [(rf'<{DSML}invoke name="%s">', rf"\s*</{DSML}invoke>")],
    "kimi_k2": [
        (
            rf"{re.escape(KIMI)}\s*(?:functions\.)?%s:\d+\s*{re.escape(KIMI_ARGUMENTS)}",
            rf"\s*{re.escape(KIMI_END)}",
        )
    ],
    "gpt-oss": [
        (r" to=(functions\.)?%s[^{]*<\|message\|>", r"\s*(<\|(call|end|return)\|>|\Z)")
    ],
    "mistral": [
        (r"\[TOOL_CALLS\]\s*%s(\s|\[CALL_ID\]\s*\w+|\[ARGS\])*", ""),
        (r"\[TOOL_CALLS\]", ""),
    ],
    "llama3": [("", ""), (r"<\|python_tag\|>\s*%s\.call\(", r"\s*\)")],
}  # fmt: skip
TAGS = {
    "seed_oss": r"\s*<parameter=(\w+)>([^<]*)</parameter>",
    "minimax-m2": r'\s*<parameter name="(\w+)">([^<]*)</parameter>',
    "deepseekv32": rf'\s*<{DSML}parameter name="(\w+)" string="\w+">'
    rf"((?:[^<]|<(?!/?{DSML}))*)</{DSML}parameter>",
    "qwen3_coder": r"\s*<parameter=(\w+)>\n?([^<]*?)\n?</parameter>",
    "glm45": r"\s*<arg_key>\s*(\w+)\s*</arg_key>\s*<arg_value>([^<]*)</arg_value>",
    "llama3": r"\s*(\w+)\s*=\s*\"([^\"]*)\"\s*,?",
}


def stands_in(name: str, text: str, call: tuple[str, Any]) -> bool:
    """Whether a call stands in a text with all of its marks, and nothing else between them."""
    for before, behind in AROUND[name]:
        pattern = before % call[0] if "%s" in before else before
        for start in re.finditer(pattern, text):
            for at, arguments in readings(name, text, start.end(), call, "%s" in before):
                if arguments == call[1] and re.match(behind, text[at:]):
                    return True
    return False


def readings(
    name: str, text: str, at: int, call: tuple[str, Any], named: bool
) -> Iterator[tuple[int, Any]]:
    """What may be said from a place on: where it ends, and the arguments of the call there."""
    if name in TAGS and named:
        found = {}
        while argument := re.match(TAGS[name], text[at:]):
            as_text = argument[1] == "city"
            read = ast.literal_eval if name == "seed_oss" else json.loads
            found[argument[1]] = argument[2] if as_text else read(argument[2])
            at += argument.end()
            yield at, dict(found)
        if not found:
            yield at, {}
        return
    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        said, end = json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        return
    for one in said if isinstance(said, list) else [said]:
        if named:
            yield end, one
        elif isinstance(one, dict) and one.get("name") == call[0]:
            yield end, one.get("arguments", one.get("parameters", {}))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), head=st.sampled_from(["", "<think>hm</think>"]))
def test_what_runs_stands_whole_in_what_the_model_wrote(
    name: str, data: st.DataObject, head: str
) -> None:
    """Of marks in any order, and of pieces of turns."""
    turns = [whole(values, turn) for one, values, turn in TURNS if one == name]
    cuts = st.sampled_from(turns).flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
            lambda ends: text[min(ends) : max(ends)]
        )
    )
    parts = data.draw(st.lists(st.one_of(st.sampled_from([*PARTS, *turns]), cuts), max_size=8))
    text = head + "".join(parts)
    for call in runnable(name, text):
        assert stands_in(name, text, call), (text, call)
