"""Sources of samples without an engine: labels of a data set (SFT), or a recorded step (replay)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlcore.config import Config
from rlcore.data.batch import StepRollouts
from rlcore.data.prompts import PromptSet, PromptStream
from rlcore.data.rows import Example, read_examples
from rlcore.data.sample import SAMPLING_MASK_KEY, Sample, VersionSpan
from rlcore.data.tokenizer import encode, render_chat
from rlcore.errors import DataError
from rlcore.runs.rollouts import read_rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOTHING: Mapping[str, str] = MappingProxyType({})


class SourceWithoutEngine:
    """An `rlcore.interfaces.RolloutSource` in which nothing generates."""

    def start(self) -> None:
        """There is nothing to start."""

    def evaluate(self, sets: Sequence[str] | None = None) -> tuple[dict[str, float], list[Sample]]:
        """Never called."""
        raise AssertionError("no engine is here to evaluate with")

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Never called."""
        raise AssertionError("nothing generates here, so nothing is published")

    def snapshot(self) -> dict[str, Any]:
        """Return the state, none."""
        return {}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue at `snapshot`."""

    def keep_ledger(self, path: Path) -> None:
        """There is no ledger: the step says which samples were trained on."""

    def close(self) -> None:
        """Nothing is open."""


class SFTSource(SourceWithoutEngine):
    """A source of `training.batch_size` rows a step, trained on label and EOS.

    A chat row's label becomes the assistant's message. Where it has none (`data.label_key` is null,
    or its value in the row is), the last message of the chat is the label, if the assistant's.

    Raises:
        DataError: a row without a text label; names it.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        data = config.data
        rows = read_examples(data.paths, prompt_key=data.prompt_key, label_key=data.label_key)
        self.prompts = PromptSet.from_examples(
            (_with_label(row) for row in rows),
            tokenizer,
            paths=data.paths,
            max_prompt_tokens=data.max_prompt_tokens,
        )
        self._labels = label_tokens(self.prompts, tokenizer, add_eos=data.add_eos)
        self._batch_size = config.training.batch_size
        self._stream = PromptStream(
            len(self.prompts),
            seed=config.run.seed,
            shuffle=data.shuffle,
            fingerprint=self.prompts.fingerprint(),
        )

    def next_step(self, step: int) -> StepRollouts:
        """Return the next `training.batch_size` rows, by the cursor; `step` does not matter."""
        samples = [self._sample(draw) for draw in self._stream.take(self._batch_size)]
        return StepRollouts(samples, {}, self._stream.epoch, self.snapshot())

    def _sample(self, draw: int) -> Sample:
        row = self._stream.row(draw)
        prompt = self.prompts[row]
        label = self._labels[row]
        mask = np.zeros(len(prompt.tokens) + len(label), dtype=np.uint8)
        mask[len(prompt.tokens) :] = 1
        return Sample(
            draw=draw,
            index=0,
            prompt_id=prompt.prompt_id,
            group_id=draw,
            rollout_id=draw,
            tokens=np.concatenate([prompt.tokens, label]),
            loss_mask=mask,
            rollout_logprobs=np.zeros(len(label), dtype=np.float32),
            versions=(VersionSpan(0, 0, len(label)),),
            finish_reason="stop",
            prompt_text=prompt.text,
            response_text=prompt.label,
            label=prompt.label,
        )

    def evaluate(self, sets: Sequence[str] | None = None) -> tuple[dict[str, float], list[Sample]]:
        """Return no metrics and no samples."""
        return {}, []

    def snapshot(self) -> dict[str, Any]:
        """Return the position in the data."""
        return {"stream": self._stream.snapshot()}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue at the position of `snapshot`."""
        if state is not None:
            self._stream.restore(state["stream"])


def _with_label(example: Example) -> Example:
    """Return the row with its answer in `label`, as text that is not empty."""
    prompt = example.prompt
    label = example.label
    if label is None and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        label = prompt[-1]["content"]
        prompt = prompt[:-1]
    if not isinstance(label, str) or not label or not prompt:
        raise DataError(
            f"{example.where}: sft needs a prompt and a text label (data.label_key), or chat"
            f" messages that end with the assistant's; the label is {label!r}"
        )
    return replace(example, prompt=prompt, label=label)


def label_tokens(
    prompts: PromptSet, tokenizer: PreTrainedTokenizerBase, *, add_eos: bool
) -> list[NDArray[np.int32]]:
    """Return of each row the tokens that the policy learns, int32 [n], up to its EOS.

    Raises:
        DataError: a label without tokens, no EOS token for `add_eos`, or a chat template that
            rewrites the prompt.
    """
    eos = tokenizer.eos_token_id
    if add_eos and eos is None:
        raise DataError("the tokenizer has no eos token to train on; set data.add_eos: false")
    answers = [_answer_text(e, text, tokenizer) for e, text in zip(prompts.examples, prompts.texts)]
    tokens = encode(tokenizer, answers, [example.where for example in prompts.examples])
    out = []
    for example, ids in zip(prompts.examples, tokens):
        # A chat template writes an EOS of its own, and often a line break after it.
        if eos is not None and eos in ids:
            ids = ids[: int(np.flatnonzero(ids == eos)[0])]
        if not len(ids):
            raise DataError(f"{example.where}: the label {example.label!r} has no tokens")
        out.append(np.append(ids, np.int32(eos)) if add_eos else ids)
    return out


def _answer_text(example: Example, prompt_text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    if isinstance(example.prompt, str):
        return str(example.label)
    messages = [*example.prompt, {"role": "assistant", "content": example.label}]
    whole = render_chat(tokenizer, messages, example.where, add_generation_prompt=False)
    if not whole.startswith(prompt_text):
        raise DataError(
            f"{example.where}: the chat template writes the prompt differently once the answer"
            " follows, so it cannot be told what to train on; use a template whose prompt is a"
            " prefix of the whole chat"
        )
    return whole[len(prompt_text) :]


class ReplaySource(SourceWithoutEngine):
    """A source that returns the same recorded samples at every step.

    Args:
        greedy_baseline: the estimator needs a `baseline_reward` of every sample.
        recorded: fields that every sample must have, each with the key that asks for it.

    Raises:
        DataError: the file holds no samples, or one lacks a field that is needed. Also for samples
            with a sampling mask that `recorded` does not name: their log-probs depend on it.
    """

    def __init__(
        self, path: Path, *, greedy_baseline: bool = False, recorded: Mapping[str, str] = NOTHING
    ) -> None:
        records = read_rollouts(path)
        if not records:
            raise DataError(f"training.replay: {path} holds no samples")
        try:
            self.samples = [Sample.from_record(record) for record in records]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"training.replay: {path} holds something else than samples: {error!r}"
            ) from error
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
            message = f"{path} was recorded with keep_sets: set policy.logprobs.keep_sets to true"
            raise DataError(f"training.replay: {message}")
        self.recorded_step: int | None = records[0].get("step")
        newest = max(
            (span.version for sample in self.samples for span in sample.versions), default=None
        )
        self.recorded_version: int | None = records[0].get("policy_version", newest)
        self._policy_steps = {
            span[0]: step
            for record in records
            for span, step in zip(record["versions"], record.get("policy_steps", ()))
        }

    def next_step(self, step: int) -> StepRollouts:
        """Return the recorded samples again; `step` does not matter."""
        return StepRollouts(
            list(self.samples), {}, epoch=float(step), snapshot={}, policy_steps=self._policy_steps,
            recorded_step=self.recorded_step, recorded_version=self.recorded_version,
        )  # fmt: skip
