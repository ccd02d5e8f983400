from __future__ import annotations

from typing import Literal

from rlcore.config.sections.base import PositiveInt, Section


class ModelConfig(Section):
    """The policy's architecture, tokenizer and initial weights: a Hugging Face folder."""

    path: str
    tokenizer: str | None = None  # default: `path`
    dtype: Literal["fp32", "bf16"] = "bf16"
    # the vocabulary is padded to a multiple of this times TP
    vocab_divisible_by: PositiveInt = 1
    # the package that knows the family, if not we
    bridge: Literal["none", "mbridge", "megatron-bridge"] = "none"
