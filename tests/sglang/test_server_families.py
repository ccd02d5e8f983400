"""Real servers of the families take every tensor of a publication, however it is cut.

SGLang loads weights call by call, stacks and shards them, and says nothing of what it leaves out.
DeepSeek-V3, which it does not take tensor by tensor, is in test_latent_attention.py. It cannot run
Qwen2-MoE on a CPU, nor GLM-4.7-Flash, whose latent attention has no YaRN.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import server_kit
import torch
from publication_kit import checksums, folder_weights, layout, publish, publishing

from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.weights import Bucket, cut_buckets
from tests.checkpoint.hf_folders import MODELS, write_model

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
NAMES = (
    *("llama", "llama_tied", "qwen2", "qwen3_tied", "qwen3_moe", "mixtral", "glm4_moe"),
    *("seed_oss", "smollm3"),
)
# Of `init-model`.
TINY = ("mistral", "ministral3")


@pytest.mark.parametrize("name", [*NAMES, *TINY])
def test_every_tensor_changes_and_is_the_same_for_every_size_of_buckets(
    name: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    if name in MODELS:
        write_model(name, model)
    else:
        init_model(model, ModelSpec(name, hidden=32, layers=2, intermediate=48))
    init_model(tmp_path / "tokenizer", ModelSpec("qwen3"))
    for file in (tmp_path / "tokenizer").glob("*token*"):
        shutil.copy(file, model)
    first = folder_weights(model)
    second = {name: tensor + 1 for name, tensor in first.items()}
    specs = [spec for bucket in layout(first) for spec in bucket.tensors]
    whole = cut_buckets(specs, 1 << 30)
    apart = [Bucket(index, (spec,)) for index, spec in enumerate(specs)]
    with (
        server_kit.serving(model, tmp_path / "server.log") as served,
        publishing(served, tmp_path) as client,
    ):
        publish(client.sink, first, 1, whole)
        of_first = checksums(served, client.engine)
        publish(client.sink, second, 2, whole)
        of_second = checksums(served, client.engine)
        assert [name for name in of_first if of_first[name] == of_second[name]] == []
        publish(client.sink, first, 3, apart)
        assert checksums(served, client.engine) == of_first
        assert not client.participants.dropped


def test_a_server_without_a_draft_leaves_the_layer_for_further_tokens_out(tmp_path: Path) -> None:
    """`policy.mtp_coef` publishes it to every SGLang server."""
    model = write_model("glm4_moe", tmp_path / "model")
    init_model(tmp_path / "tokenizer", ModelSpec("qwen3"))
    for file in (tmp_path / "tokenizer").glob("*token*"):
        shutil.copy(file, model)
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
