"""A real server of Qwen3.5, whose layers with a state run on our functions on a CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import server_kit
import torch
import transformers
from publication_kit import TOLERANCE, Oracle, generate, publish, publishing, random_weights
from server_kit import Served

from rlcore.launch.commands.init_model import ModelSpec, init_model

LAYERS = 4
INTERVAL = 2
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // INTERVAL),
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        # SGLang 0.5.23 reads no other share from here.
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
IMAGES = {
    "size": {"longest_edge": 1 << 24, "shortest_edge": 1 << 16},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "processor_class": "Qwen3VLProcessor",
}


def write_folder(folder: Path, kind: str) -> None:
    """A folder for images and text with the files of the public ones."""
    tokenizer = folder.parent / "tokenizer"
    init_model(tokenizer, ModelSpec("qwen3"))
    sizes = json.loads((tokenizer / "config.json").read_text())
    text = TEXT | {"vocab_size": sizes["vocab_size"], "eos_token_id": None}
    text |= EXPERTS if kind == "Qwen3_5Moe" else {}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=VISION)
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForConditionalGeneration")(config).save_pretrained(folder)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder)
    # SGLang finds the kinds of layers by this key, which transformers does not write.
    written = json.loads((folder / "config.json").read_text())
    written["text_config"]["full_attention_interval"] = INTERVAL
    (folder / "config.json").write_text(json.dumps(written))
    for name, key, value in (
        ("preprocessor_config", "image_processor_type", "Qwen2VLImageProcessorFast"),
        ("video_preprocessor_config", "video_processor_type", "Qwen3VLVideoProcessor"),
    ):
        (folder / f"{name}.json").write_text(json.dumps(IMAGES | {key: value}))


@pytest.fixture(
    scope="module", params=["Qwen3_5", pytest.param("Qwen3_5Moe", marks=pytest.mark.full)]
)
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """It prefills 16 tokens at a time, so that states go from part to part."""
    folder = tmp_path_factory.mktemp("hybrid")
    write_folder(folder / "model", request.param)
    server = {"chunked_prefill_size": 16}
    with server_kit.serving(folder / "model", folder / "server.log", server=server) as served:
        yield served


def text_weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Small ones: a gated norm of a small vector turns round-off into more than that."""
    return {
        name: tensor * (0.25 if tensor.dim() > 1 else 1.0)
        for name, tensor in random_weights(folder, seed).items()
        if ".visual." not in name
    }


def test_what_it_generates_is_of_the_weights_that_were_published(
    hybrid: Served, tmp_path: Path
) -> None:
    """Log-probs of several responses at once, of long prompts, and of prompts whose beginning the
    server has in its cache.
    """
    prompts = [[3, 14, 15, 9], [6], [3 + 7 * i % 25 for i in range(45)]]
    with publishing(hybrid, tmp_path) as client:
        for version, seed in ((5, 1), (6, 2)):
            weights = text_weights(hybrid.model, seed)
            publish(client.sink, weights, version)
            oracle = Oracle(hybrid.model, weights)
            for draw, prompt in enumerate(prompts):
                first = generate(hybrid, client.engine, prompt=prompt, draw=draw, tokens=20)
                assert oracle.errors(prompt, first).max() < TOLERANCE
                longer = [*prompt, *map(int, first.tokens), 4, 5, 6]
                second = generate(hybrid, client.engine, prompt=longer, draw=draw)
                assert oracle.errors(longer, second).max() < TOLERANCE
                assert len(np.unique(second.logprobs)) > 1
        assert not client.participants.dropped
