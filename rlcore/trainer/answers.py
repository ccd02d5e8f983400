"""The answers that supervised fine-tuning trains on, as tokens behind and between the prompts'.

A row's label is the assistant's message behind its prompt. Where it has none (`data.label_key` is
null, or its value in the row is), the last message of the chat is the label, if the assistant's.
The assistant's earlier messages are trained on too (`data.train_turns: all`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlcore.config import Config
from rlcore.config.sections.data import DataConfig
from rlcore.data.examples import Example, open_examples
from rlcore.data.loading import sft_limits
from rlcore.data.messages import Message, check_messages
from rlcore.data.prompts import LengthLimit, PromptSet
from rlcore.data.ragged_file import RaggedArray, RaggedWriter
from rlcore.data.tokenizer import ENCODE_CHUNK, encode, render_chat
from rlcore.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answers:
    """What is trained on of each row."""

    labels: RaggedArray[np.int32]  # the tokens behind the prompt
    # Places in the prompt of the assistant's earlier turns: start, end, start, end, ...
    earlier: RaggedArray[np.int32]


def labelled_rows(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[PromptSet, Answers]:
    """Read and tokenise the labelled rows of `data`.

    Rows that cannot fit into the model's context, or into a micro-batch, are left out, counted and
    logged.

    Raises:
        DataError: a row without a text label; names it. Also see `tokenize_answers`.
        ConfigError: no row fits.
    """
    longest = config.data.max_prompt_tokens
    limits = [] if longest is None else [LengthLimit(longest, "data.max_prompt_tokens")]
    examples = open_examples(config.data, transform=with_answer)
    prompts = PromptSet.of(examples, tokenizer, limits=limits)
    answers = tokenize_answers(prompts, tokenizer, config.data)
    for limit in sorted(sft_limits(config), key=lambda limit: limit.tokens):
        too_long = prompts.lengths + np.diff(answers.labels.offsets) > limit.tokens
        if too_long.any():
            kept = np.flatnonzero(~too_long)
            prompts = prompts.without(too_long, limit)
            answers = Answers(answers.labels.take(kept), answers.earlier.take(kept))
    return prompts, answers


def with_answer(example: Example) -> Example:
    """Return the row with the message to train on in `answer`, and its text in `label`."""
    prompt = example.prompt
    label = example.label
    answer = example.answer
    if isinstance(label, list) and len(label) == 1 and isinstance(label[0], dict):
        # the completion of a conversational data set of TRL
        (answer,) = check_messages(example.where, example.label_key or "label", label)
        label = answer["content"]
    chat = prompt if isinstance(prompt, list) else []
    if label is None and answer is None and chat and chat[-1]["role"] == "assistant":
        answer = chat[-1]
        prompt = chat[:-1]
        label = answer["content"]
    calls = answer is not None and bool(answer.get("tool_calls"))
    if not prompt or not (calls or (isinstance(label, str) and label)):
        raise DataError(
            f"{example.where}: sft needs a prompt and a text label (data.label_key), or chat"
            f" messages that end with the assistant's; the label is {label!r}"
        )
    # The chat's own message stays whole: a template may read more of it, as a field of thoughts.
    if answer is None or answer.get("content") != label:
        answer = {"role": "assistant", "content": label}
    return replace(example, prompt=prompt, label=label or "", answer=answer)


def tokenize_answers(
    prompts: PromptSet, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> Answers:
    """Return of each row the tokens that the policy learns, up to the EOS of each turn.

    Raises:
        DataError: a label without tokens, no EOS token for `add_eos`, or a chat template that
            rewrites what came before.
    """
    eos = tokenizer.eos_token_id
    if data.add_eos and eos is None:
        raise DataError("the tokenizer has no eos token to train on; set data.add_eos: false")
    labels = RaggedWriter(np.int32)
    earlier = RaggedWriter(np.int32)
    row = 0
    for chunk in _chunks(iter(prompts.examples)):
        answers = [
            _answer_text(example, prompts.text(row + i), tokenizer)
            for i, example in enumerate(chunk)
        ]
        tokens = encode(tokenizer, answers, [example.where for example in chunk])
        for example, ids in zip(chunk, tokens):
            # A chat template writes an EOS of its own, and often a line break after it.
            ids = ids[: _first(ids, eos)]
            if not len(ids):
                raise DataError(f"{example.where}: the label {example.label!r} has no tokens")
            labels.add(np.append(ids, np.int32(eos)) if data.add_eos else ids)
            spans = (
                _earlier_turns(example, prompts.ragged[row], tokenizer, add_eos=data.add_eos)
                if data.train_turns == "all"
                else []
            )
            earlier.add(np.array(spans, dtype=np.int32).reshape(-1))
            row += 1
    return Answers(labels.done(), earlier.done())


def _answer_text(example: Example, prompt_text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    if isinstance(example.prompt, str):
        return str(example.label)
    assert example.answer is not None
    whole = _render(example, [*example.prompt, example.answer], tokenizer, generate=False)
    if not whole.startswith(prompt_text):
        raise DataError(
            f"{example.where}: the chat template writes the prompt differently once the answer"
            " follows, so it cannot be told what to train on; use a template whose prompt is a"
            " prefix of the whole chat"
        )
    return whole[len(prompt_text) :]


def _earlier_turns(
    example: Example,
    prompt: NDArray[np.int32],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_eos: bool,
) -> list[tuple[int, int]]:
    """Return where the assistant's turns of the prompt are, first and last token (exclusive).

    A turn counts only if the template proves it: the chat up to the turn, as the model would be
    asked for it, and the chat with the turn must both be the beginning of the prompt, token by
    token.
    """
    if isinstance(example.prompt, str):
        return []
    turns = [i for i, message in enumerate(example.prompt) if message["role"] == "assistant"]
    texts = [
        _render(example, example.prompt[: turn + shown], tokenizer, generate=not shown)
        for turn in turns
        for shown in (0, 1)
    ]
    rendered = encode(tokenizer, texts, [example.where] * len(texts))
    spans = []
    for turn, before, after in zip(turns, rendered[::2], rendered[1::2]):
        kept = all(np.array_equal(ids, prompt[: len(ids)]) for ids in (before, after))
        if not kept or len(after) <= len(before):
            raise DataError(
                f"{example.where}: message {turn + 1}, a turn of the assistant, has other tokens"
                " in the chat template once later messages follow, so it cannot be told what to"
                " train on; set data.train_turns: last, or use a template that keeps earlier turns"
                " as they were"
            )
        made = after[len(before) :]
        end = _first(made, tokenizer.eos_token_id)
        ends_with_eos = end < len(made)
        spans.append((len(before), len(before) + end + (ends_with_eos and add_eos)))
    return spans


def _render(
    example: Example,
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    generate: bool,
) -> str:
    return render_chat(
        tokenizer,
        messages,
        example.where,
        add_generation_prompt=generate,
        tools=example.tools,
        chat_kwargs=example.chat_kwargs,
    )


def _first(ids: NDArray[np.int32], token: int | None) -> int:
    """Return the index of the first `token`; without one, the length."""
    found = np.flatnonzero(ids == token) if token is not None else np.zeros(0)
    return int(found[0]) if len(found) else len(ids)


def _chunks(examples: Iterator[Example]) -> Iterator[list[Example]]:
    while chunk := list(islice(examples, ENCODE_CHUNK)):
        yield chunk
