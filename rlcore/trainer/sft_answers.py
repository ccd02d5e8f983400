"""The turns that supervised fine-tuning trains on, each after the prompt that it answers.

A row's label is the assistant's message after its prompt. If the row has no label (`data.label_key`
or its value is null), the label is the chat's last message, if the assistant wrote it. Earlier
messages of the assistant are trained on too, unless `data.train_turns` is `last`.

Each turn follows the prompt that the chat template builds for it. One sequence holds several turns
as long as each prompt continues with the tokens of the previous prompt and its answer:

    prompt 1 | answer 1 | prompt 2 | answer 2          the template keeps earlier turns
    prompt 1 | answer 1   and   prompt 2 | answer 2    it rewrites them, e.g. drops their thoughts
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlcore.config import Config
from rlcore.config.derived import compares_pairs
from rlcore.config.evaluation_sets import EvaluationSet
from rlcore.config.sections.data import DataConfig
from rlcore.data.examples import Example, open_examples
from rlcore.data.loading import sft_limits
from rlcore.data.messages import Message, check_messages
from rlcore.data.preferences import COMPLETION
from rlcore.data.prompts import LengthLimit, PromptSet, chunks, render_messages
from rlcore.data.ragged_file import RaggedArray, RaggedWriter
from rlcore.data.tokenizer import encode, shows_calls
from rlcore.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_THOUGHT_BEGINS = "<think>"
_THOUGHT_ENDS = "</think>"
_OPENED_THOUGHT = re.compile(rf"{_THOUGHT_BEGINS}\s*\Z")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # message fields that hold a thought


@dataclass(frozen=True)
class Answers:
    """The trained sequences of each row, and the turns inside them."""

    rows: NDArray[np.int64]  # [N+1]: row i has the sequences rows[i] to rows[i + 1]
    tokens: RaggedArray[np.int32]  # one array per sequence
    turns: RaggedArray[np.int32]  # one array per sequence: start, end, start, end, ...

    def of_row(self, row: int) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Return the tokens and the turn bounds, int32 [turns, 2], of each sequence of a row."""
        return [
            (self.tokens[i], self.turns[i].reshape(-1, 2))
            for i in range(self.rows[row], self.rows[row + 1])
        ]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The tokens of each row's longest sequence, int64 [N]."""
        longest: NDArray[np.int64]
        longest = np.maximum.reduceat(np.diff(self.tokens.offsets), self.rows[:-1])
        return longest

    @property
    def trained(self) -> int:
        """The number of tokens that are trained on."""
        return int(np.diff(self.turns.values.reshape(-1, 2)).sum())

    def take(self, rows: NDArray[np.int64]) -> Answers:
        """Return the answers of the given rows."""
        counts = np.diff(self.rows)[rows]
        kept = [np.arange(*self.rows[row : row + 2]) for row in rows]
        sequences = np.concatenate(kept)
        bounds = np.concatenate([[0], counts.cumsum()])
        return Answers(bounds, self.tokens.take(sequences), self.turns.take(sequences))


def labelled_rows(
    config: Config, tokenizer: PreTrainedTokenizerBase, held_out: EvaluationSet | None = None
) -> tuple[PromptSet, Answers, Answers | None]:
    """Read and tokenise the rows of `data` with their answers.

    Rows that do not fit into the model's context or into a micro-batch are left out, counted and
    logged.

    Args:
        held_out: an evaluation set, whose rows are read instead of those of `data`.

    Returns:
        The prompts, their answers, and in learning from preferences the rejected ones; a row that
        has none has its answer there again.

    Raises:
        DataError: a row without a text label, or without the pair that the estimator compares;
            names it. Also see `tokenize_answers`.
        ConfigError: no row fits.
    """
    given: dict[str, Any] = {}
    most = None
    if held_out is not None:
        config = held_out.config(config)
        given = {"paths": held_out.paths, "key": f"{held_out.key}.paths"}
        most = held_out.max_prompts
    longest = config.data.max_prompt_tokens
    limits = [] if longest is None else [LengthLimit(longest, "data.max_prompt_tokens")]
    data = config.data
    transform = with_good_answer
    if config.is_preference:
        transform = partial(with_preference, pairs=compares_pairs(config))
        # The turns before the last are the same in both answers.
        data = data.model_copy(update={"train_turns": "last"})
    rows = open_examples(data, transform=transform, **given)
    prompts = PromptSet.of(rows, tokenizer, limits=limits, max_prompts=most)
    found = [tokenize_answers(prompts, tokenizer, data)]
    if config.is_preference:
        worse = replace(prompts, examples=prompts.examples.changed(with_rejected))
        found.append(tokenize_answers(worse, tokenizer, data))
    for limit in sorted(sft_limits(config), key=lambda limit: limit.tokens):
        too_long = np.any([answers.lengths > limit.tokens for answers in found], axis=0)
        if too_long.any():
            prompts = prompts.without(too_long, limit)
            found = [answers.take(np.flatnonzero(~too_long)) for answers in found]
    return prompts, found[0], found[1] if config.is_preference else None


def with_good_answer(example: Example) -> Example:
    """Return the row as `with_answer` does. Raises DataError for an answer labelled as bad."""
    if not example.is_good:
        raise DataError(
            f"{example.where}: the 'label' says that the 'completion' is bad, and supervised"
            " fine-tuning would train on it; leave such rows out, or learn from preferences"
            " (algorithm.estimator.name: kto)"
        )
    return with_answer(example)


def with_preference(example: Example, *, pairs: bool) -> Example:
    """Return the row as `with_answer` does, if it has the answers that an estimator compares.

    Raises DataError for a row without two answers, if `pairs`, or without a verdict.
    """
    if example.rejected is None and (pairs or example.label_key != COMPLETION):
        wanted = "'chosen' and 'rejected'"
        wanted += "" if pairs else ", or 'completion' and a 'label' that is true or false"
        raise DataError(f"{example.where}: learning from preferences needs {wanted}")
    return with_answer(example)


def with_rejected(example: Example) -> Example:
    """Return the row with its rejected answer as the label, if it has one."""
    worse = example.rejected
    if worse is None:
        return example
    text = worse if isinstance(worse, str) else worse.get("content")
    message = None if isinstance(worse, str) else worse
    return with_answer(replace(example, label=text, answer=message))


def with_answer(example: Example) -> Example:
    """Return the row with the message to train on in `answer`, and its text in `label`."""
    prompt = example.prompt
    label = example.label
    answer = example.answer
    if isinstance(label, list) and len(label) == 1 and isinstance(label[0], dict):
        # The label is a TRL conversational completion.
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
    # Keep the chat's own message whole: a template may read other fields of it, such as thoughts.
    if answer is None or answer.get("content") != label:
        answer = {"role": "assistant", "content": label}
    return replace(example, prompt=prompt, label=label or "", answer=answer)


def tokenize_answers(
    prompts: PromptSet, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> Answers:
    """Return the turns that the policy learns from each row, each up to its EOS.

    Raises:
        DataError: a turn has no tokens, the tokenizer has no EOS for `add_eos`, or the chat
            template renders the prompt differently once the answer follows.
    """
    eos = tokenizer.eos_token_id
    if data.add_eos and eos is None:
        raise DataError("the tokenizer has no eos token to train on; set data.add_eos: false")
    tokens = RaggedWriter(np.int32)
    turns = RaggedWriter(np.int32)
    counts = [0]
    for chunk in chunks(iter(prompts.examples)):
        first = len(counts) - 1
        rendered = [
            render_turns(example, prompts.text(first + i), tokenizer, data.train_turns)
            for i, example in enumerate(chunk)
        ]
        # The last prompt of a row is encoded already.
        texts = [
            text for row in rendered for turn in (*row[:-1], ("", row[-1][1])) for text in turn
        ]
        sources = [e.where for e, row in zip(chunk, rendered) for _ in range(2 * len(row))]
        encoded = iter(encode(tokenizer, texts, sources))
        for example, row in zip(chunk, rendered):
            found = [(next(encoded), next(encoded)) for _ in row]
            # The prompt set holds the last prompt's tokens, including the BOS of plain text.
            found[-1] = (prompts.ragged[len(counts) - 1], found[-1][1])
            sequences = list(_sequences(example, found, eos, data))
            for sequence, spans in sequences:
                tokens.add(sequence)
                turns.add(np.array(spans, dtype=np.int32).reshape(-1))
            counts.append(len(sequences))
    return Answers(np.cumsum(counts, dtype=np.int64), tokens.done(), turns.done())


def render_turns(
    example: Example, prompt_text: str, tokenizer: PreTrainedTokenizerBase, which: str
) -> list[tuple[str, str]]:
    """Return (prompt, answer) as texts for each trained turn of a row.

    Args:
        prompt_text: the prompt of the last turn.
        which: `data.train_turns`.
    """
    if isinstance(example.prompt, str):
        return [(prompt_text, str(example.label))]
    assert example.answer is not None
    chat = [*example.prompt, example.answer]
    earlier = [] if which == "last" else range(len(example.prompt))
    turns = []
    for index in (i for i in earlier if chat[i]["role"] == "assistant"):
        prompt = render_messages(example, chat[:index], tokenizer)
        turns.append((prompt, _written(example, chat[: index + 1], prompt, tokenizer)))
    return [*turns, (prompt_text, _written(example, chat, prompt_text, tokenizer))]


def _written(
    example: Example, chat: Sequence[Message], prompt: str, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return what the model writes after `prompt` for the last message of `chat`."""

    def turn(last: Sequence[Message]) -> str:
        text = _behind(example, [*chat[:-1], *last], prompt, tokenizer)
        return text.partition(tokenizer.eos_token)[0] if tokenizer.eos_token else text

    if not shows_calls(turn, chat[-1:]):
        raise DataError(
            f"{example.where}: message {len(chat)}: the chat template ends the turn before the last"
            " of its tool calls, which would not be trained on; use fewer calls in a message, or"
            " another template"
        )
    return _behind(example, chat, prompt, tokenizer)


def _behind(
    example: Example, chat: Sequence[Message], prompt: str, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return what the chat template writes after a prompt.

    Most templates write the message as it is. DeepSeek-R1's drops thoughts from messages although
    its prompt opens one; the row's thought, or an empty one, is put back.
    """
    whole = render_messages(example, chat, tokenizer, generate=False)
    content = chat[-1].get("content") or ""
    if whole.startswith(prompt):
        written = whole[len(prompt) :]
        if _THOUGHT_ENDS in content and _THOUGHT_ENDS not in written:
            return _thought(chat[-1]) + written.lstrip()
        return written
    header = _OPENED_THOUGHT.sub("", prompt)
    if header == prompt or not whole.startswith(header):
        closed = prompt.rstrip().endswith(_THOUGHT_ENDS)
        advice = (
            "its prompt says that the model does not think, and the message has a thought: leave"
            " thoughts out of the rows, or change data.chat_template_kwargs"
            if closed
            else "use a template whose prompt is a prefix of the whole chat"
        )
        raise DataError(
            f"{example.where}: message {len(chat)}: the chat template writes the prompt differently"
            f" once the answer follows, so the trained part cannot be determined; {advice}"
        )
    written = whole[len(header) :]
    if written.startswith(_THOUGHT_BEGINS):
        return written.removeprefix(_THOUGHT_BEGINS)
    thought = re.sub(rf"\A\s*{_THOUGHT_BEGINS}\s*", "", _thought(chat[-1]))
    return (thought or f"\n{_THOUGHT_ENDS}\n\n") + written.lstrip()


def _thought(message: Message) -> str:
    """Return a message's thought with its tags and the white space after it, or ""."""
    content = message.get("content") or ""
    if _THOUGHT_ENDS in content:
        rest = content.rpartition(_THOUGHT_ENDS)[2]
        return str(content[: len(content) - len(rest.lstrip())])
    thought = next((message[name] for name in _THOUGHTS if message.get(name)), None)
    if thought is None:
        return ""
    return f"{_THOUGHT_BEGINS}\n{str(thought).strip()}\n{_THOUGHT_ENDS}\n\n"


# The tokens of a turn's prompt, and of its answer.
Turn = tuple[NDArray[np.int32], NDArray[np.int32]]


def _sequences(
    example: Example, turns: Sequence[Turn], eos: int | None, data: DataConfig
) -> Iterator[tuple[NDArray[np.int32], list[list[int]]]]:
    """Yield the sequences of a row, each with the starts and ends of its turns.

    Raises:
        DataError: the label or an earlier turn has no tokens to train on.
    """
    spans: list[list[int]] = []
    for (prompt, written), following in zip(turns, [*turns[1:], None]):
        # A chat template writes its own EOS, often followed by a line break.
        ends = np.flatnonzero(written == eos) if eos is not None else np.zeros(0, dtype=np.int64)
        answer = written[: ends[0]] if len(ends) else written
        if not len(answer) and not (data.add_eos and following):
            raise DataError(
                f"{example.where}: the label {example.label!r}, or a turn before it, has no tokens"
            )
        sequence = np.concatenate([prompt, answer])
        end = len(sequence)
        spans.append([len(prompt), end])
        if following and data.train_turns != "each" and len(following[0]) > end:
            ended = bool(data.add_eos and following[0][end] == eos)
            # The end of the turn is trained on too.
            kept = ended or not data.add_eos or len(answer) == len(written)
            if kept and np.array_equal(following[0][:end], sequence):
                spans[-1][1] += int(ended)
                continue
        if data.add_eos and eos is not None:
            sequence = np.append(sequence, np.int32(eos))
            spans[-1][1] += 1
        yield sequence, spans
        spans = []
