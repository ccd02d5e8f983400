"""`rlcore data`: rows as the model will see them, what the reward says of them, and how long."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlcore.config import Config
from rlcore.config.evaluation_sets import evaluation_sets
from rlcore.config.sections.reward import RewardPartConfig
from rlcore.data.examples import SOURCE, Example
from rlcore.data.loading import load_prompts, prompt_stream, shares
from rlcore.data.prompts import Prompt, PromptSet
from rlcore.data.sample import Sample, VersionSpan
from rlcore.data.tokenizer import encode, load_tokenizer
from rlcore.deadlines import REWARD_START_S
from rlcore.errors import DataError
from rlcore.trainer.answers import Answers, labelled_rows
from rollout.asyncio_utils import within
from rollout.engines.checks import check_vocabulary
from rollout.rewards.labels import check_labels
from rollout.rewards.scorer import build_scorer
from rollout.rewards.trial_answers import TrialAnswers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENS = 24  # of a prompt that are spelled


def show_data(config: Config, *, rows: int) -> Iterator[str]:
    """Yield the report. Everything is read and tokenised as at the start of a run.

    Args:
        rows: how many to print of the data, and of each evaluation set; of several files at least
            one each.

    Raises:
        UserError: the data could not be trained on, as `rlcore train` would say.
    """
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
    vocab_size = check_vocabulary(config.model.path, tokenizer)
    if config.is_sft:
        yield from _supervised(config, tokenizer, rows)
        return
    prompts = load_prompts(config, tokenizer)
    yield from _prompts("data", config, prompts, tokenizer, vocab_size, rows)
    if any(source.weight for source in config.data.sources.values()):
        yield from ("", *_weights(config, prompts))
    for given in evaluation_sets(config):
        own = given.config(config)
        prompts = load_prompts(
            own,
            tokenizer,
            given.paths,
            max_prompts=given.max_prompts,
            max_new_tokens=own.evaluation.max_new_tokens,
        )
        yield ""
        yield from _prompts(given.key, own, prompts, tokenizer, vocab_size, rows)


def _supervised(config: Config, tokenizer: PreTrainedTokenizerBase, rows: int) -> Iterator[str]:
    """Yield the report of labelled rows."""
    prompts, answers = labelled_rows(config, tokenizer)
    yield from (f"data: {part}" for part in prompts.all_examples.parts)
    for row in _shown(prompts, rows):
        yield ""
        yield from _row(prompts, row, tokenizer)
        yield from _trained(answers, row, tokenizer)
    yield from ("", *_lengths(prompts, answers))


def _prompts(
    key: str,
    config: Config,
    prompts: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    rows: int,
) -> Iterator[str]:
    """Yield the report of the prompts that a section `key` names."""
    check_labels(config, prompts)
    yield from (f"{key}: {part}" for part in prompts.all_examples.parts)
    shown = _shown(prompts, rows)
    scores = _rewards(config, prompts, shown, tokenizer, vocab_size)
    for row in shown:
        yield ""
        yield from _row(prompts, row, tokenizer)
        yield from scores.get(row, ())
    yield from ("", *_lengths(prompts, None))


def _shown(prompts: PromptSet, rows: int) -> list[int]:
    files = max(1, len(prompts.all_examples.parts))
    return [row for _, part in prompts.by_part() for row in part[: max(1, rows // files)]]


def _row(prompts: PromptSet, row: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    prompt = prompts[row]
    yield f"--- {prompt.prompt_id}: a prompt of {len(prompt.tokens)} tokens"
    yield prompt.text
    ids = prompt.tokens[:_TOKENS].tolist()
    more = ", ..." if len(prompt.tokens) > _TOKENS else ""
    spelled = ", ".join(f"{i} {tokenizer.decode([i])!r}" for i in ids)
    yield f"tokens   {spelled}{more}"
    yield f"label    {prompt.label!r}"


def _trained(answers: Answers, row: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the turns that supervised fine-tuning trains on, by their sequences."""
    sequences = answers.of_row(row)
    for number, (tokens, turns) in enumerate(sequences, start=1):
        if len(sequences) > 1:
            yield f"sequence {number} of {len(sequences)}, {len(tokens)} tokens"
        for start, end in turns:
            said = tokenizer.decode(tokens[start:end].tolist())
            yield f"trained  {end - start} tokens behind {start}: {said!r}"


# --- rewards --------------------------------------------------------------------------------------


def _rewards(
    config: Config,
    prompts: PromptSet,
    rows: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
) -> dict[int, list[str]]:
    """Return of each row what the reward says of its label as the answer, and of a wrong one."""
    reward = config.reward.model_copy(deep=True)
    elsewhere = {name: who for name, part in reward.parts.items() if (who := _who_gives(part))}
    reward.parts = {name: part for name, part in reward.parts.items() if name not in elsewhere}
    if not reward.parts:
        givers = " and ".join(dict.fromkeys(elsewhere.values()))
        return {row: [f"reward   not asked: {givers} gives it"] for row in rows if elsewhere}
    trial = TrialAnswers(reward, prompts)
    asked = {row: trial.of(prompts.examples[row]) for row in rows}
    asked = {row: responses for row, responses in asked.items() if responses}
    untried = {row: ["reward   not tried: the label is no answer"] for row in rows}
    if not asked:
        return untried
    samples = {
        (row, response): _sample(prompts[row], row, response, tokenizer)
        for row, responses in asked.items()
        for response in responses
    }
    scorer = build_scorer(
        reward,
        vocab_size=vocab_size,
        device=config.rollout.engine.device,
        max_new_tokens=config.rollout.sampling.max_new_tokens,
    )

    async def score() -> None:
        try:
            await scorer.start()
            await scorer.score([*samples.values()])
        finally:
            await scorer.close()

    limit_s = REWARD_START_S + reward.timeout_s * len(samples)
    late = f"the reward has not answered after {limit_s:g} s (reward.timeout_s)"
    asyncio.run(within(limit_s, score(), lambda: late))
    lines = {
        row: [
            f"reward   {_said(samples[row, response])} for {what}: {response!r}"
            for response, what in responses.items()
        ]
        for row, responses in asked.items()
    }
    if elsewhere:
        left_out = ", ".join(f"{name} ({who})" for name, who in elsewhere.items())
        next(iter(lines.values())).append(f"         without {left_out}: not asked")
    for row, responses in asked.items():
        *right, wrong = [samples[row, response].reward for response in responses]
        if right and max(right) <= wrong:
            lines[row].append(
                "! the reward finds the label no better than a wrong answer: see that"
                " data.label_key names the answer, and reward.parts reads it"
            )
    return {**untried, **lines}


def _who_gives(part: RewardPartConfig) -> str | None:
    """Who gives a part of the reward that cannot be asked here."""
    if part.model is not None:
        return "a model"
    return "the workflow" if part.source == "workflow" else None


def _sample(prompt: Prompt, row: int, response: str, tokenizer: PreTrainedTokenizerBase) -> Sample:
    try:
        made = encode(tokenizer, [response], [prompt.prompt_id])[0]
    except DataError:  # a tokenizer of few symbols; rewards of text do not care
        made = np.zeros(0, dtype=np.int32)
    mask = np.zeros(len(prompt.tokens) + len(made), dtype=np.uint8)
    mask[len(prompt.tokens) :] = 1
    return Sample(
        draw=row,
        index=0,
        prompt_id=prompt.prompt_id,
        group_id=row,
        rollout_id=row << 20,
        tokens=np.concatenate([prompt.tokens, made]),
        loss_mask=mask,
        rollout_logprobs=np.zeros(len(made), dtype=np.float32),
        versions=(VersionSpan(0, 0, len(made)),),
        finish_reason="stop",
        prompt_text=prompt.text,
        response_text=response,
        label=prompt.label,
        metadata=dict(prompt.row),
    )


def _said(sample: Sample) -> str:
    error = sample.metadata.get("reward_error")
    return (
        f"{sample.reward:g}" if error is None else f"an error ({error}), scored {sample.reward:g}"
    )


# --- counts ---------------------------------------------------------------------------------------


def _lengths(prompts: PromptSet, answers: Answers | None) -> Iterator[str]:
    """Yield a table of lengths by source, and which rows are left out."""
    sources = [_source(example) for example in prompts.all_examples]
    kept: dict[str, list[int]] = defaultdict(list)
    lengths = prompts.lengths
    if answers is not None:
        lengths = answers.lengths
    for row, length in zip(prompts.examples.rows, lengths):
        kept[sources[row]].append(int(length))
    left_out = Counter(sources[row] for rows in prompts.left_out.values() for row in rows.rows)
    width = max(len("source"), *map(len, {*kept, *left_out}))
    names = ("rows", "left out", "min", "median", "p90", "max")
    of_what = "prompts" if answers is None else "prompts with their answers"
    yield f"tokens of {of_what}"
    yield f"{'source':{width}}" + "".join(f"{name:>10}" for name in names)
    for source in sorted({*kept, *left_out}):
        numbers = [len(kept[source]), left_out[source], *_spread(np.array(kept[source]))]
        yield f"{source:{width}}" + "".join(f"{number:>10,}" for number in numbers)
    if answers is not None:
        in_all = f"{len(answers.tokens):,} sequences of {len(prompts):,} rows"
        yield f"trained: {answers.trained:,} of {len(answers.tokens.values):,} tokens, in {in_all}"
    for limit, rows in prompts.left_out.items():
        yield f"left out: {len(rows):,} with more than {limit} tokens, the first is {rows.where(0)}"


def _spread(lengths: NDArray[np.int64]) -> list[int]:
    if not len(lengths):
        return []
    return [int(np.quantile(lengths, q, method="lower")) for q in (0, 0.5, 0.9, 1)]


def _source(example: Example) -> str:
    return str(example.extra.get(SOURCE, "-"))


def _weights(config: Config, prompts: PromptSet) -> Iterator[str]:
    """Yield how much of the draws each source has."""
    found = shares(config, prompts)
    total = sum(share.weight for share in found)
    stream = prompt_stream(config, prompts)
    yield f"draws by source (an epoch is {stream.size:,} draws)"
    for share in found:
        part = share.weight / total
        passes = part * stream.size / share.size
        yield f"  {share.name}: {part:.1%}, each row {passes:.2g} times an epoch"
