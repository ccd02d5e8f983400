"""Texts that are kept around contents give what the chat template gives, or are not used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlcore.data.messages import Message
from rollout.conversation.chat_template import ChatTemplate
from rollout.conversation.frames import Frames, Rendered

from .kit import KEEPS_THOUGHTS, STOP, ids, make_tokenizer
from .test_public_templates import KNOWN, template_of, tokenizer_of

CONTENTS = [
    "5",
    "The result is 7.",
    '{"text": "it\'s \\"7\\"", "of": [1, 2]}',
    "<tool_response>5</tool_response>",
    "<think>no</think> yes </think>",
    "two\nlines\n\n\tand more",
    " with spaces \n",
    "",
    "9e4b7d0.",
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


def behind_a_turn(tokenizer: Any, stops: Sequence[str], new: Sequence[Message]) -> str:
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
    """For every content, those for which the text around was kept as well as others."""
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


class CountedFrames(Frames):
    """Frames of a test's template, which counts what it renders."""

    def __init__(self, of_content: str) -> None:
        tokenizer = make_tokenizer(KEEPS_THOUGHTS.replace("{{ m.content }}", of_content))
        self.rendered = 0
        self.template = ChatTemplate(tokenizer, [tokenizer.eos_token_id])
        super().__init__(tokenizer, self.ask)

    def ask(self, new: Sequence[Message]) -> Rendered:
        self.rendered += 1
        return self.template._behind_a_turn(new, ())


def test_a_template_that_copies_contents_renders_them_once() -> None:
    frames = CountedFrames("{{ m.content }}")
    frames.render(results("first", "second"))
    before = frames.rendered
    for content in ("third", "{{ m.content }}", STOP):
        stop, text = frames.render(results(content, "fourth"))
        assert text == (
            f"\n<|im_start|>user\n<tool_response>{content}</tool_response>"
            f"<tool_response>fourth</tool_response>{STOP}\n<|im_start|>assistant\n"
        )
        assert stop == frames.template.tokenizer.eos_token_id
    assert frames.rendered == before


@pytest.mark.parametrize(
    "of_content",
    [
        "{{ m.content | tojson }}",
        "{{ m.content | upper }}",
        "{{ m.content | e }}",
        "{{ m.content[:1000] }}",
        "{{ m.content.splitlines() | join('') }}",
        "{{ m.content.split('</think>')[-1] }}",
        "{{ m.content.replace('badword', '') }}",
        "{{ 'nothing' if m.content == 'badword' else m.content }}",
        "{{ m.content if m.content.startswith('{') and m.content.endswith('}') else '-' }}",
        "{{ '-' if m.content.startswith('<<') and m.content.endswith('>>') else m.content }}",
        "{{ m.content ~ m.content }}",
        "{{ raise_exception('no') if 'badword' in m.content else m.content }}",
    ],
)
def test_a_template_that_looks_at_contents_renders_each(of_content: str) -> None:
    frames = CountedFrames(of_content)
    frames.render(results("first"))
    before = frames.rendered
    frames.render(results("second"))
    assert frames.rendered == before + 1


def test_messages_that_differ_in_more_than_content_have_texts_of_their_own() -> None:
    frames = CountedFrames("{{ m.name }}: {{ m.content }}")
    texts = [
        frames.render([{"role": "tool", "name": name, "content": "5"}])[1].split("<", 3)[2]
        for name in ("f", "g", "f")
    ]
    assert texts == ["tool_response>f: 5", "tool_response>g: 5", "tool_response>f: 5"]


def test_messages_with_values_that_are_no_texts_are_rendered() -> None:
    frames = CountedFrames("{{ m.content }}{{ m.extra }}")
    for extra in (1, True, [1], {"a": 1}):
        new = [{"role": "tool", "content": "5", "extra": extra}]
        assert f"<tool_response>5{extra}</tool_response>" in frames.render(new)[1]
