"""Makes random Qwen2.5-shaped folders, a batch, and the configuration that trains on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlcore.config import Config
from rlcore.data.batch import RolloutBatch
from rlcore.data.packing.plan import MinibatchPlan
from rlcore.planning.shape import ModelShape


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model with tied embeddings."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int = 151936

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor of the folder."""
        hidden = self.hidden
        kv = self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, hidden)
        yield "model.norm.weight", (hidden,)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            yield layer + "input_layernorm.weight", (hidden,)
            yield layer + "post_attention_layernorm.weight", (hidden,)
            for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
                yield f"{layer}self_attn.{name}_proj.weight", (rows, hidden)
                yield f"{layer}self_attn.{name}_proj.bias", (rows,)
            yield layer + "self_attn.o_proj.weight", (hidden, hidden)
            yield layer + "mlp.gate_proj.weight", (self.intermediate, hidden)
            yield layer + "mlp.up_proj.weight", (self.intermediate, hidden)
            yield layer + "mlp.down_proj.weight", (hidden, self.intermediate)

    @property
    def sizes(self) -> ModelShape:
        """The shape from which parameters and FLOPs are counted."""
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            groups=self.kv_heads,
            head_dim=self.head_dim,
            ffn=self.intermediate,
            vocab=self.vocab,
            tied=True,
            qkv_bias=True,
        )


SHAPES = {
    "toy": Shape(64, 128, 2, 4, 2, vocab=512),
    "small": Shape(256, 704, 4, 4, 2, vocab=8192),
    "0.5B": Shape(896, 4864, 24, 14, 2),
    "1.5B": Shape(1536, 8960, 28, 12, 2),
}


def write_model(
    folder: Path, shape: Shape, dtype: torch.dtype, *, std: float = 0.02, device: str = "cpu"
) -> None:
    """A Hugging Face folder with weights N(0, std) and norms near 1.

    They are drawn on `device`, and are the same there at every call.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator(device).manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, size in shape.weights():
        noise = torch.randn(size, generator=generator, device=device) * std
        tensors[name] = (noise + 1 if "norm" in name else noise).to("cpu", dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))


def make_batch(vocab: int, pack: int, packs: int, longest: int) -> RolloutBatch:
    """Make sequences of unequal length that fill `packs` packs of `pack` tokens.

    A quarter of each is its prompt; the engine's log-probs are made up.
    """
    generator = torch.Generator().manual_seed(2)
    lengths: list[int] = []
    while (done := sum(lengths)) < pack * packs:
        left = pack - done % pack
        drawn = int(torch.randint(longest // 8, longest + 1, (1,), generator=generator))
        lengths.append(left if left < longest // 4 else min(drawn, left))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.ones(pack * packs, dtype=torch.bool)
    for start, n in zip(cu.tolist(), lengths):
        mask[start : start + max(n // 4, 1)] = False
    trainable = int(mask.sum())
    count = len(lengths)
    vectors = {
        "rollout_logprobs": torch.full((trainable,), -5.0),
        "versions": torch.zeros(trainable, dtype=torch.int64),
        "rewards": torch.randn(count, generator=generator),
        "group_ids": torch.arange(count) // 4,
        "rollout_ids": torch.arange(count),
        "sequence_ids": torch.arange(count),
    }
    ids = torch.randint(0, vocab, (pack * packs,), generator=generator, dtype=torch.int32)
    return RolloutBatch(ids, cu, mask, vectors)


def full_packs(batch: RolloutBatch, pack: int) -> MinibatchPlan:
    """The packs that `make_batch` filled, on one rank."""
    of = (batch.cu_tokens[:-1] // pack).tolist()
    return MinibatchPlan(
        (tuple(tuple(i for i, k in enumerate(of) if k == number) for number in range(of[-1] + 1)),)
    )


def make_config(
    folder: Path,
    *,
    dtype: str,
    micro_tokens: int,
    optimizer: dict[str, Any],
    offload: bool,
    recompute: bool = False,
    engine: dict[str, Any] | None = None,
    share_prefixes: str = "auto",
) -> Config:
    """GRPO with KL in the loss and an entropy bonus."""
    megatron = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if recompute
        else {}
    )
    given: dict[str, Any] = {
        "run": {"name": "gpu", "seed": 1},
        "data": {"paths": ["unused"]},
        "training": {"steps": 1},
        "model": {"path": str(folder), "dtype": dtype},
        "policy": {
            "optimizer": optimizer, "max_tokens_per_microbatch": micro_tokens, "megatron": megatron,
            "share_prefixes": share_prefixes,
        },
        "reference": {"offload": offload},
        "rollout": {"engine": engine or {}},
        "algorithm": {"kl": {"loss_coef": 0.01, "loss_kind": "k3"}, "entropy_coef": 0.001},
    }  # fmt: skip
    return Config.model_validate(given)
