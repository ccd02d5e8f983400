"""Scores samples with a reward model, a Hugging Face sequence classifier with one output."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlcore.config.sections.reward import RewardModelConfig
from rlcore.data.sample import Sample
from rlcore.errors import ModelError
from rollout.engines.checks import folder_vocab_size
from rollout.rewards.base import BatchedPart, RewardFailure, Score, attempt, checked


class ModelPart(BatchedPart):
    """Scores the tokens of a sample directly: policy and reward model share a vocabulary.

    Batches run one at a time in a separate thread.

    Raises:
        ModelError: the folder holds no classifier with one output, or its vocabulary differs from
            the policy's.
    """

    def __init__(
        self, name: str, config: RewardModelConfig, *, vocab_size: int, device: str | None = None
    ) -> None:
        where = f"reward.parts.{name}.model.path"
        if not Path(config.path).is_dir():
            raise ModelError(f"{where}: {config.path} is not a folder")
        own = folder_vocab_size(config.path)
        if own != vocab_size:
            raise ModelError(
                f"{where}: the reward model {config.path} has a vocabulary of {own}, the policy one"
                f" of {vocab_size}; they read the same token ids, so the sizes must agree"
            )
        super().__init__(batch_size=config.batch_size)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model = load_classifier(config.path, where, self._device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model")

    async def _ask(self, samples: list[Sample]) -> list[Score]:
        sequences = [sample.tokens for sample in samples]
        loop = asyncio.get_running_loop()
        # catch exceptions in the thread: futures of asyncio cannot carry a StopIteration
        found = await loop.run_in_executor(self._thread, attempt, partial(self.forward, sequences))
        if isinstance(found, RewardFailure):
            return [found] * len(samples)
        return [checked(score) for score in found]

    @torch.inference_mode()
    def forward(self, sequences: Sequence[NDArray[np.int32]]) -> list[float]:
        """The score of each sequence [T_i], read at its last token."""
        longest = max(len(tokens) for tokens in sequences)
        ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(sequences):
            ids[row, longest - len(tokens) :] = torch.from_numpy(tokens)
            mask[row, longest - len(tokens) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        logits = self._model(
            **{name: value.to(self._device) for name, value in inputs.items()}, use_cache=False
        ).logits
        scores: list[float] = logits[:, 0].float().cpu().tolist()
        return scores

    async def close(self) -> None:
        """Drop waiting samples, and let the thread end."""
        await super().close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def load_classifier(folder: str, where: str, device: torch.device) -> Any:
    """Load the classifier in `folder` for left-padded batches.

    Raises ModelError unless it has exactly one output.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    # the run has its own progress bar
    logging.disable_progress_bar()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            dtype=dtype,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{where}: {folder} is no sequence classifier that transformers can load ({reason})"
        ) from error
    if model.config.num_labels != 1:
        raise ModelError(
            f"{where}: {folder} has {model.config.num_labels} outputs, a reward model has 1"
        )
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ModelError(
            f"{where}: {folder} lacks the weights of {missing}: it has no trained reward head"
        )
    # Batches are padded on the left, so the last position is always the last token. With this id,
    # which no token has, transformers reads the score there. Padding on the right would be
    # ambiguous where pad and eos share an id.
    model.config.pad_token_id = -1
    return model.eval().requires_grad_(False).to(device)
