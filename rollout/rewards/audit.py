"""Audits a reward: scores cheap answers to a few rows, and reports the kinds that pay.

`rlcore data` prints the whole report. A run audits its reward while its engines start, and warns.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from rlcore.config.sections.reward import RewardConfig, RewardPartConfig
from rlcore.data.generation import Completion
from rlcore.data.prompts import Prompt, PromptSet
from rlcore.data.sample import Sample, VersionSpan
from rlcore.data.tokenizer import encode
from rlcore.deadlines import AUDIT_S
from rlcore.errors import DataError, DeadlineExceeded
from rollout.asyncio_utils import within
from rollout.conversation.samples import make_sample
from rollout.rewards.audit_answers import KINDS, RIGHT, AuditAnswer, AuditAnswers, Kind
from rollout.rewards.scorer import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CHUNK = 16  # answers scored together
# A cheap answer that scores on this share of the rows may be right there by chance.
CHANCE = 0.25


@dataclass(frozen=True)
class Scored:
    """An answer to a row, with the scored sample."""

    row: int
    answer: AuditAnswer
    sample: Sample

    @property
    def failed(self) -> str | None:
        """The reason for which the reward failed on it, if it did."""
        return self.sample.metadata.get("reward_error")


@dataclass(frozen=True)
class Finding:
    """The audit's result for one kind of answer.

    Attributes:
        tried: number of rows with such an answer.
        paid: number of rows on which one of them scores.
        best: an answer with the highest reward.
        pays: whether the kind scores more often than by chance, though it should not.
    """

    kind: Kind
    tried: int
    paid: int
    best: Scored
    pays: bool

    def describe(self, reward: RewardConfig) -> str:
        """A phrase like "the prompt scores on 8 of 8 rows (...)"."""
        text = f"{self.kind.name} scores on {self.paid} of {self.tried} rows"
        return f"{text} ({self.example(reward)})" if self.paid else text

    def example(self, reward: RewardConfig) -> str:
        """The best answer with its reward, its row and the part that paid most."""
        sample = self.best.sample
        parts = {
            name: reward.parts[name].weight * score
            for name, score in sample.reward_parts.items()
            if name in reward.parts
        }
        paid = max(parts, key=lambda name: parts[name], default="")
        by = f" by reward.parts.{paid}" if len(reward.parts) > 1 else ""
        text = sample.response_text
        shown = text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}"
        return f"{sample.reward:g}{by} for {shown!r}, {sample.prompt_id}"


class RewardAudit:
    """Scores effortless answers with the parts that need only their text.

    Args:
        ask_services: include services and judges, which may cost money.
    """

    def __init__(
        self,
        reward: RewardConfig,
        prompts: PromptSet,
        tokenizer: PreTrainedTokenizerBase,
        *,
        ask_services: bool = False,
    ) -> None:
        whys = {name: _why_not(part, ask_services) for name, part in reward.parts.items()}
        self.left_out: Mapping[str, str] = {name: why for name, why in whys.items() if why}
        self.reward = reward.model_copy(
            update={"parts": {name: p for name, p in reward.parts.items() if not whys[name]}}
        )
        self._prompts = prompts
        self._tokenizer = tokenizer

    @property
    def rows(self) -> list[int]:
        """The rows to audit, `reward.audit_rows` of them, spread over the data."""
        count = min(self.reward.audit_rows, len(self._prompts)) if self.reward.parts else 0
        return np.linspace(0, len(self._prompts) - 1, count).astype(int).tolist()

    async def score(self, scorer: Scorer, rows: Sequence[int], limit_s: float) -> list[Scored]:
        """Score the answers to `rows`, and return those that were scored in time.

        Args:
            scorer: a started scorer with at least the parts of `self.reward`. Its failure counts
                are left unchanged.
            limit_s: after half of it no more scoring starts; after all of it pending calls are
                cancelled.
        """
        audited = scorer.only(self.reward.parts)
        began = time.monotonic()
        asked = [one for row in rows for one in self._of(row)]
        done: list[Scored] = []
        for first in range(0, len(asked), CHUNK):
            used = time.monotonic() - began
            if used > limit_s / 2:
                break
            chunk = asked[first : first + CHUNK]
            work = audited.score([one.sample for one in chunk])
            try:
                await within(limit_s - used, work, lambda: "")
            except DeadlineExceeded:
                # recovery: fewer answers are audited
                break
            done += chunk
        return done

    async def start(self, scorer: Scorer) -> None:
        """Start the reward of a run, audit it, and log what it pays for.

        A failure of the audit never ends a run. A reward that fails here fails in step 1 too, which
        counts and names the failure.

        Raises:
            UserError: as `Scorer.start`.
        """
        await scorer.start()
        try:
            scored = await self.score(scorer, self.rows, AUDIT_S)
        except Exception as error:  # noqa: BLE001 - recovery: the run goes on without an audit
            logger.warning("the reward was not audited: %s: %s", type(error).__name__, error)
            return
        found = [one.describe(self.reward) for one in self.findings(scored) if one.pays]
        if found:
            logger.warning(
                "the reward pays for answers that solve nothing: %s. A policy finds these first:"
                " change reward.parts, or see `rlcore data` and docs/rewards.md (gaming)",
                "; ".join(found),
            )

    def findings(self, scored: Sequence[Scored]) -> list[Finding]:
        """Results by kind of answer, in the order of `KINDS`."""
        rows: dict[int, list[Scored]] = defaultdict(list)
        for one in scored:
            if not one.failed:
                rows[one.row].append(one)
        # by kind: the best answer of each row, and whether it pays
        by_kind: dict[Kind, list[tuple[Scored, bool]]] = defaultdict(list)
        for answers in rows.values():
            paying = _paying(answers)
            # among equal rewards the shortest answer sorts last and is kept
            ranked = sorted(answers, key=lambda one: (one.sample.reward, -len(one.answer.text)))
            for one in {one.answer.kind: one for one in ranked}.values():
                by_kind[one.answer.kind].append((one, paying(one.sample)))
        # the share of the rows that a constant answer gets right: those with the commonest label
        labels = {one.row: str(one.sample.label) for one in scored if one.answer.kind is RIGHT}
        common = max(Counter(labels.values()).values()) if len(labels) > 1 else 0
        chance = max(CHANCE, common / max(len(labels), 1))
        found = []
        for kind in KINDS:
            if kind in by_kind:
                best = max(by_kind[kind], key=lambda one: (one[1], one[0].sample.reward))[0]
                tried = len(by_kind[kind])
                paid = sum(pays for _, pays in by_kind[kind])
                pays = kind.verdict == "wrong" and paid > chance * tried
                found.append(Finding(kind, tried, paid, best, pays))
        return found

    @cached_property
    def _answers(self) -> AuditAnswers:
        # created here, so that labels are read only when the first row is audited
        return AuditAnswers(self.reward, self._prompts)

    def _of(self, row: int) -> Iterator[Scored]:
        prompt = self._prompts[row]
        # the question without the marks of a chat template
        contents = [message.get("content") for message in prompt.messages or ()]
        asked = str(next((text for text in reversed(contents) if text), prompt.text))
        for answer in self._answers.of(self._prompts.examples[row], asked):
            yield Scored(row, answer, _sample(prompt, row, answer, self._tokenizer))


def _why_not(part: RewardPartConfig, ask_services: bool) -> str | None:
    """The reason for which a part of the reward is left out."""
    if part.function == "overlong":
        return "it scores lengths"
    if part.source == "workflow":
        return "the workflow gives it"
    if (part.service is not None or part.judge is not None) and not ask_services:
        return f"a {'judge' if part.judge else 'service'} gives it, see --ask-services"
    return None


def _paying(answers: Sequence[Scored]) -> Callable[[Sample], bool]:
    """A predicate for paying rewards, derived from all answers to a row.

    A reward pays from half way between the lowest reward, or 0, and the label's. If no label is an
    answer, any reward above 0 pays.
    """
    rewards = [(one.sample.reward, one.answer.kind is RIGHT) for one in answers]
    right = [reward for reward, is_right in rewards if is_right]
    if not right:
        return lambda sample: sample.reward > 0
    most = max(right)
    least = min(rewards)[0]
    if most > 0:
        least = max(least, 0.0)
    half = (least + most) / 2
    return lambda sample: (
        (sample.reward > half or sample.reward >= most) and sample.reward > min(least, 0.0)
    )


def _sample(
    prompt: Prompt, row: int, answer: AuditAnswer, tokenizer: PreTrainedTokenizerBase
) -> Sample:
    try:
        made = encode(tokenizer, [answer.text], [prompt.prompt_id])[0]
    except DataError:
        # a tokenizer with few symbols; rewards of text do not use the tokens
        made = np.zeros(0, dtype=np.int32)
    logprobs = np.zeros(len(made), dtype=np.float32)
    versions = (VersionSpan(0, 0, len(made)),)
    sample = make_sample(prompt, row, 0, Completion(made, logprobs, answer.finish_reason, versions))
    sample.response_text = answer.text
    return sample
