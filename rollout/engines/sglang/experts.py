"""Finds the layers of a model that have experts, and decodes SGLang's record of chosen experts."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

import numpy as np

from rlcore.data.sample import Experts
from rlcore.errors import ModelError

# the name of a module in transformers
EXPERTS = re.compile(r".*\.layers\.(\d+)\.(?:\w+\.)*experts")


@dataclass(frozen=True)
class ExpertLayers:
    """The layout of a model that has experts in some of its layers."""

    num_layers: int  # all of them: SGLang reports a row for each
    places: tuple[int, ...]  # indices of the layers that have experts
    num_experts: int
    topk: int  # experts that a token passes through

    @classmethod
    def of(cls, folder: str) -> ExpertLayers | None:
        """Read the Hugging Face model in `folder`, without its weights; None for a dense model."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        topk = getattr(config, "num_experts_per_tok", None)
        if not topk:
            return None
        with torch.device("meta"):
            modules = AutoModelForCausalLM.from_config(config).named_modules()
        found = {
            int(match[1]): module for name, module in modules if (match := EXPERTS.fullmatch(name))
        }
        if not found:
            raise ModelError(
                f"{folder}: num_experts_per_tok is {topk}, but transformers builds no layer with"
                " experts from it"
            )
        count = next(iter(found.values())).num_experts
        return cls(int(config.num_hidden_layers), tuple(sorted(found)), int(count), int(topk))

    def decode(self, text: str, tokens: int) -> Experts:
        """Decode SGLang's record of the first `tokens` tokens of a sequence.

        Args:
            text: base64 of little-endian int32 [tokens, layers, topk].

        Returns:
            int16 [tokens, layers with experts, topk].

        Raises:
            ValueError: `text` is no such record.
        """
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
        if flat.size != tokens * self.num_layers * self.topk:
            raise ValueError(
                f"{flat.size} routed experts, expected {tokens} tokens x {self.num_layers} layers x"
                f" {self.topk}"
            )
        chosen = flat.reshape(tokens, self.num_layers, self.topk)[:, list(self.places)]
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.num_experts:
            raise ValueError(
                f"routed experts from {chosen.min()} to {chosen.max()} of a model of"
                f" {self.num_experts}"
            )
        return chosen.astype(np.int16)
