"""What transformers' language models and Hugging Face folders call otherwise.

The trainer's tables and the engines read it here.
"""

from __future__ import annotations

# `model_type` -> the one by which transformers has the same network.
KNOWN_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}

# `model_type` of a model that has a language model -> the beginning of the tensors' names in the
# language model of transformers, and in a folder.
PREFIXES = {
    "mistral3": ("", "language_model."),
    "kimi_k25": ("", "language_model."),
    "qwen3_5": ("model.", "model.language_model."),
    "qwen3_5_moe": ("model.", "model.language_model."),
    "nemotron_h": ("model.", "backbone."),
}
