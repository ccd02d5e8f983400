"""The section `model`."""

from __future__ import annotations

from typing import Literal

from rlcore.config.sections.base import ModelPath, PositiveInt, Section, TokenizerPath


class ModelConfig(Section):
    """The policy's architecture, tokenizer and initial weights: a Hugging Face folder."""

    path: ModelPath
    """Hugging Face folder of the policy."""
    tokenizer: TokenizerPath | None = None
    """Folder of the tokenizer; default: `path`."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of the trained weights and activations."""
    vocab_divisible_by: PositiveInt = 1
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
