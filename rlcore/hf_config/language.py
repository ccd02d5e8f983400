"""What transformers' language models and Hugging Face folders call otherwise, or compute.

The trainer's tables and the engines read it here.
"""

from __future__ import annotations

import math
from typing import Any

# `model_type` -> the one by which transformers has the same network.
KNOWN_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}

# `model_type` of a model that has a language model -> the beginning of the tensors' names in the
# language model of transformers, and in a folder.
PREFIXES = {
    "gemma3": ("", "language_model."),
    "gemma4": ("model.", "model.language_model."),
    "mistral3": ("", "language_model."),
    "kimi_k25": ("", "language_model."),
    "qwen3_5": ("model.", "model.language_model."),
    "qwen3_5_moe": ("model.", "model.language_model."),
    "nemotron_h": ("model.", "backbone."),
}

# `model_type` -> sizes of `text_config` that published folders leave out, as transformers has them.
DEFAULT_SIZES: dict[str, dict[str, int]] = {
    "gemma3": {"vocab_size": 262208, "num_attention_heads": 8, "max_position_embeddings": 131072}
}


def as_trained(model: Any) -> None:
    """Let a model of transformers compute what it was trained to, where transformers does not.

    A forward pass of Nemotron-H raises the time steps of Mamba-2 to `time_step_min`. Megatron, in
    which the models were trained, does not, nor does SGLang, nor transformers itself for a token
    that it decodes.
    """
    if model.config.model_type == "nemotron_h":
        for module in model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = (0.0, math.inf)
