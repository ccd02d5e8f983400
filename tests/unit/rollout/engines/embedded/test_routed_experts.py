"""The routed experts that the embedded engine records, of prompts and responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import VOCAB, request, with_engine
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlcore.data.sample import join_experts
from rlcore.errors import UserError
from rollout.engines.embedded.client import decode_completion, encode_completion

LAYERS = 2
TOPK = 2


@pytest.fixture(scope="module")
def routed() -> Qwen3MoeForCausalLM:
    """Three layers, the second of them dense."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=3,
            head_dim=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=5,
            num_experts_per_tok=TOPK,
            mlp_only_layers=[1],
            initializer_range=0.3,
            max_position_embeddings=128,
        )
    ).eval()


@pytest.fixture(scope="module")
def moe_folder(routed: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("qwen3_moe")
    routed.config.save_pretrained(path)
    return path


def expected(model: Any, tokens: list[int]) -> np.ndarray:
    """By one forward pass over all tokens: [t, layers, k]."""
    heard: list[torch.Tensor] = []
    hooks = [
        part.register_forward_pre_hook(lambda _, args: heard.append(args[1]))
        for name, part in model.named_modules()
        if name.endswith(".experts")
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(heard, dim=1).numpy()


@pytest.mark.parametrize("mode", ["whole", "retract"])
def test_prompt_and_response_but_the_last_token_are_recorded(moe_folder, routed, mode):
    """Rows end at different times; a retraction computes all keys again, and records each once."""
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    settings = {"max_new_tokens": 12, "stop_token_ids": (0, 1, 2, 3), "routed_experts": True}
    asked = [request(prompt, draw=i, n=3, **settings) for i, prompt in enumerate(prompts)]

    async def use(engine):
        if mode == "retract":
            step = engine._gate.pass_through

            def again(ticket, drop):
                drop()
                return step(ticket, drop)

            engine._gate.pass_through = again
        return await engine.generate(asked)

    lengths = set()
    for prompt, completions in zip(prompts, with_engine(moe_folder, routed, use)):
        for one in completions:
            tokens = [*prompt, *one.tokens.tolist()]
            assert one.routed_experts.dtype == np.int16
            assert one.routed_experts.shape == (len(tokens) - 1, LAYERS, TOPK)
            np.testing.assert_array_equal(one.routed_experts, expected(routed, tokens[:-1]))
            lengths.add(len(one.tokens))
    assert len(lengths) > 2


def test_only_requests_that_ask_get_experts_and_they_cross_processes(moe_folder, routed):
    asked = [request([1, 2], draw=0, routed_experts=True), request([1, 2], draw=1)]
    (told,), (plain,) = with_engine(moe_folder, routed, lambda engine: engine.generate(asked))
    assert plain.routed_experts is None
    back = decode_completion(encode_completion(told)).routed_experts
    assert back.dtype == np.int16
    np.testing.assert_array_equal(back, told.routed_experts)


def test_a_dense_model_has_none_to_tell(folder, model):
    with pytest.raises(UserError, match=r"the model has none: set policy\.routing_replay to none"):
        with_engine(
            folder, model, lambda engine: engine.generate([request([1], routed_experts=True)])
        )


def test_a_token_keeps_its_first_record():
    first = np.zeros((2, 1, 1), dtype=np.int16)
    second = np.ones((4, 1, 1), dtype=np.int16)
    assert join_experts([first, second])[:, 0, 0].tolist() == [0, 0, 1, 1]
    aborted = np.zeros((0, 0, 0), dtype=np.int16)
    assert join_experts([first, aborted, second])[:, 0, 0].tolist() == [0, 0, 1, 1]
    assert join_experts([aborted, second])[:, 0, 0].tolist() == [1, 1, 1, 1]
