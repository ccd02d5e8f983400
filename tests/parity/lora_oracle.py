"""Adapters in plain torch: autograd of W + scale B A, and PEFT itself, in float64."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import oracle
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

RANK = 4
ALPHA = 6.0
PREFIX = "base_model.model."


def write_adapter(model: Path, folder: Path, targets: Sequence[str], expert_rank: int = 0) -> None:
    """A PEFT folder with random factors, B too, for every targeted matrix of a model's folder."""
    import peft

    generator = torch.Generator().manual_seed(11)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    with safe_open(model / "model.safetensors", "pt") as stored:
        for name in sorted(stored.keys()):
            module = name.removesuffix(".weight")
            rank = expert_rank if ".experts." in name else RANK
            if module.rpartition(".")[2] not in targets or not name.endswith(".weight") or not rank:
                continue
            rows, width = stored.get_slice(name).get_shape()
            if rank != RANK:
                ranks[module] = rank
            factors = {"A": (rank, width, 0.2), "B": (rows, rank, 0.05)}
            for factor, (*shape, size) in factors.items():
                key = f"{PREFIX}{module}.lora_{factor}.weight"
                tensors[key] = torch.randn(shape, generator=generator) * size
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=list(targets),
        rank_pattern=ranks,
        task_type="CAUSAL_LM",
    )
    config.base_model_name_or_path = str(model)
    config.save_pretrained(folder)


def scores(model: Any) -> dict[str, Tensor]:
    def head(hidden: Tensor, targets: Tensor) -> Tensor:
        log_p = (model.lm_head(hidden) / oracle.TEMPERATURE).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return torch.stack([log_p.gather(1, targets[:, None])[:, 0], entropy])

    with torch.no_grad():
        logprobs, entropy = torch.cat(oracle._per_sequence(model, head), dim=1)
    return {"logprobs": logprobs, "entropy": entropy}


def by_peft(model_folder: Path, adapter: Path) -> dict[str, Any]:
    """Scores, the gradients of every factor, the merged weights, and scores without adapters."""
    import peft

    base = oracle._load(model_folder)
    model = peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    model.double()
    logprobs, entropy = oracle._policy_backward(model.base_model.model)
    gradients = {
        name.removeprefix(PREFIX).replace(".default", ""): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    with model.disable_adapter():
        off = scores(model.base_model.model)
    merged = {name: p.detach() for name, p in model.merge_and_unload().named_parameters()}
    return {"logprobs": logprobs, "entropy": entropy, "gradients": gradients, "off": off,
        "merged": merged}  # fmt: skip


def by_definition(model_folder: Path, adapter: Path) -> dict[str, Any]:
    """The same from `W + scale B A` under autograd: no module of PEFT takes part."""
    model = oracle._load(model_folder)
    off = scores(model)
    stored = load_file(adapter / "adapter_model.safetensors")
    factors = {
        name.removeprefix(PREFIX): tensor.double().requires_grad_()
        for name, tensor in stored.items()
    }
    merged = {
        name: weight.detach() + _delta(name, weight.detach(), factors, model.config.model_type)
        for name, weight in model.named_parameters()
    }
    _replace(model, merged)
    logprobs, entropy = oracle._policy_backward(model)
    whole = {
        on_disk: part.detach()
        for name, weight in merged.items()
        for on_disk, part in oracle._as_on_disk(model, name, weight)
    }
    return {"logprobs": logprobs, "entropy": entropy, "off": off, "merged": whole,
        "gradients": {name: factor.grad for name, factor in factors.items()}}  # fmt: skip


def _delta(name: str, weight: Tensor, factors: Mapping[str, Tensor], family: str) -> Tensor:
    """What the adapters add to a parameter; transformers holds a layer's experts in one."""

    def of(module: str, like: Tensor) -> Tensor:
        if f"{module}.lora_A.weight" not in factors:
            return torch.zeros_like(like)
        a = factors[f"{module}.lora_A.weight"]
        return (ALPHA / a.size(0)) * factors[f"{module}.lora_B.weight"] @ a

    stacked = re.match(r"(.*\.experts)\.(gate_up_proj|down_proj)$", name)
    if stacked is None:
        return of(name.removesuffix(".weight"), weight)
    experts = stacked[1]
    names = ["gate_proj", "up_proj"] if stacked[2] == "gate_up_proj" else ["down_proj"]
    if family == "mixtral":
        experts = experts.replace(".mlp.", ".block_sparse_moe.")
        names = [{"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part] for part in names]
    found = []
    for expert, one in enumerate(weight):
        parts = zip(names, one.chunk(len(names)))
        found.append(torch.cat([of(f"{experts}.{expert}.{part}", like) for part, like in parts]))
    return torch.stack(found)


def _replace(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Plain tensors in the place of parameters, so that autograd sees what they are made of."""
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in weights.items():
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        del module._parameters[key]
        setattr(module, key, tensor)
    if tied:
        del model.lm_head._parameters["weight"]
        model.lm_head.weight = weights["model.embed_tokens.weight"]
