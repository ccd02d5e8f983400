"""Real servers of the families take every tensor of a publication, and compute with it.

SGLang loads weights call by call, stacks and shards them, and says nothing of what it leaves out.
What it does not run on a CPU is named in docs/models.md. Qwen3.5 with a vision tower is in
test_gated_delta_server.py, and latent attention, whose fused tensors share a bucket, in
test_latent_attention.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import server_kit
import torch
from publication_kit import (
    TOLERANCE,
    Oracle,
    Weights,
    checksums,
    folder_weights,
    generate,
    layout,
    publish,
    publishing,
)

from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.weights import Bucket, cut_buckets
from tests.checkpoint.hf_folders import write_model

pytestmark = pytest.mark.timeout(900)
WINDOW = {"sliding_window": 8}
# SGLang gives every layer experts.
EXPERTS = {"mlp_only_layers": []}
# Models of `hf_folders`, with other settings.
CASES: dict[str, Mapping[str, Any]] = {
    "qwen2_moe": EXPERTS,
    "gemma3_text": WINDOW,
    "llama": {},
    "llama_tied": {},
    "qwen2": {},
    "qwen3_tied": {},
    "qwen3_moe": {},
    "mixtral": {},
    "glm4_moe": {},
    "minimax_m2": {},
    "seed_oss": {},
    "smollm3": {},
}
# Of `init-model`.
TINY = ("mistral", "ministral3")
# The others are in the longest tier.
EVERY_RUN = ("qwen2_moe", "gemma3_text")
# What the folders of the real models say and transformers does not write.
SAID: dict[str, Mapping[str, Any]] = {
    "minimax_m2": {
        "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True, "rotary_dim": 16
    },
}  # fmt: skip
# Longer than a window.
PROMPTS = ([6], [3 + 7 * i % 25 for i in range(30)])


def write_folder(
    name: str, folder: Path, overrides: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """A folder with the files of the tokenizer of `init-model`."""
    if name in TINY:
        init_model(folder, ModelSpec(name, hidden=32, layers=2, intermediate=48))
    else:
        write_model(name, folder, **overrides)
    config = json.loads((folder / "config.json").read_text()) | SAID.get(name, {})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = folder.parent / "tokenizer"
    init_model(tokenizer, ModelSpec("qwen3"))
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder)


def published_names(folder: Path) -> list[str]:
    """The tensors of a folder but those that predict further tokens, which are not published."""
    config = json.loads((folder / "config.json").read_text())
    behind = f".layers.{config['num_hidden_layers']}."
    return [name for name in folder_weights(folder) if behind not in name]


def drawn(folder: Path, seed: int) -> Weights:
    """Other weights for a folder: vectors differ too, such as norms and biases."""
    generator = torch.Generator().manual_seed(seed)
    shapes = folder_weights(folder)
    return {
        name: 0.2 * torch.randn(shapes[name].shape, generator=generator) + (shapes[name].dim() == 1)
        for name in published_names(folder)
    }


@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERY_RUN else pytest.param(name, marks=pytest.mark.full)
        for name in (*CASES, *TINY)
    ],
)
def test_every_tensor_changes_and_responses_are_of_the_weights_that_were_published(
    name: str, tmp_path: Path
) -> None:
    """Whatever the size of buckets."""
    model = tmp_path / "model"
    write_folder(name, model, CASES.get(name, {}))
    first, second = (drawn(model, seed) for seed in (1, 2))
    specs = [spec for bucket in layout(first) for spec in bucket.tensors]
    whole = cut_buckets(specs, 1 << 30)
    apart = [Bucket(index, (spec,)) for index, spec in enumerate(specs)]
    with (
        server_kit.serving(model, tmp_path / "server.log") as served,
        publishing(served, tmp_path) as client,
    ):
        found = []
        for version, weights in ((1, first), (2, second)):
            publish(client.sink, weights, version, whole)
            found.append(checksums(served, client.engine))
            oracle = Oracle(model, weights)
            for draw, prompt in enumerate(PROMPTS):
                made = generate(served, client.engine, prompt=prompt, draw=draw, tokens=20)
                assert oracle.errors(prompt, made).max() < TOLERANCE
        of_first, of_second = found
        assert [name for name in of_first if of_first[name] == of_second[name]] == []
        publish(client.sink, first, 3, apart)
        assert checksums(served, client.engine) == of_first
        assert not client.participants.dropped


@pytest.mark.full
def test_a_server_without_a_draft_leaves_the_layer_for_further_tokens_out(tmp_path: Path) -> None:
    """`policy.mtp_coef` publishes it to every SGLang server."""
    model = tmp_path / "model"
    write_folder("glm4_moe", model)
    config = json.loads((model / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    weights = folder_weights(model)
    count = config["num_hidden_layers"]
    last = f"model.layers.{count - 1}."
    behind = f"model.layers.{count}."
    further = {name.replace(last, behind): 2 * weights[name] for name in weights if last in name}
    further |= {f"{behind}{name}.weight": torch.ones(3) for name in ("enorm", "shared_head.norm")}
    with (
        server_kit.serving(model, tmp_path / "server.log") as served,
        publishing(served, tmp_path) as client,
    ):
        publish(client.sink, weights, 1)
        alone = checksums(served, client.engine)
        publish(client.sink, weights | further, 2)
        assert checksums(served, client.engine) == alone
        assert not client.participants.dropped
