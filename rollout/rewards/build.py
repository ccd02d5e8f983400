"""Builds the `Scorer` of the `reward` section, and checks the labels that it needs."""

from __future__ import annotations

from rlcore.config import Config
from rlcore.config.sections.reward import RewardConfig
from rlcore.data.prompts import PromptSet
from rlcore.errors import ConfigError, DataError
from rollout.rewards.base import RewardPart
from rollout.rewards.exact_match import InlinePart
from rollout.rewards.pool import PooledPart, RewardPool
from rollout.rewards.scorer import VERIFIERS, Scorer

POOLED = {"math": "rollout.rewards.math:math"}


def build_scorer(config: RewardConfig, *, vocab_size: int, device: str | None = None) -> Scorer:
    """The scorer with every part of `config`; nothing is started yet.

    Args:
        vocab_size: the policy's; a reward model must have the same.
        device: for reward models that do not set their own.

    Raises:
        ConfigError: an unknown function, or no parts.
        ModelError: a reward model that cannot be used.
    """
    if not config.parts:
        raise ConfigError("reward.parts is empty; name at least one part")
    functions: dict[str, str] = {}
    pool = RewardPool(functions, config.workers, config.timeout_s)
    parts: dict[str, RewardPart] = {}
    for name, part in config.parts.items():
        if part.model is not None:
            from rollout.rewards.model import ModelPart  # torch and transformers

            parts[name] = ModelPart(name, part.model, vocab_size=vocab_size, device=device)
        elif part.function == "exact_match":
            parts[name] = InlinePart()
        else:
            functions[name] = _import_path(name, str(part.function))
            parts[name] = PooledPart(name, pool)
    return Scorer(config, parts)


def _import_path(part: str, function: str) -> str:
    if function in POOLED:
        return POOLED[function]
    if ":" not in function:
        raise ConfigError(
            f"reward.parts.{part}.function: {function!r} is unknown; known: exact_match,"
            f" {', '.join(POOLED)}, or package.module:function"
        )
    return function


def check_labels(config: Config, prompts: PromptSet) -> None:
    """Raises ConfigError or DataError where a verifier cannot compare with the prompts' labels."""
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
