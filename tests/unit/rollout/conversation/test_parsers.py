"""Calls of tools in the formats of many families: what their chat templates write is read back."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from rlcore.config.sections.rollout import ToolParser
from rlcore.errors import ConfigError
from rollout.conversation.formats import FORMATS
from rollout.conversation.reply_parser import ReplyParser

from .kit import make_tokenizer
from .test_public_templates import KNOWN, template_text

ARGUMENTS = {"city": 'Zürich; {"name": 1}', "days": 3, "exact": True, "of": ["a", "b"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where"},
                    "days": {"type": "integer", "description": "how long"},
                    "exact": {"type": "boolean", "description": "how"},
                    "of": {"type": "array", "items": {"type": "string"}, "description": "what"},
                },
                "required": ["city"],
            },
        },
    }
]
# By template: the format that it shows, how many calls a turn may have, whether it writes text
# beside them, and whether arguments are a text of JSON.
TEMPLATES: dict[str, tuple[str, int, bool, bool]] = {
    "qwen2_5": ("hermes", 2, True, False),
    "qwen3": ("hermes", 2, True, False),
    "qwen3_instruct_2507": ("hermes", 2, True, False),
    "qwen3_5_think": ("qwen3_coder", 2, True, False),
    "nemotron_3_nano": ("qwen3_coder", 2, True, False),
    "glm4moe": ("glm45", 2, True, False),
    "llama3_1": ("llama3", 1, False, False),
    "llama3_2": ("llama3", 1, False, False),
    "deepseekv3": ("deepseekv3", 2, True, True),
    "gptoss": ("gpt-oss", 1, False, False),
    "qwen3_6": ("qwen3_coder", 2, True, False),
    "kimi_k2": ("kimi_k2", 2, True, False),
    "minimax_m2": ("minimax-m2", 2, True, False),
    "seed_oss": ("seed_oss", 2, True, False),
    "deepseek_v31": ("deepseekv31", 2, True, True),
    "deepseek_v32": ("deepseekv32", 2, True, False),
    "mistral_7": ("mistral", 2, True, False),
    "mistral_13": ("mistral", 2, True, False),
}
# The ids that a model writes, where chat templates write them again.
OWN_IDS = {
    "kimi_k2": ("functions.weather:3", "functions.weather:4"),
    "mistral": ("aB3dE5gH7", "123456789"),
}


def render(name: str, *messages: dict[str, Any], head: bool = False) -> str:
    tokenizer = make_tokenizer(template_text(name))
    return str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "How is it?"}, *messages],
            tools=TOOLS,
            tokenize=False,
            add_generation_prompt=head,
        )
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_calls_that_a_public_template_writes_are_read(name: str) -> None:
    """The text of the rendered turn, up to its stop token, gives the calls that were rendered."""
    format_name, count, beside, as_text = TEMPLATES[name]
    arguments: Any = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
    ids = OWN_IDS.get(format_name, ("call00000", "call00001"))[:count]
    function = {"name": "weather", "arguments": arguments}
    said = "I look." if beside else ""
    turn: dict[str, Any] = {"role": "assistant", "content": said}
    turn["tool_calls"] = [{"id": own, "type": "function", "function": function} for own in ids]
    whole = render(name, turn)
    asked = render(name, head=True)
    opened = whole.startswith(asked)  # else the head says: think first, and this turn has not
    text = whole[len(asked if opened else render(name)) :]
    stop = min([text.index(s) for s in stops_of(name) if s in text], default=len(text))
    head = asked.removeprefix(render(name)) if opened else ""
    parser = ReplyParser(make_tokenizer(template_text(name)), head=head)
    assert parser.format == format_name
    text = text[:stop].removeprefix("<｜Assistant｜>").removeprefix("<|im_start|>assistant\n")
    reply = parser("", text.removeprefix("]~b]ai\n"), TOOLS)
    assert [(c.name, c.arguments, c.error) for c in reply.calls] == [
        ("weather", ARGUMENTS, "")
    ] * count
    assert reply.text == said
    # What was read is written again as it was.
    again = json.loads(json.dumps(reply.message))
    for call in again["tool_calls"] if as_text else []:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert render(name, again) == whole


def stops_of(name: str) -> list[str]:
    return KNOWN[name][0].split() if name in KNOWN else ["<｜end▁of▁sentence｜>"]


JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
BEGIN, CALL, SEP, END, ENDS = (
    f"<｜{x}｜>"
    for x in (
        "tool▁calls▁begin", "tool▁call▁begin", "tool▁sep", "tool▁call▁end", "tool▁calls▁end",
    )
)  # fmt: skip
SECTION, KIMI, KIMI_ARGUMENTS, KIMI_END, SECTION_END = (
    f"<|tool_{x}|>"
    for x in (
        "calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end",
    )
)  # fmt: skip
DSML = "｜DSML｜"
# As the models write them, where no template of theirs is at hand or it writes one of two ways.
WRITTEN: list[tuple[str, str, int, str, str]] = [
    ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}}}]', 1, "", ""),
    (
        "mistral",
        f'Well. [TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}, "id": "abc123def"}},'
        f' {{"name": "weather", "arguments": {JSON}}}]',
        2, "Well.", "",
    ),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{JSON}", 1, "", ""),
    (
        "mistral",
        f"[THINK]hm[/THINK]Well.[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{JSON}"
        f"[TOOL_CALLS]weather[ARGS]{JSON}",
        2, "Well.", "hm",
    ),
    ("deepseekv31", f"hm</think>Well.{BEGIN}{CALL}weather{SEP}{JSON}{END}{ENDS}", 1, "Well.", "hm"),
    ("deepseekv31", f"{BEGIN}" + f"{CALL}weather{SEP}{JSON}{END}" * 2 + ENDS, 2, "", ""),
    (
        "kimi_k2",
        f"hm</think>Well.{SECTION}"
        + "".join(f"{KIMI}functions.weather:{i}{KIMI_ARGUMENTS}{JSON}{KIMI_END}" for i in (7, 8))
        + SECTION_END,
        2, "Well.", "hm",
    ),
    ("kimi_k2", f"{KIMI}weather:0{KIMI_ARGUMENTS} {JSON} {KIMI_END}", 1, "", ""),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>"
        f"json<|message|>{JSON}",
        1, "I look.", "hm",
    ),
    ("gpt-oss", "<|channel|>final<|message|>It rains.", 0, "It rains.", ""),
    ("gpt-oss", "no channel at all", 0, "no channel at all", ""),
    ("llama3", f'<|python_tag|>{{"name": "weather", "parameters": {JSON}}}', 1, "", ""),
    (
        "llama3",
        f'{{"name": "weather", "parameters": {JSON}}}; {{"name": "weather", "parameters": {JSON}}}',
        2, "", "",
    ),
    (
        "llama3",
        f'{{"type": "function", "name": "weather", "parameters": {JSON}}}\n'
        f'{{"name": "weather", "parameters": {JSON}}}',
        2, "", "",
    ),
    ("llama3", '{"answer": 3}', 0, '{"answer": 3}', ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "count", "said", "thought"), WRITTEN)
def test_the_calls_that_models_write_are_read(
    name: str, text: str, count: int, said: str, thought: str
) -> None:
    head = "<think>" if "</think>" in text else ""
    reply = ReplyParser(make_tokenizer(), name, head=head)("", text, TOOLS)
    assert [(c.name, c.arguments) for c in reply.calls] == [("weather", ARGUMENTS)] * count
    assert (reply.text, reply.reasoning) == (said, thought)


@pytest.mark.parametrize(("name", "text", "count", "said", "thought"), WRITTEN)
def test_without_tools_what_looks_like_a_call_is_text(
    name: str, text: str, count: int, said: str, thought: str
) -> None:
    head = "<think>" if "</think>" in text else ""
    reply = ReplyParser(make_tokenizer(), name, head=head)("", text, ())
    assert (reply.calls, reply.reasoning, "tool_calls" in reply.message) == ((), thought, False)
    assert said in reply.text
    assert (JSON in reply.text) is (count > 0)


def test_the_indentation_of_an_argument_is_kept() -> None:
    """It is a line of Python, say. The template's own line breaks are none of it."""
    said = "<parameter=code>\n    return x\n\n</parameter>\n<parameter=n>\n1\n</parameter>"
    text = f"<tool_call>\n<function=insert>\n{said}\n</function>\n</tool_call>"
    properties = {"code": {"type": "string"}, "n": {}}
    tools = [{"function": {"name": "insert", "parameters": {"properties": properties}}}]
    (call,) = ReplyParser(make_tokenizer(), "qwen3_coder")("", text, tools).calls
    assert call.arguments == {"code": "    return x\n", "n": "1"}


def test_a_tool_of_the_model_s_own_is_called_as_in_python() -> None:
    text = '<|python_tag|>brave_search.call(query="rain (today)", lang="de")'
    tools = [{"function": {"name": "brave_search", "parameters": {}}}]
    (call,) = ReplyParser(make_tokenizer(), "llama3")("", text, tools).calls
    assert (call.name, call.arguments) == ("brave_search", {"query": "rain (today)", "lang": "de"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"ci'),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "argu'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"ci'),
        ("deepseekv3", f'{BEGIN}{CALL}function{SEP}weather\n```json\n{{"ci'),
        ("deepseekv31", f'{BEGIN}{CALL}weather{SEP}{{"ci'),
        ("kimi_k2", f'{SECTION}{KIMI}functions.weather:0{KIMI_ARGUMENTS}{{"ci'),
        ("gpt-oss", '<|channel|>commentary to=functions.weather<|message|>{"ci'),
        ("llama3", '{"name": "weather", "parameters": {"ci'),
    ],
)
def test_a_call_that_was_cut_is_a_call_with_a_problem(name: str, text: str) -> None:
    (call,) = ReplyParser(make_tokenizer(), name)("", text, TOOLS).calls
    assert call.arguments is None
    assert "must be JSON" in call.error


BIG = 123456789012345678901234567890


# One call with one argument, in every form.
CALLS = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>'),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>%s</parameter></function></tool_call>"),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>%s</arg_value></tool_call>"),
    ("deepseekv3", f'{BEGIN}{CALL}function{SEP}f\n```json\n{{"a": %s}}\n```{END}{ENDS}'),
    ("deepseekv31", f'{BEGIN}{CALL}f{SEP}{{"a": %s}}{END}{ENDS}'),
    ("kimi_k2", f'{SECTION}{KIMI}functions.f:0{KIMI_ARGUMENTS}{{"a": %s}}{KIMI_END}{SECTION_END}'),
    (
        "seed_oss",
        "<seed:tool_call><function=f><parameter=a>%s</parameter></function></seed:tool_call>",
    ),
    (
        "minimax-m2",
        '<minimax:tool_call><invoke name="f"><parameter name="a">%s</parameter>'
        "</invoke></minimax:tool_call>",
    ),
    (
        "deepseekv32",
        f'<{DSML}function_calls><{DSML}invoke name="f"><{DSML}parameter name="a"'
        f' string="false">%s</{DSML}parameter></{DSML}invoke></{DSML}function_calls>',
    ),
    ("gpt-oss", '<|channel|>commentary to=functions.f<|message|>{"a": %s}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": %s}}]'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": %s}'),
    ("llama3", '{"name": "f", "parameters": {"a": %s}}'),
]


@pytest.mark.parametrize(
    ("name", "text"),
    [*CALLS, ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": %s}"}</tool_call>')],
)
def test_a_number_beyond_64_bits_is_read_and_deep_nesting_breaks_nothing(
    name: str, text: str
) -> None:
    types = {"a": {"type": ["integer", "array"]}}
    tools = [{"function": {"name": "f", "parameters": {"properties": types}}}]
    parser = ReplyParser(make_tokenizer(), name)
    (call,) = parser("", text % BIG, tools).calls
    assert (call.arguments, call.error) == ({"a": BIG}, "")
    for count in (300, 20_000):
        deep = parser("", text % ("[" * count + "]" * count), tools)
        assert all(call.error for call in deep.calls)
        assert deep.calls or deep.text


@pytest.mark.parametrize(
    "function",
    [
        '{"name": "f", "arguments": {"a": "\\ud83d"}}',
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud83d\\"}"}',
        '{"name": "f", "arguments": "{\\"a\\": NaN}"}',
    ],
)
def test_what_json_does_not_know_is_a_problem_of_the_call(function: str) -> None:
    reply = ReplyParser(make_tokenizer())("", f"<tool_call>{function}</tool_call>", TOOLS)
    (call,) = reply.calls
    assert (call.arguments, "must be JSON" in call.error) == (None, True)
    assert "tool_calls" not in reply.message
    (call.name + call.raw).encode()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "1e999e"])
@pytest.mark.parametrize(("name", "text"), [*CALLS, ("llama3", '<|python_tag|>f.call(a="%s")')])
def test_what_is_no_number_is_a_problem_and_loses_no_turn(
    name: str, text: str, number: str
) -> None:
    properties = {"a": {"type": "number"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    reply = ReplyParser(make_tokenizer(), name)(
        "", "Well. " * (name != "gpt-oss") + text % number, tools
    )
    (call,) = reply.calls
    assert call.error
    assert reply.text == "Well." * (name != "gpt-oss")


# Of each: the format, what the model wrote, and what runs.
ODD: list[tuple[str, str, list[dict[str, Any]]]] = [
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call>", []),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>x", []),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>x</parameter>", []),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1<parameter=b>2</parameter></function></tool_call>",
        [],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f>so<parameter=a>1</parameter></function></tool_call>",
        [],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a></tool_call></parameter></function></tool_call>",
        [{"a": "</tool_call>"}],
    ),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", []),
    ("glm45", "<tool_call>f so <arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", []),
    ("hermes", '<tool_call>{"name": "f", "argument": {"a": "1"}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1", "a": "2"}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"c": "1"}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}',
     [{"a": "</tool_call>"}]),
    ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>", []),
    ("mistral", '[TOOL_CALLS]f[ARGS]{}"a": "1"}', []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "1"}}]\nmore', [{"a": "1"}]),
    ("mistral", '[TOOL_CALLS]f{"a": "1"}[TOOL_CALLS]f{"b": "2"}', [{"a": "1"}, {"b": "2"}]),
    (
        "minimax-m2",
        '<minimax:tool_call><invoke name="f"><parameter name="a">x</parameter></invoke>\n'
        '<invoke name="f"><parameter name="b">y</parameter></invoke></minimax:tool_call>',
        [{"a": "x"}, {"b": "y"}],
    ),
    ("minimax-m2", 'As in <invoke name="f"></invoke> above.', []),
    ("minimax-m2", '<minimax:tool_call><invoke name="f">so</invoke></minimax:tool_call>', []),
    (
        "deepseekv32",
        f'<{DSML}invoke name="f"><{DSML}parameter name="a" string="true">5</{DSML}parameter>'
        f"</{DSML}invoke>",
        [{"a": "5"}],
    ),
    (
        "deepseekv32",
        f'<{DSML}invoke name="f"><{DSML}parameter name="a">5</{DSML}parameter></{DSML}invoke>',
        [],
    ),
    ("kimi_k2", f"{SECTION}{KIMI}0{KIMI_ARGUMENTS}{{}}{KIMI_END}", []),
    ("kimi_k2", f"{SECTION}{KIMI}functions.f:0{KIMI_ARGUMENTS}{{}}", []),
    ("llama3", '<|python_tag|>f.call(a=5)', []),
    ("llama3", '<|python_tag|>f.call("5")', []),
    ("llama3", '<|python_tag|>f.call(a="5", a="6")', []),
    (
        "llama3",
        'One: {"name": "f", "parameters": {"a": "1"}}; then {"name": "f", "parameters": {}} Good?',
        [{"a": "1"}, {}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), ODD)
def test_only_what_is_understood_whole_runs(
    name: str, text: str, expected: list[dict[str, Any]]
) -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "string"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    calls = ReplyParser(make_tokenizer(), name)("", text, tools).calls
    # The text of the model is none of a call.
    none: list[None] = [] if text.startswith("As in") else [None]
    assert [None if call.error else call.arguments for call in calls] == (expected or none)
    assert all(call.error or call.arguments is not None for call in calls)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1, 'two', None, True]", [1, "two", None, True]),
        ('{"k": [0.5]}', {"k": [0.5]}),
        ("{'k': 1, 'k': 2}", None),
        ("[1e999]", None),
        ("[1", None),
        ("{1, 2}", None),
        ("__import__('os')", None),
    ],
)
def test_seed_writes_values_as_python_does(text: str, value: Any) -> None:
    """What is no literal that JSON can say stays a text, which the schema refuses."""
    properties = {"a": {"type": ["array", "object"]}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    turn = (
        f"<seed:tool_call><function=f><parameter=a>{text}</parameter></function></seed:tool_call>"
    )
    (call,) = ReplyParser(make_tokenizer(), "seed_oss")("", turn, tools).calls
    assert (call.error == "") is (value is not None)
    assert call.arguments == {"a": text if value is None else value}


def test_the_ids_of_a_turn_are_the_model_s_own_where_its_template_takes_them() -> None:
    def ids(name: str, text: str) -> list[str]:
        reply = ReplyParser(make_tokenizer(), name)("", text, TOOLS)
        assert [call["id"] for call in reply.message["tool_calls"]] == [c.id for c in reply.calls]
        return [call.id for call in reply.calls]

    call = '{"name": "weather", "arguments": {"city": "x"}%s}'
    assert ids(
        "kimi_k2", f'{KIMI}functions.weather:12{KIMI_ARGUMENTS}{{"city": "x"}}{KIMI_END}'
    ) == ["functions.weather:12"]
    own = call % ', "id": "abc123DEF"'
    short = call % ', "id": "1"'
    assert ids("mistral", f"[TOOL_CALLS][{own}, {short}, {call % ''}]") == [
        *("abc123DEF", "call00001", "call00002")
    ]
    assert ids("mistral", '[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "x"}') == [
        "abc123def"
    ]


@pytest.mark.parametrize(
    "text", ["CALL f <a>1", "CALL f <a>1</a>so;", "CALL f <a>1</a><a>2</a>;", "CALL f <a>1</a>"]
)
def test_a_tokenizer_s_own_template_skips_nothing_either(text: str) -> None:
    tokenizer = make_tokenizer()
    called = {
        "open_pattern": r"CALL (?P<name>\w+) ",
        "close": ";",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<(?P<key>\w)>(?P<value>.*?)</\w>"},
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    }
    fields = {"tool_calls": called, "content": {"content": "text"}}
    tokenizer.response_template = {"start_anchor": "assistant\n", "fields": fields}
    properties = {"a": {"type": "integer"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    read = ReplyParser(tokenizer)
    (whole,) = read("assistant\n", "CALL f <a>1</a>;", tools).calls
    (call,) = read("assistant\n", text, tools).calls
    assert (whole.arguments, call.arguments) == ({"a": 1}, None)


def test_the_tokenizer_s_own_template_counts_unless_a_parser_is_named() -> None:
    tokenizer = make_tokenizer()
    tokenizer.response_template = {
        "start_anchor": "assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+) ",
                "close": ";",
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {"content": "text"},
        },
    }
    text = 'so CALL weather {"city": "Bern"};'
    reply = ReplyParser(tokenizer)("<|im_start|>assistant\n", text, TOOLS)
    assert [(c.name, c.arguments) for c in reply.calls] == [("weather", {"city": "Bern"})]
    assert ReplyParser(tokenizer)("<|im_start|>assistant\n", text, ()).text == text
    assert ReplyParser(tokenizer, "hermes")("", text, TOOLS).text == text


def test_every_format_can_be_named_and_no_other() -> None:
    assert {*get_args(ToolParser)} == {"auto", *FORMATS}
    with pytest.raises(ConfigError, match=r"rollout\.tool_parser: 'hermse' is unknown .*mistral"):
        ReplyParser(make_tokenizer(), "hermse")
    assert ReplyParser(make_tokenizer("{{ messages }}")).format == "hermes"
