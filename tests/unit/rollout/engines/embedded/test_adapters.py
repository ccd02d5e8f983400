"""Adapters beside the weights of the embedded engine's model, against weights with them merged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcore.errors import ModelError
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.engines.embedded.causal_lm import CausalLM, KVCache
from rollout.engines.embedded.model_weights import ModelWeights

ALPHA = 6.0
SIZES = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48}
EXPERTS = {"experts": 4, "experts_per_token": 2}
CPU = torch.device("cpu")


class Held:
    """A model and its weights, which take updates."""

    def __init__(self, folder: Path, dtype: str = "fp32", alpha: float | None = ALPHA) -> None:
        self.model = CausalLM(str(folder), device=CPU, dtype=dtype)
        self.weights = ModelWeights("engine-0", self.model.module, alpha)

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        buckets = layout(tensors)
        self.weights.begin(buckets)
        for bucket in buckets:
            flat = [tensors[s.name].reshape(-1).view(torch.uint8) for s in bucket.tensors]
            self.weights.copy(bucket.index, torch.cat(flat))
        self.weights.end()

    def logits(self) -> torch.Tensor:
        tokens = torch.tensor([[3, 7, 1, 9, 4], [2, 2, 8, 5, 6]])
        with torch.no_grad():
            return self.model.forward(tokens, torch.arange(5)[None], None, KVCache(8))


def layout(tensors: dict[str, torch.Tensor]) -> tuple[Bucket, ...]:
    specs = [
        TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in tensors.items()
    ]
    return cut_buckets(specs, 4096)


def random_weights(held: Held) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(t.shape, generator=generator) * 0.3
        for name, t in held.weights.tensors.items()
    }


def factors_of(base: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Of every matrix but embedding, head and router."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if weight.dim() == 2 and module.endswith(("_proj", ".w1", ".w2", ".w3")):
            rank = 2 if ".experts." in module else 4
            found[f"{module}.lora_A.weight"] = torch.randn(
                rank, weight.shape[1], generator=generator
            )
            found[f"{module}.lora_B.weight"] = torch.randn(
                weight.shape[0], rank, generator=generator
            )
    return found


def merged(
    base: dict[str, torch.Tensor], factors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    found = dict(base)
    for name, a in factors.items():
        if ".lora_A." in name:
            module = name.removesuffix(".lora_A.weight")
            b = factors[f"{module}.lora_B.weight"]
            found[f"{module}.weight"] = base[f"{module}.weight"] + ALPHA / len(a) * (b @ a)
    return found


@pytest.mark.parametrize(
    ("family", "experts"), [("qwen3", {}), ("qwen3_moe", EXPERTS), ("mixtral", EXPERTS)]
)
def test_a_model_with_adapters_computes_w_plus_ba(
    family: str, experts: dict[str, int], tmp_path: Path
) -> None:
    init_model(tmp_path / "model", ModelSpec(family=family, tied=False, **SIZES, **experts))
    held = Held(tmp_path / "model")
    base = random_weights(held)
    held.take(base)
    plain = held.logits()
    for seed in (1, 2):
        factors = factors_of(base, seed)
        assert len(factors) == (64 if experts else 28)
        held.take(factors)
        fresh = Held(tmp_path / "model", alpha=None)
        fresh.take(merged(base, factors))
        torch.testing.assert_close(held.logits(), fresh.logits(), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(held.logits(), plain, atol=0.1)
    held.take(base)
    assert torch.equal(held.logits(), plain), "whole weights end the adapters"


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    init_model(tmp_path / "model", ModelSpec(family="qwen3_moe", tied=False, **SIZES, **EXPERTS))
    held = Held(tmp_path / "model")
    base = random_weights(held)
    factors = factors_of(base, 1)
    with pytest.raises(ModelError, match="before the weights below them"):
        held.weights.begin(layout(factors))
    held.take(base)
    name = "model.layers.0.self_attn.q_proj.lora_B.weight"
    for wrong in (
        {k: v for k, v in factors.items() if k != name},
        {**factors, name: factors[name][:-1]},
        {**factors, "model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(4, 32)},
    ):
        with pytest.raises(ModelError, match=r"layers.*lora_"):
            held.weights.begin(layout(wrong))
    narrow = Held(tmp_path / "model", "bf16")
    narrow.take(base)
    with pytest.raises(ModelError, match=r"policy\.lora\.expert_rank to 0"):
        narrow.weights.begin(layout(factors))
