"""The prompts of a run, read and checked against what its reward wants of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcore.config import Config
from rlcore.data.prompts import PromptSet
from rlcore.errors import ConfigError, DataError
from rollout.rewards.scorer import VERIFIERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    paths: Sequence[str],
    *,
    max_prompts: int | None = None,
) -> PromptSet:
    """The first `max_prompts` of `paths`, tokenised.

    Raises:
        ConfigError, DataError: a bad row, or labels that a verifier cannot compare with.
    """
    data = config.data
    prompts = PromptSet.load(
        paths,
        tokenizer,
        prompt_key=data.prompt_key,
        label_key=data.label_key,
        max_prompt_tokens=data.max_prompt_tokens,
        max_prompts=max_prompts,
    )
    _check_labels(config, prompts)
    return prompts


def _check_labels(config: Config, prompts: PromptSet) -> None:
    verifiers = [name for name, part in config.reward.parts.items() if part.function in VERIFIERS]
    if verifiers and config.data.label_key is None:
        raise ConfigError(
            f"reward.parts.{verifiers[0]} compares with a label, but data.label_key is null"
        )
    for example in prompts.examples if verifiers else ():
        if isinstance(example.label, bool) or not isinstance(example.label, str | int | float):
            raise DataError(
                f"{example.where}: the label must be text or a number for"
                f" reward.parts.{verifiers[0]}, got {type(example.label).__name__}"
            )
