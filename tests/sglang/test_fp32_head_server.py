"""Logits in fp32 by a real server of a bf16 model that also takes adapters of all linear layers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from publication_kit import folder_weights
from safetensors.torch import save_file
from server_kit import Served, serving

from rlcore.config.sections.policy import LoraConfig
from rlcore.data.generation import Completion, GenerateRequest, SamplingParams
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rollout.asyncio_utils import gather_or_cancel
from rollout.engines.server_client import ServerClient
from rollout.engines.sglang.adapters import server_arguments
from rollout.engines.sglang.generation import Generation

HIDDEN = 256
LARGEST = 30.0  # the logit of the last token itself
TEMPERATURE = 8.0
VERSION = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, bf16. Its layers add nothing, so a hidden state is the norm of the last embedding."""
    folder = tmp_path_factory.mktemp("fp32_head") / "model"
    init_model(
        folder, ModelSpec(hidden=HIDDEN, layers=1, heads=4, kv_heads=2, intermediate=64, tied=True)
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in folder_weights(folder).items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor = torch.zeros_like(tensor)
        elif "norm" in name:
            tensor = torch.ones_like(tensor)
        elif "embed" in name:
            tensor = torch.randn(tensor.shape, generator=generator) * LARGEST / HIDDEN
        tensors[name] = tensor.bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("fp32_head_server") / "server.log"
    given = server_arguments(LoraConfig(rank=4), "cpu", str(model))
    with serving(model, log, server={"enable_fp32_lm_head": True, **given}, dtype="bf16") as served:
        yield served


def logprobs(model: Path, request: GenerateRequest, completion: Completion) -> torch.Tensor:
    """[m, 2]: in float64, and with logits that are rounded to bf16."""
    embedding = folder_weights(model)["model.embed_tokens.weight"].bfloat16()
    before = torch.tensor([request.prompt[-1], *completion.tokens[:-1]], dtype=torch.long)
    rows = embedding[before].float()
    rows = (rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).bfloat16()
    logits = rows.double() @ embedding.double().t()
    tokens = torch.tensor(completion.tokens, dtype=torch.long)[:, None]
    both = (logits, logits.bfloat16().double())
    return torch.cat([(one / TEMPERATURE).log_softmax(-1).gather(1, tokens) for one in both], 1)


def test_its_log_probs_are_those_of_logits_that_were_not_rounded(
    model: Path, served: Served
) -> None:
    client = ServerClient("engine-0", served.url, served.keys, config=served.config)
    served.call(
        client.post(
            "/update_weights_from_disk",
            {"model_path": str(model), "weight_version": str(VERSION)},
            admin=True,
        )
    )
    info = served.call(client.get("/server_info"))
    assert info["enable_fp32_lm_head"] is True
    generation = served.call(Generation.connect(client, str(model)))
    sampling = SamplingParams(max_new_tokens=16, temperature=TEMPERATURE)
    requests = [
        GenerateRequest(np.array([3, 4 + k], dtype=np.int32), sampling, draw=k, n=1)
        for k in range(4)
    ]
    answers = served.call(gather_or_cancel(*(generation.one(request) for request in requests)))
    served.call(client.close())
    errors = []
    for request, [completion] in zip(requests, answers):
        want = logprobs(model, request, completion)
        errors.append((torch.tensor(completion.logprobs)[:, None] - want).abs())
    exact, rounded = torch.cat(errors).amax(0).tolist()
    assert exact < 1e-5
    assert rounded > 1e-3
