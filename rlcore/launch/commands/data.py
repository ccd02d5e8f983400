"""`rlcore data`: rows as the model sees them, their rewards and their lengths."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlcore.config import Config
from rlcore.config.evaluation_sets import evaluation_sets
from rlcore.data.examples import SOURCE
from rlcore.data.loading import load_prompts, prompt_stream, shares
from rlcore.data.prompts import PromptSet
from rlcore.data.tokenizer import load_tokenizer
from rlcore.deadlines import REWARD_START_S
from rlcore.trainer.sft_answers import Answers, labelled_rows
from rollout.engines.checks import check_vocabulary
from rollout.rewards.audit import RewardAudit, Scored
from rollout.rewards.audit_answers import OTHER, REFUSED, RIGHT
from rollout.rewards.labels import check_labels
from rollout.rewards.scorer import build_scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENS = 24  # tokens of a prompt that are printed


def show_data(config: Config, *, rows: int, ask_services: bool = False) -> Iterator[str]:
    """Yield the report. Everything is read and tokenised as at the start of a run.

    Args:
        rows: how many to print of the data and of each evaluation set, at least one per file.
        ask_services: also call reward services and judges.

    Raises:
        UserError: `rlcore train` would reject the data.
    """
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
    check_vocabulary(config.model.path, tokenizer)
    if config.learns_from_rows:
        yield from _answers(config, tokenizer, rows)
        return

    def report(key: str, of: Config, prompts: PromptSet) -> Iterator[str]:
        check_labels(of, prompts)
        yield from (f"{key}: {part}" for part in prompts.all_examples.parts)
        rewards = _Rewards(of, prompts, tokenizer, ask_services)
        shown = _shown(prompts, rows)
        scored = rewards.score(shown)
        for row in shown:
            yield ""
            yield from _row(prompts, row, tokenizer)
            yield from rewards.of_row([one for one in scored if one.row == row])
        yield ""
        yield from rewards.of_cheap_answers(scored)
        yield from ("", *_lengths(prompts, None))

    prompts = load_prompts(config, tokenizer)
    yield from report("data", config, prompts)
    if any(source.weight for source in config.data.sources.values()):
        found = shares(config, prompts)
        total = sum(share.weight for share in found)
        draws = prompt_stream(config, prompts).size
        yield ""
        yield f"draws by source (an epoch is {draws:,} draws)"
        for share in found:
            part = share.weight / total
            passes = part * draws / share.size
            yield f"  {share.name}: {part:.1%}, each row {passes:.2g} times an epoch"
    for given in evaluation_sets(config):
        own = given.config(config)
        prompts = load_prompts(
            own,
            tokenizer,
            given.paths,
            key=f"{given.key}.paths",
            max_prompts=given.max_prompts,
            max_new_tokens=own.evaluation.max_new_tokens,
        )
        yield ""
        yield from report(given.key, own, prompts)


def _answers(config: Config, tokenizer: PreTrainedTokenizerBase, rows: int) -> Iterator[str]:
    """Yield the report of rows whose answers are trained on, with the trained turns."""
    prompts, *kinds = labelled_rows(config, tokenizer)
    yield from (f"data: {part}" for part in prompts.all_examples.parts)
    for row in _shown(prompts, rows):
        yield ""
        yield from _row(prompts, row, tokenizer)
        example = prompts.examples[row]
        for answers, word in zip(kinds, ("trained", "rejected")):
            if answers is None or (word == "rejected" and example.rejected is None):
                continue
            if not example.is_good:
                word = "bad"
            sequences = answers.of_row(row)
            for number, (tokens, turns) in enumerate(sequences, start=1):
                if len(sequences) > 1:
                    yield f"sequence {number} of {len(sequences)}, {len(tokens)} tokens"
                for start, end in turns:
                    said = tokenizer.decode(tokens[start:end].tolist())
                    yield f"{word:<8} {end - start} tokens behind {start}: {said!r}"
    yield from ("", *_lengths(prompts, kinds[0]))


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


# --- rewards --------------------------------------------------------------------------------------


class _Rewards:
    """Scores answers to rows, and reports the rewards."""

    def __init__(
        self, config: Config, prompts: PromptSet, tokenizer: PreTrainedTokenizerBase, asks: bool
    ) -> None:
        self._config = config
        self._audit = RewardAudit(config.reward, prompts, tokenizer, ask_services=asks)
        self._left_out = [f"{name} ({why})" for name, why in self._audit.left_out.items()]

    def score(self, rows: Sequence[int]) -> list[Scored]:
        """Score answers to `rows` and to the rows of the audit."""
        reward = self._audit.reward
        if not reward.parts:
            return []
        limit = self._config.rollout.sampling.max_new_tokens
        scorer = build_scorer(reward, max_new_tokens=limit)
        asked = list(dict.fromkeys([*rows, *self._audit.rows]))
        limit_s = REWARD_START_S + reward.timeout_s * len(asked)

        async def score() -> list[Scored]:
            try:
                await scorer.start()
                return await self._audit.score(scorer, asked, limit_s)
            finally:
                await scorer.close()

        return asyncio.run(score())

    def of_row(self, scored: Sequence[Scored]) -> Iterator[str]:
        """Yield the rewards of the row's label as an answer, and of a wrong answer."""
        if not self._audit.reward.parts:
            yield f"reward   not asked: {', '.join(self._left_out)}"
            return
        right = [one for one in scored if one.answer.kind is RIGHT]
        wrong = [one for one in scored if one.answer.kind in (OTHER, REFUSED)][:1]
        if not right:
            why = "not tried: the label is not an answer"
            yield f"reward   {why if scored else 'has not answered in time (reward.timeout_s)'}"
            return
        for one in (*right, *wrong):
            what = one.answer.described if one in right else "a wrong answer"
            score = f"{one.sample.reward:g}" if one.sample.is_scored else "without a score"
            failed = "" if one.failed is None else f"an error ({one.failed}), "
            yield f"reward   {failed}{score} for {what}: {one.answer.text!r}"
        if self._left_out:
            yield f"         without {', '.join(self._left_out)}"
        if wrong and max(one.sample.reward for one in right) <= wrong[0].sample.reward:
            yield (
                "! the reward scores the label no higher than a wrong answer: check that"
                " data.label_key names the answer, and reward.parts reads it"
            )

    def of_cheap_answers(self, scored: Sequence[Scored]) -> Iterator[str]:
        """Yield the kinds of answer that score, and on how many audited rows."""
        audited = set(self._audit.rows)
        tried = [one for one in scored if one.row in audited]
        if not tried:
            return
        yield f"answers that score, of {len(tried)} to {len(audited)} rows"
        for found in self._audit.findings(tried):
            mark = "!" if found.pays else " "
            counts = f"{found.paid:>4} of {found.tried}"
            example = f"  {found.example(self._audit.reward)}" if found.paid else ""
            yield f"{mark} {found.kind.name:36}{counts}{example}"
        failed = [one.failed for one in tried if one.failed]
        if failed:
            yield f"  the reward failed on {len(failed)} of them; the first: {failed[0]}"


# --- counts ---------------------------------------------------------------------------------------


def _lengths(prompts: PromptSet, answers: Answers | None) -> Iterator[str]:
    """Yield a table of lengths by source, and the rows that are left out."""
    sources = [str(example.extra.get(SOURCE, "-")) for example in prompts.all_examples]
    kept: dict[str, list[int]] = defaultdict(list)
    lengths = prompts.lengths if answers is None else answers.lengths
    for row, length in zip(prompts.examples.rows, lengths):
        kept[sources[row]].append(int(length))
    left_out = Counter(sources[row] for rows in prompts.left_out.values() for row in rows.rows)
    width = max(len("source"), *map(len, {*kept, *left_out}))
    names = ("rows", "left out", "min", "median", "p90", "max")
    of_what = "prompts" if answers is None else "prompts with their answers"
    yield f"tokens of {of_what}"
    yield f"{'source':{width}}" + "".join(f"{name:>10}" for name in names)
    for source in sorted({*kept, *left_out}):
        numbers = [len(kept[source]), left_out[source]]
        if kept[source]:
            numbers += map(int, np.quantile(kept[source], (0, 0.5, 0.9, 1), method="lower"))
        yield f"{source:{width}}" + "".join(f"{number:>10,}" for number in numbers)
    if answers is not None:
        in_all = f"{len(answers.tokens):,} sequences of {len(prompts):,} rows"
        yield f"trained: {answers.trained:,} of {len(answers.tokens.values):,} tokens, in {in_all}"
    for limit, rows in prompts.left_out.items():
        yield f"left out: {len(rows):,} with more than {limit} tokens, the first is {rows.where(0)}"
