"""The ways in which models write reasoning and tool calls.

Formats have the names of SGLang's `--tool-call-parser`, which has none for Seed-OSS. A format
accounts for every character of a call; a call with other characters is not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class CallForm:
    """Regular expressions for the parts of a call after its beginning.

    Attributes:
        head: text before the arguments; it may capture the `name`, and the call's `id`, by which
            the chat template names the call or its result.
        arguments: the kind of JSON: a `map` of arguments, a `call` with its name, a list of
            `calls`; or an expression that captures `key` and `value` of one argument as text, and
            whether the value `is_text` (`true`) or JSON (`false`), where the model says so.
        end: text after the arguments.
        margin: text that chat templates write on each side of a value.
        literals: the language of values that are no texts.
    """

    head: str
    arguments: Literal["map", "call", "calls"] | str
    end: str = ""
    margin: str = ""
    literals: Literal["json", "python"] = "json"

    @property
    def is_json(self) -> bool:
        """Whether the arguments are JSON rather than texts between marks."""
        return self.arguments in ("map", "call", "calls")

    @property
    def shape(self) -> str:
        """The message to the model about a call that cannot be read."""
        if self.arguments == "map":
            return 'a call must be JSON: its arguments as {"name": value}'
        if self.is_json:
            return 'a call must be JSON: {"name": text, "arguments": {...}}'
        return "a call must have each argument between marks of its own, and no text between them"


@dataclass(frozen=True)
class Format:
    """One way to write calls.

    Attributes:
        marks: texts that identify a chat template of this format; it must contain all of them.
        begin: the beginning of a call.
        forms: possible continuations; the first that fits counts.
        until: where reading resumes after an unreadable call; without it, the call takes the rest.
        thought: the beginning and the end of a thought.
        said: the marks of plain text, if it has any.
    """

    marks: tuple[str, ...]
    begin: str
    forms: tuple[CallForm, ...]
    until: str
    thought: tuple[str, str] = THINK
    said: tuple[str, str] | None = None


# A value ends at its mark. If another argument begins inside it, a mark is missing.
_PARAMETER = r"[^<]*(?:<(?!/parameter>|parameter=)[^<]*)*"
_ARG_VALUE = r"[^<]*(?:<(?!/arg_value>|arg_value>|arg_key>)[^<]*)*"

_CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
_CALL_BEGIN = "<｜tool▁call▁begin｜>"
_DEEPSEEK_BEGIN = rf"\s*(?:{_CALLS_BEGIN}\s*)?(?={_CALL_BEGIN})|{_CALLS_BEGIN}"
_DEEPSEEK_END = r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?"

_DSML = "｜DSML｜"
_DSML_CALLS = f"<{_DSML}function_calls>"
_DSML_END = rf"</{_DSML}invoke>(?:\s*</{_DSML}function_calls>)?"
_DSML_VALUE = rf"[^<]*(?:<(?!/?{_DSML})[^<]*)*"

_KIMI_CALLS = r"<\|tool_calls_section_begin\|>"
_KIMI_CALL = r"<\|tool_call_begin\|>"
_KIMI_END = r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?"

_MINIMAX_CALLS = "<minimax:tool_call>"
_MINIMAX_END = r"</invoke>(?:\s*</minimax:tool_call>)?"
_MINIMAX_VALUE = r"[^<]*(?:<(?!/parameter>|parameter name=)[^<]*)*"

_MESSAGE = r"<\|message\|>"
_SPEAKER = r"<\|start\|>assistant"
_TO = r" to=(?:functions\.)?(?P<name>[^\s<]+)"
_CHANNEL = r"<\|channel\|>(?:commentary|analysis)"
_TYPE = r"\s*(?:<\|constrain\|>)?\s*(?:json|code)?\s*"
_MESSAGE_END = r"<\|(?:call|end|return)\|>"
_TEXT_END = r"<\|(?:end|return)\|>"

# A call without an end mark must be the last thing on its line.
_MISTRAL_CALL = r"\[TOOL_CALLS\]"
_MISTRAL_END = rf"[^\S\n]*(?=\Z|\n|{_MISTRAL_CALL})"

# some models write the kind first; other JSON maps with a name are no calls
_LLAMA_CALL = (
    r"(?<!\":)(?<!\":\s)(?<![,\[{])(?<![,\[{]\s)"
    r"(?=\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?\"name\"\s*:)"
)

# By name. The first one whose marks are in the chat template is the default.
FORMATS: Mapping[str, Format] = {
    # Seed-OSS: Qwen3-Coder's calls between other marks, with values as Python writes them
    "seed_oss": Format(
        ("<seed:tool_call>",),
        begin="<seed:tool_call>",
        forms=(
            CallForm(
                r"\s*<function=(?P<name>[^<>\n]+)>",
                rf"\s*<parameter=(?P<key>[^<>\n]+)>(?P<value>{_PARAMETER})</parameter>",
                r"\s*</function>\s*</seed:tool_call>",
                literals="python",
            ),
        ),
        until="</seed:tool_call>",
        thought=("<seed:think>", "</seed:think>"),
    ),
    # MiniMax-M2: <minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke>...
    "minimax-m2": Format(
        ("<minimax:tool_call>",),
        # A further call follows the one before it directly.
        begin=(
            rf"(?:{_MINIMAX_CALLS}\s*|(?<=</invoke>)|(?<=</invoke>\n))(?=<invoke )"
            rf"|{_MINIMAX_CALLS}"
        ),
        forms=(
            CallForm(
                r"<invoke name=\"(?P<name>[^\"<>\n]+)\">",
                r"\s*<parameter name=\"(?P<key>[^\"<>\n]+)\">"
                rf"(?P<value>{_MINIMAX_VALUE})</parameter>",
                rf"\s*{_MINIMAX_END}",
            ),
        ),
        until=rf"{_MINIMAX_END}|</minimax:tool_call>",
    ),
    # Qwen3-Coder, Qwen3.5: <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    "qwen3_coder": Format(
        ("<function=",),
        begin="<tool_call>",
        forms=(
            CallForm(
                r"\s*<function=(?P<name>[^<>\n]+)>",
                rf"\s*<parameter=(?P<key>[^<>\n]+)>(?P<value>{_PARAMETER})</parameter>",
                r"\s*</function>\s*</tool_call>",
                margin="\n",
            ),
        ),
        until="</tool_call>",
    ),
    # GLM-4.5 to 4.7: <tool_call>f <arg_key>x</arg_key> <arg_value>1</arg_value></tool_call>
    "glm45": Format(
        ("<arg_key>",),
        begin="<tool_call>",
        forms=(
            CallForm(
                r"\s*(?P<name>[^\s<]+)",
                r"\s*<arg_key>\s*(?P<key>[^<]*?)\s*</arg_key>"
                rf"\s*<arg_value>(?P<value>{_ARG_VALUE})</arg_value>",
                r"\s*</tool_call>",
            ),
        ),
        until="</tool_call>",
    ),
    # Hermes, Qwen2.5, Qwen3: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    "hermes": Format(
        ("<tool_call>",),
        begin="<tool_call>",
        forms=(CallForm(r"\s*", "call", r"\s*(?:</tool_call>|\Z)"),),
        until="</tool_call>",
    ),
    # DeepSeek-V3, R1: ...begin｜>function<｜tool▁sep｜>f ```json {"x": 1} ```<｜tool▁call▁end｜>
    "deepseekv3": Format(
        ("<｜tool▁sep｜>", "```json"),
        begin=_DEEPSEEK_BEGIN,
        forms=(
            CallForm(
                rf"{_CALL_BEGIN}\s*function<｜tool▁sep｜>(?P<name>[^<\n]+)\n```json\n\s*",
                "map",
                rf"\s*```\s*{_DEEPSEEK_END}",
            ),
        ),
        until=_DEEPSEEK_END,
    ),
    # DeepSeek-V3.1: ...begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>
    "deepseekv31": Format(
        ("<｜tool▁sep｜>",),
        begin=_DEEPSEEK_BEGIN,
        forms=(
            CallForm(
                rf"{_CALL_BEGIN}(?P<name>[^<]+)<｜tool▁sep｜>\s*", "map", rf"\s*{_DEEPSEEK_END}"
            ),
        ),
        until=_DEEPSEEK_END,
    ),
    # DeepSeek-V3.2, with | for ｜: <|DSML|function_calls><|DSML|invoke name="f">
    # <|DSML|parameter name="x" string="false">1</|DSML|parameter></|DSML|invoke>...
    "deepseekv32": Format(
        (_DSML,),
        begin=rf"(?:{_DSML_CALLS}\s*)?(?=<{_DSML}invoke )|{_DSML_CALLS}",
        forms=(
            CallForm(
                rf"<{_DSML}invoke name=\"(?P<name>[^\"<>\n]+)\">",
                rf"\s*<{_DSML}parameter name=\"(?P<key>[^\"<>\n]+)\""
                r" string=\"(?P<is_text>true|false)\">"
                rf"(?P<value>{_DSML_VALUE})</{_DSML}parameter>",
                rf"\s*{_DSML_END}",
            ),
        ),
        until=rf"{_DSML_END}|</{_DSML}function_calls>",
    ),
    # Kimi-K2: ...begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>
    "kimi_k2": Format(
        ("<|tool_call_argument_begin|>",),
        begin=rf"(?:{_KIMI_CALLS}\s*)?(?={_KIMI_CALL})|{_KIMI_CALLS}",
        forms=(
            CallForm(
                rf"{_KIMI_CALL}\s*(?P<id>(?:functions\.)?(?P<name>[^\s<|:]+):\d+)\s*"
                r"<\|tool_call_argument_begin\|>\s*",
                "map",
                rf"\s*{_KIMI_END}",
            ),
        ),
        until=rf"{_KIMI_END}|<\|tool_calls_section_end\|>",
    ),
    # gpt-oss: <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
    "gpt-oss": Format(
        ("<|channel|>", "<|call|>"),
        begin=rf"(?:{_SPEAKER}|\A)(?= to=)|(?:{_SPEAKER})?(?={_CHANNEL}\s+to=)",
        forms=(
            CallForm(f"{_TO}{_CHANNEL}{_TYPE}{_MESSAGE}\\s*", "map", rf"\s*(?:{_MESSAGE_END}|\Z)"),
            CallForm(f"{_CHANNEL}{_TO}{_TYPE}{_MESSAGE}\\s*", "map", rf"\s*(?:{_MESSAGE_END}|\Z)"),
        ),
        until=_MESSAGE_END,
        thought=(rf"(?:{_SPEAKER})?<\|channel\|>analysis{_MESSAGE}", _TEXT_END),
        said=(
            rf"(?:{_SPEAKER})?<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w+)?{_MESSAGE}",
            _TEXT_END,
        ),
    ),
    # Mistral: [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]; since version 11 of its
    # tokenizer: [TOOL_CALLS]f[ARGS]{"x": 1}
    "mistral": Format(
        ("[TOOL_CALLS]",),
        begin=_MISTRAL_CALL,
        forms=(
            CallForm(r"\s*(?=\[)", "calls", _MISTRAL_END),
            CallForm(
                r"\s*(?P<name>[^\s\[{]+)\s*"
                r"(?:\[CALL_ID\]\s*(?:(?P<id>[A-Za-z0-9]{9})\b|\w+)\s*)?(?:\[ARGS\]\s*)?",
                "map",
                _MISTRAL_END,
            ),
        ),
        until=rf"(?={_MISTRAL_CALL})",
        thought=(r"\[THINK\]|<think>", r"\[/THINK\]|</think>"),
    ),
    # Llama 3: {"name": "f", "parameters": {"x": 1}}, several apart by ";", and for tools that the
    # model knows by itself <|python_tag|>f.call(x="1")
    "llama3": Format(
        ('"parameters": ', "ipython"),
        begin=rf"<\|python_tag\|>|{_LLAMA_CALL}",
        forms=(
            CallForm(r"\s*", "call", r"(?:\s*;(?=\s*(?:\{|\Z)))?"),
            CallForm(
                r"\s*(?P<name>\w+)\.call\(",
                r"\s*(?P<key>\w+)\s*=\s*\"(?P<value>[^\"\\\n]*)\"\s*(?:,|(?=\)))",
                r"\s*\)[^\S\n]*(?=\Z|\n|<\|python_tag\|>)",
            ),
        ),
        until=r"(?=<\|python_tag\|>)",
    ),
}
