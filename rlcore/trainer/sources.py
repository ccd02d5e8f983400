"""Sources of samples without an engine: answers in rows of data, or a recorded step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlcore.config import Config
from rlcore.config.evaluation_sets import EvaluationSet, evaluation_sets
from rlcore.data.batch import StepRollouts
from rlcore.data.loading import prompt_stream
from rlcore.data.sample import SAMPLING_MASK_KEY, Sample, VersionSpan
from rlcore.data.sample_checks import check_sample
from rlcore.data.tokenizer import decode
from rlcore.errors import DataError
from rlcore.runs.rollouts import read_rollouts
from rlcore.trainer.sft_answers import labelled_rows, with_rejected

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The tokens of a sequence, and the bounds of its trained turns, int32 [turns, 2].
Turns = tuple[NDArray[np.int32], NDArray[np.int32]]


class SourceWithoutEngine:
    """An `rlcore.interfaces.RolloutSource` without generation."""

    def start(self) -> None:
        """Do nothing: there is nothing to start."""

    def evaluate(self, sets: Sequence[str] | None = None) -> tuple[dict[str, float], list[Sample]]:
        """Return no metrics and no samples."""
        return {}, []

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Do nothing: nothing generates here."""

    def snapshot(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue at `snapshot`."""

    def keep_ledger(self, path: Path) -> None:
        """Do nothing: the step itself lists the samples that were trained on."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class Rows:
    """Rows with the answers that they hold.

    Supervised fine-tuning trains on their turns, which `rlcore.trainer.sft_answers` chooses.
    Learning from preferences gets each answer of a row as a sample: a good one has reward 1, and a
    bad one 0.

    Args:
        held_out: an evaluation set, whose rows are read instead of those of `data`.

    Raises:
        DataError: a row without a text label, or without the answers that the estimator compares;
            names it.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        held_out: EvaluationSet | None = None,
    ) -> None:
        self.prompts, self.answers, self._rejected = labelled_rows(config, tokenizer, held_out)
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.prompts)

    def samples(self, row: int, draw: int) -> list[Sample]:
        """Return the sequences of a row as samples of one group.

        Labelled turns are one rollout; the answers that people compared are one each.
        """
        if self._rejected is None:
            sequences = self.answers.of_row(row)
            last = len(sequences) - 1
            label = self.prompts[row].label
            return [
                self._sample(row, draw, index, sequence, label if index == last else None)
                for index, sequence in enumerate(sequences)
            ]
        example = self.prompts.examples[row]
        found = [(self.answers, example, float(example.is_good))]
        if example.rejected is not None:
            found.append((self._rejected, with_rejected(example), 0.0))
        return [
            replace(
                self._sample(row, draw, index, answers.of_row(row)[0], answered.label),
                rollout_id=2 * draw + index,
                reward=reward,
            )
            for index, (answers, answered, reward) in enumerate(found)
        ]

    def _sample(
        self, row: int, draw: int, index: int, sequence: Turns, label: str | None
    ) -> Sample:
        """Return one sequence; without `label` it is an earlier turn, whose texts are decoded."""
        prompt = self.prompts[row]
        tokens, turns = sequence
        begin, end = turns[-1]
        mask = np.zeros(len(tokens), dtype=np.uint8)
        for start, stop in turns:
            mask[start:stop] = 1
        trained = int(mask.sum())
        prompt_text = prompt.text
        text = label
        if text is None:
            prompt_text = self._tokenizer.decode(tokens[:begin])
            text = decode(self._tokenizer, [tokens[begin:end]])[0]
        return Sample(
            draw=draw,
            index=index,
            prompt_id=prompt.prompt_id,
            group_id=draw,
            rollout_id=draw,
            tokens=tokens,
            loss_mask=mask,
            rollout_logprobs=np.zeros(trained, dtype=np.float32),
            versions=(VersionSpan(0, 0, trained),),
            finish_reason="stop",
            prompt_text=prompt_text,
            response_text=text,
            label=prompt.label if label is None else label,
        )


class RowSource(SourceWithoutEngine):
    """A source of `training.batch_size` rows a step, with the answers that they hold."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self.rows = Rows(config, tokenizer)
        self.held_out = {one.name: Rows(config, tokenizer, one) for one in evaluation_sets(config)}
        self._batch_size = config.training.batch_size
        self._stream = prompt_stream(config, self.rows.prompts)

    def next_step(self, step: int) -> StepRollouts:
        """Return the next `training.batch_size` rows at the cursor; `step` is ignored."""
        draws = self._stream.take(self._batch_size)
        samples = [one for draw in draws for one in self.rows.samples(self._stream.row(draw), draw)]
        metrics = {"rollout/excluded_prompts": float(self.rows.prompts.num_excluded)}
        return StepRollouts(samples, metrics, self._stream.epoch, self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """Return the position in the data."""
        return {"stream": self._stream.snapshot()}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue at the position of `snapshot`."""
        if state is not None:
            self._stream.restore(state["stream"])


class ReplaySource(SourceWithoutEngine):
    """A source that returns the same recorded samples at every step.

    Args:
        vocab_size: the policy's vocabulary size.
        greedy_baseline: the estimator needs a `baseline_reward` for every sample.
        recorded: fields that every sample must have, each with the key that requires it.

    Raises:
        DataError: the file holds no samples, or a sample lacks a required field. Also if samples
            have a sampling mask, on which their log-probs depend, and `recorded` does not name it.
    """

    def __init__(
        self,
        path: Path,
        *,
        vocab_size: int,
        greedy_baseline: bool = False,
        recorded: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        records = read_rollouts(path, arrays=True)
        if not records:
            raise DataError(f"training.replay: {path} holds no samples")
        try:
            samples = [Sample.from_record(record) for record in records]
            # Samples whose reward failed were not trained on.
            self.samples = [sample for sample in samples if sample.is_scored]
            for sample in self.samples:
                check_sample(sample, vocab_size=vocab_size)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise DataError(f"training.replay: {path} does not hold samples: {error!r}") from error
        if greedy_baseline and any(sample.baseline_reward is None for sample in self.samples):
            raise DataError(
                f"training.replay: {path} was recorded without the greedy baselines that this"
                " estimator needs; record a step with it, or use another estimator"
            )
        for name, key in recorded.items():
            if any(getattr(sample, name) is None for sample in self.samples):
                file_name = SAMPLING_MASK_KEY if name == "sampling_mask" else name
                raise DataError(
                    f"training.replay: {path} was recorded without {file_name}, which {key} needs:"
                    " turn it off"
                )
        if "sampling_mask" not in recorded and any(
            sample.sampling_mask is not None for sample in self.samples
        ):
            raise DataError(
                f"training.replay: {path} was recorded with keep_sets: set"
                " policy.logprobs.keep_sets to true"
            )
        self.recorded_step: int | None = records[0].get("step")
        self.recorded_version: int | None = records[0].get("policy_version")
        self._policy_steps = {
            span[0]: step
            for record in records
            for span, step in zip(record["versions"], record.get("policy_steps", ()))
        }

    def next_step(self, step: int) -> StepRollouts:
        """Return the recorded samples again; `step` is ignored."""
        return StepRollouts(
            list(self.samples), {}, epoch=float(step), snapshot={}, policy_steps=self._policy_steps,
            recorded_step=self.recorded_step, recorded_version=self.recorded_version,
        )  # fmt: skip
