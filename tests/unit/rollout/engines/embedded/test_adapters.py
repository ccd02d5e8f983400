"""Adapters beside the weights of the embedded engine's model, against weights with them merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlcore.adapter_folder import ADAPTER_FILE, SETTINGS_FILE, read_policies
from rlcore.errors import ModelError
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.weights import PEFT_PREFIX, Bucket, TensorSpec, cut_buckets
from rollout.engines.embedded.cache import Cache
from rollout.engines.embedded.causal_lm import CausalLM
from rollout.engines.embedded.model_weights import ModelWeights

ALPHA = 6.0
SIZES = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48}
EXPERTS = {"experts": 4, "experts_per_token": 2}
CPU = torch.device("cpu")


class Held:
    """A model and its weights, which take updates."""

    def __init__(
        self,
        folder: Path,
        dtype: str = "fp32",
        alpha: float | None = ALPHA,
        policies: dict[str, str] | None = None,
    ) -> None:
        self.model = CausalLM(str(folder), device=CPU, dtype=dtype)
        self.weights = ModelWeights("engine-0", self.model.module, alpha, policies or {})

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
            return self.model.forward(tokens, Cache(8))


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


def written(folder: Path, factors: dict[str, torch.Tensor], rank: int, **settings: object) -> Path:
    folder.mkdir()
    save_file({PEFT_PREFIX + name: f for name, f in factors.items()}, folder / ADAPTER_FILE)
    given = {"r": rank, "lora_alpha": ALPHA, "target_modules": ["q_proj"]} | settings
    (folder / SETTINGS_FILE).write_text(json.dumps(given))
    return folder


def test_a_frozen_policy_computes_beside_every_version_of_the_trained_one(tmp_path: Path) -> None:
    init_model(tmp_path / "model", ModelSpec(family="qwen3", tied=False, **SIZES))
    base = random_weights(Held(tmp_path / "model"))
    frozen = factors_of(base, 9)
    held = Held(
        tmp_path / "model", policies={"earlier": str(written(tmp_path / "earlier", frozen, 4))}
    )
    fresh = Held(tmp_path / "model", alpha=None)
    for tensors in (base, factors_of(base, 1), base, factors_of(base, 2)):
        held.take(tensors)
        trained = held.logits()
        held.weights.use("earlier")
        fresh.take(merged(base, frozen))
        torch.testing.assert_close(held.logits(), fresh.logits(), atol=1e-4, rtol=1e-4)
        held.weights.use(None)
        assert torch.equal(held.logits(), trained)


def test_a_frozen_policy_and_merged_experts_do_not_go_together(tmp_path: Path) -> None:
    """The weights of experts hold the trained policy's adapters."""
    init_model(tmp_path / "model", ModelSpec(family="qwen3_moe", tied=False, **SIZES, **EXPERTS))
    base = random_weights(Held(tmp_path / "model"))
    experts = factors_of(base, 1)
    attention = {name: f for name, f in experts.items() if ".experts." not in name}
    with pytest.raises(ModelError, match=r"cannot serve rollout\.policies beside them"):
        Held(tmp_path / "model", policies={"a": str(written(tmp_path / "a", experts, 4))})
    held = Held(tmp_path / "model", policies={"b": str(written(tmp_path / "b", attention, 4))})
    held.take(base)
    with pytest.raises(ModelError, match=r"cannot serve rollout\.policies beside them"):
        held.take(experts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, r"use_dora True, expected False"),
        ({"alpha_pattern": {"q_proj": 3}}, r"alpha_pattern"),
        ({"r": 0}, r"r 0, expected a whole number from 1"),
        ({"lora_alpha": None}, r"lora_alpha None, expected a number"),
        ({"target_modules": ".*_proj"}, r"target_modules '\.\*_proj', expected a list of names"),
        ({"rank_pattern": [3]}, r"rank_pattern \[3\], expected ranks by name"),
    ],
)
def test_settings_that_engines_do_not_take_are_refused(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    folder = written(tmp_path / "policy", {"a.lora_A.weight": torch.ones(2, 2)}, 2, **settings)
    with pytest.raises(ModelError, match=rf"rollout\.policies\.old: .*{message}"):
        read_policies({"old": str(folder)})


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "policy", {"a.lora_C.weight": torch.ones(2, 2)}, 2)
    [policy] = read_policies({"old": str(folder)}).values()
    with pytest.raises(ModelError, match=r"rollout\.policies\.old: .*a\.lora_C\.weight"):
        policy.factors()
    (folder / ADAPTER_FILE).write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        policy.factors()
