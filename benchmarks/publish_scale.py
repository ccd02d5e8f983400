"""Calculates how long publications to many engines take, from our own buckets and senders.

Nothing is transferred. The buckets are those of a real model (`weight_specs`, `cut_buckets`), the
ranks that send are those that `spread` chooses, and rlcore/planning/publication.py has the formula.

`bound` is what one network card needs for the model once: no engine gets it sooner from one sender.
The costs that are no transfer can be given: of a bucket at the engine (HTTP, loading), and of a
control call on rank 0, of which each bucket needs one an engine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backends.megatron.convert.read import read_architecture
from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.weights.export import weight_specs

from rlcore.planning.publication import Costs, one_sender, sender_each
from rlcore.weights import Bucket, cut_buckets
from rollout.weight_sync.links import spread

GIB = 1 << 30
ENGINES = (8, 16, 64, 256)
GOALS = {("7B", 64): 1.0, ("70B", 64): 4.0, ("235B", 64): 10.0}  # seconds
# (name of a configuration of transformers, its values, ranks of the trainer)
MODELS: dict[str, tuple[str, dict[str, int], int]] = {
    "7B": (
        "Qwen2",
        {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
        16,
    ),
    "70B": (
        "Llama",
        {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256},
        64,
    ),
    "235B": (
        "Qwen3Moe",
        {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
         "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288,
         "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
         "vocab_size": 151936},
        128,
    ),
    "1T": (
        "DeepseekV3",  # with the sizes of Kimi K2
        {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
         "num_key_value_heads": 64, "intermediate_size": 18432, "moe_intermediate_size": 2048,
         "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
         "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 1536,
         "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "vocab_size": 163840},
        512,
    ),
}  # fmt: skip


def buckets_of(family: str, values: dict[str, int], bucket_bytes: int) -> tuple[Bucket, ...]:
    """The buckets that a run would publish, in bf16."""
    config = getattr(transformers, f"{family}Config")(
        **values, architectures=[f"{family}ForCausalLM"], tie_word_embeddings=False
    )
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        (Path(scratch) / "model.safetensors").touch()
        architecture = read_architecture(Path(scratch))
    return cut_buckets(weight_specs(architecture, torch.bfloat16), bucket_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--card-gb", type=float, default=48.0, help="GB/s of a network card")
    parser.add_argument("--nvlink-gb", type=float, default=300.0, help="GB/s within a node")
    parser.add_argument("--bucket-ms", type=float, default=20.0, help="an engine's, a bucket")
    parser.add_argument("--call-ms", type=float, default=0.3, help="rank 0's, a control call")
    parser.add_argument("--bucket-gib", type=float, default=1.0)
    given = parser.parse_args()
    costs = Costs(
        given.card_gb * 1e9, given.nvlink_gb * 1e9, given.bucket_ms / 1e3, given.call_ms / 1e3
    )
    rows = [
        ("model", "ranks", "buckets", "engines", "bound", "one sender", "a sender each", "goal")
    ]
    for name, (family, values, world) in MODELS.items():
        buckets = buckets_of(family, values, int(given.bucket_gib * GIB))
        sizes = [bucket.num_bytes for bucket in buckets]
        size = sum(sizes)
        for engines in ENGINES:
            goal = GOALS.get((name, engines))
            rows.append(
                (
                    f"{name}, {size / 1e9:.0f} GB",
                    str(world),
                    str(len(buckets)),
                    str(engines),
                    f"{size / costs.card:.1f} s",
                    f"{one_sender(sizes, engines, costs):.1f} s",
                    f"{sender_each(sizes, engines, len(spread(world, engines)), costs):.1f} s",
                    "" if goal is None else f"{goal:g} s",
                )
            )
    for number, row in enumerate(rows):
        print(f"| {' | '.join(row)} |")
        if number == 0:
            print("|" + " --- |" * len(row))


if __name__ == "__main__":
    main()
