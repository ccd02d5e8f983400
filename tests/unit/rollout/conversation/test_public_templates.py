"""The suffix rule against full rendering, for chat templates that models were published with.

They are read from the package `trl`, which holds them as they are; it is not imported. Those that
it lacks are in family_templates.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.data.messages import Message
from rlcore.data.tokenizer import render_chat
from rlcore.errors import ConfigError, DataError
from rollout.conversation.chat_template import ChatTemplate

from .family_templates import WRITTEN_HERE
from .kit import ScriptedModel, converse, ids, make_context, make_prompt, make_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Find.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "what"}},
                "required": ["x"],
            },
        },
    }
]
IM_END = "<|im_end|>"
# By template: the token that ends its turns, and whether appending results of a tool, and a user's
# message, gives what full rendering gives. None: the template takes no tools.
KNOWN: dict[str, tuple[str, bool | None, bool]] = {
    "qwen2_5": (IM_END, True, True),
    "qwen3": (IM_END, True, False),
    "qwen3_instruct_2507": (IM_END, True, True),
    "qwen3_5_think": (IM_END, True, False),
    "qwen3_5_nothink": (IM_END, True, False),
    "qwen3_6": (IM_END, True, False),
    "llama3": ("<|eot_id|>", None, True),
    "llama3_1": ("<|eot_id|>", True, True),
    "llama3_2": ("<|eot_id|>", True, True),
    "glm4moe": ("<|user|> <|observation|>", True, False),
    "gptoss": ("<|return|> <|call|> <|end|>", True, False),
    "nemotron_3_nano": (IM_END, True, False),
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>", None, False),
    "gemma3": ("<end_of_turn>", None, True),
    "phi3_5": ("<|end|>", None, True),
    "lfm2_v2": (IM_END, True, True),
    "cohere": ("<|END_OF_TURN_TOKEN|>", None, True),
    "kimi_k2": (IM_END, True, True),
    "minimax_m2": ("[e~[", True, False),
    "seed_oss": ("<seed:eos>", True, True),
    "deepseek_v32": ("<｜end▁of▁sentence｜>", True, True),
    "mistral_7": ("</s>", True, True),
    "mistral_13": ("</s>", True, True),
}


def template_text(name: str) -> str:
    if name in WRITTEN_HERE:
        return WRITTEN_HERE[name]
    spec = find_spec("trl")
    assert spec is not None, "trl is a package of the extra dev"
    folder = Path(str(spec.origin)).parent / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer_of(name: str) -> Any:
    return make_tokenizer(template_text(name), stops=KNOWN[name][0].split())


def template_of(name: str) -> ChatTemplate:
    tokenizer = tokenizer_of(name)
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in KNOWN[name][0].split()]
    return ChatTemplate(tokenizer, stops)


@pytest.mark.parametrize("name", KNOWN)
def test_what_appending_keeps(name: str) -> None:
    _, tool, user = KNOWN[name]
    template = template_of(name)
    assert template.keeps_the_past("user") is user
    if tool is not None:
        assert template.keeps_the_past("tool", TOOLS) is tool


def begin(name: str, script: Callable[..., str], history: str | None = None) -> Any:
    """A conversation under a template, and the model that it is with."""
    tokenizer = tokenizer_of(name)
    stops = KNOWN[name][0].split()
    model = ScriptedModel(tokenizer, script, stop=stops[0])
    settings = WorkflowConfig.model_validate({"history": history})
    context = make_context(tokenizer, stops=stops, settings=settings)
    return context.conversation(make_prompt(tokenizer, "question"), 0, 0, model), model


@pytest.mark.parametrize("name", [name for name, (*_, user) in KNOWN.items() if user])
async def test_requests_are_those_of_full_rendering(name: str) -> None:
    """Three turns, each prompt by suffixes: what the template makes of all messages at once."""
    conversation, model = begin(name, lambda _, request: f"answer{request.turn}")
    await converse(conversation, "again0", "again1")
    tokenizer = model.tokenizer
    for turn, request in enumerate(model.requests):
        asked = conversation.messages[: 1 + 2 * turn]
        full = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert np.array_equal(request.prompt, ids(tokenizer, full))
    assert len(model.requests) == 3


@pytest.mark.parametrize("name", [name for name, (*_, user) in KNOWN.items() if not user])
def test_where_the_past_would_change_the_user_must_choose(name: str) -> None:
    def samples(history: str | None, said: str) -> int:
        conversation, _ = begin(name, lambda *_: said, history)
        return len(asyncio.run(converse(conversation, "more")).samples())

    with pytest.raises(ConfigError, match=r"rollout\.workflow\.history: the chat template of"):
        samples(None, "answer")
    assert samples("keep", "<think>hm</think>answer") == 1
    assert samples("branch", "<think>hm</think>answer") == 2
    # where nothing of it is dropped, the branch goes on
    assert samples("branch", "answer") == (1 if name == "qwen3" else 2)


def test_a_template_that_names_calls_by_their_ids_shows_those_of_its_form_alone() -> None:
    def rendered(own: str) -> str:
        call = {"id": own, "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages = [*asked("go"), turn, *results("5")]
        return render_chat(
            tokenizer_of("kimi_k2"), messages, "row 1", add_generation_prompt=True, tools=TOOLS
        )

    for own in ("functions.f:0", "f:12"):
        assert f'<|tool_call_begin|>{own}<|tool_call_argument_begin|>{{"x": "y"}}' in rendered(own)
    with pytest.raises(DataError, match="leaves out calls"):
        rendered("call00000")


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_results_of_two_calls_follow_where_the_template_writes_one_call_a_turn(name: str) -> None:
    template = template_of(name)
    results = [{"role": "tool", "name": "f", "content": f"found {i}"} for i in range(2)]
    one, two = (template.suffix(results[:n], TOOLS, last_token=None) for n in (1, 2))
    first, both = (template.tokenizer.decode(tokens.tolist()) for tokens in (one, two))
    head = template.head
    assert both == first.removesuffix(head) + first.removeprefix("<|eot_id|>").replace("0", "1")


CONTENTS = [
    "5",
    "The result is 7.",
    '{"text": "it\'s \\"7\\"", "of": [1, 2]}',
    "<tool_response>5</tool_response>",
    "<think>no</think> yes </think>",
    "two\nlines\n\n\tand more",
    " with spaces \n",
    "",
    "None",
]

ONE_CALL = ("llama3_1", "llama3_2")  # these templates refuse several calls at once


def results(*contents: str) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": f"call{i:05d}", "name": "f", "content": content}
        for i, content in enumerate(contents)
    ]


def asked(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


def behind_a_turn(tokenizer: Any, stops: list[str], new: list[Message]) -> str:
    """Render a turn that ends in a word of its own, and `new`, and cut behind the turn's stop."""
    turn: Message = {"role": "assistant", "content": "wordofitsown"}
    if new[0]["role"] == "tool":
        call = {"name": "f", "arguments": {"x": "wordofitsown"}}
        turn["content"] = ""
        turn["tool_calls"] = [
            {"id": message["tool_call_id"], "type": "function", "function": call} for message in new
        ]
    messages = [{"role": "user", "content": "a"}, turn, *new]
    text = str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ).rpartition("wordofitsown")[2]
    first = min((text.index(stop), stop) for stop in stops if stop in text)
    return text[first[0] + len(first[1]) :]


@pytest.mark.parametrize("name", KNOWN)
def test_suffixes_are_those_of_the_template(name: str) -> None:
    """Contents with the words of templates in them, and such as templates trim."""
    stops, takes_tools, _ = KNOWN[name]
    tokenizer = tokenizer_of(name)
    template = template_of(name)
    stop = tokenizer.convert_tokens_to_ids(stops.split()[0])
    news = [asked(content) for content in CONTENTS]
    if takes_tools:
        news += [results(content) for content in CONTENTS]
    if takes_tools and name not in ONE_CALL:
        news += [results(content, "b", content) for content in CONTENTS]
    for new in news:
        expected = ids(tokenizer, behind_a_turn(tokenizer, stops.split(), new))
        assert np.array_equal(template.suffix(new, last_token=stop), expected), new
