"""A tokenizer with roles, and a model whose answers a test writes."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlcore.data.generation import Completion, GenerateRequest, SamplingParams
from rlcore.data.prompts import Prompt
from rlcore.data.sample import VersionSpan
from rollout.conversation.conversation import Conversation
from rollout.workflows.context import WorkflowContext

# ChatML, tools and all, in the fewest words.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role != 'tool' or loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>
{{- 'user' if m.role == 'tool' else m.role }}
{% endif %}
{%- if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>
{%- else %}
{%- if m.reasoning_content and KEEPS %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{{- '</tool_call>' }}
{%- endfor %}
{%- endif %}
{%- if m.role != 'tool' or loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
KEEPS_THOUGHTS = TEMPLATE.replace("KEEPS", "true")
DROPS_THOUGHTS = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages if m.role == 'user' %}"
    "{%- set ns.last = messages.index(m) %}{%- endfor %}"
) + TEMPLATE.replace("KEEPS", "loop.index0 > ns.last")
STOP = "<|im_end|>"


def make_tokenizer(
    template: str = KEEPS_THOUGHTS, stops: Sequence[str] = (STOP,)
) -> PreTrainedTokenizerFast:
    """One token a character, the mark of a role, and tokens that end turns."""
    symbols = ["<unk>", "<eos>", "<|im_start|>", STOP, *string.printable]
    model = models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<unk>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token=STOP, bos_token="<eos>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *stops]})
    tokenizer.chat_template = template
    return tokenizer


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> NDArray[np.int32]:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


class ScriptedModel:
    """Writes what `script` says of a request's text, or fewer tokens where the budget is less.

    Its log-probs are the number of the token in all that it wrote, its version is the turn's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        script: Callable[[str, GenerateRequest], str],
        *,
        stop: str = STOP,
    ) -> None:
        self.stop = stop
        self.tokenizer = tokenizer
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.made = 0

    async def __call__(self, request: GenerateRequest) -> list[Completion]:
        self.requests.append(request)
        text = self.tokenizer.decode(request.prompt.tolist())
        tokens = ids(self.tokenizer, self.script(text, request) + self.stop)
        cut = tokens[: request.sampling.max_new_tokens]
        numbers = np.arange(self.made, self.made + len(cut), dtype=np.float32)
        self.made += len(cut)
        reason = "stop" if len(cut) == len(tokens) else "length"
        return [Completion(cut, -numbers, reason, (VersionSpan(request.turn, 0, len(cut)),))]


def make_context(
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_new_tokens: int = 400,
    stops: Sequence[str] = (STOP,),
    **given: Any,
) -> WorkflowContext:
    ends = tuple(tokenizer.convert_tokens_to_ids(stop) for stop in stops)
    sampling = SamplingParams(max_new_tokens, stop_token_ids=ends)
    return WorkflowContext(sampling, given.pop("samples", 1), 5, tokenizer, **given)


def make_prompt(
    tokenizer: PreTrainedTokenizerFast, text: str, row: Mapping[str, Any] | None = None
) -> Prompt:
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Prompt(
        "rows:1", ids(tokenizer, rendered), rendered, row=dict(row or {}), messages=messages
    )


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def by_turn(*texts: str) -> Callable[[str, GenerateRequest], str]:
    """The script of a model that writes these, turn by turn."""
    return lambda _, request: texts[request.turn]


async def converse(conversation: Conversation, *said: str) -> Conversation:
    """Let the model take a turn, and one more behind each of the user's messages."""
    await conversation.generate()
    return await go_on(conversation, *said)


async def go_on(conversation: Conversation, *said: str) -> Conversation:
    """Let the model answer each of the user's messages."""
    for text in said:
        await conversation.append(user(text))
        await conversation.generate()
    return conversation
