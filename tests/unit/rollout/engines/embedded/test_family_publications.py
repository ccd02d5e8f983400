"""The embedded engine takes a publication of each family, and generates as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import logprobs_under, request, with_engine
from safetensors.torch import load_file

from backends.megatron.convert.architecture import weight_tensors
from backends.megatron.convert.read import read_architecture
from rlcore.hf_config.language import as_trained
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from tests.checkpoint.hf_folders import auto_class, write_model

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13]]
# Families of transformers' models by another `model_type`.
RENAMED = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
NAMES = (
    "seed_oss",
    "smollm3",
    "mistral3",
    "gemma3",
    "gemma4",
    "olmo3",
    "glm4_moe_lite",
    "nemotron_h",
    *RENAMED,
)
BETA = "llama_4_scaling_beta"


def flat(bucket: Bucket, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[spec.name].reshape(-1).view(torch.uint8) for spec in bucket.tensors])


def folder_of(name: str, folder: Path) -> Any:
    """Write the folder of a family; return transformers' model of its weights."""
    source = RENAMED.get(name, name)
    changes: dict[str, Any] = {}
    if name == "mistral3":
        # Responses go beyond the original length, where queries grow.
        rope = {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4,
            BETA: 0.3,
        }
        text = {"model_type": "ministral3", "rope_parameters": rope, "head_dim": 16}
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 31,
                 "max_position_embeddings": 64}  # fmt: skip
        changes = {"text_config": {**sizes, **text}}
    write_model(source, folder, **changes)
    model = auto_class(source).from_pretrained(folder, dtype=torch.float32).eval()
    as_trained(model)
    config = folder / "config.json"
    if name in RENAMED:
        config.write_text(
            json.dumps(
                {**json.loads(config.read_text()), "model_type": name, "architectures": None}
            )
        )
    return model


@pytest.mark.parametrize("name", NAMES)
def test_a_publication_is_taken_and_logprobs_are_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    model = folder_of(name, tmp_path)
    on_disk: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        on_disk.update(load_file(file))
    arch = read_architecture(tmp_path)
    specs = [
        TensorSpec(tensor, shape, str(on_disk[tensor].dtype).removeprefix("torch."))
        for tensor, shape, _ in weight_tensors(arch, "float32", "lm")
    ]
    assert {spec.name: spec.shape for spec in specs} == {
        spec.name: tuple(on_disk[spec.name].shape) for spec in specs
    }
    asked = [request(p, draw=i, n=2, max_new_tokens=12) for i, p in enumerate(PROMPTS)]

    async def use(engine: Any) -> Any:
        buckets = cut_buckets(specs, 20_000)
        await engine.pause("drain")
        await engine.begin_update(buckets)
        for bucket in buckets:
            await engine.receive_bucket(bucket.index, flat(bucket, on_disk))
        await engine.end_update()
        await engine.set_version(1)
        await engine.resume()
        return await engine.generate(asked)

    for one, completions in zip(asked, with_engine(tmp_path, None, use), strict=True):
        for completion in completions:
            assert len(completion.tokens) == 12
            expected = logprobs_under(model, one.prompt, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)
