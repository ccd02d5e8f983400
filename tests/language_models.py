"""Models of transformers' configuration classes, alone or inside a model with a vision tower."""

from __future__ import annotations

from typing import Any

VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip


def draw(config: str, keys: dict[str, Any]) -> Any:
    """A model with random weights, for `keys` of a configuration class or of its `text_config`.

    With `vision_config` among the keys the language model is a part of a larger one.
    """
    import transformers

    kind = getattr(transformers, config)
    given = dict(keys)
    if config.startswith("Qwen3_5Moe"):
        # All its layers have experts.
        given.pop("intermediate_size", None)
    if "vision_config" not in given:
        return transformers.AutoModelForCausalLM.from_config(kind(**given))
    vision = given.pop("vision_config")
    both = kind(text_config=given, vision_config=vision, **{
        key: given[key] for key in ("tie_word_embeddings",) if key in given})  # fmt: skip
    return transformers.AutoModelForImageTextToText.from_config(both)
