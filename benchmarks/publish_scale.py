"""Simulates publications to many engines, with our own buckets, senders and order of calls.

Nothing is transferred. The buckets are those of a real model (`weight_specs`, `cut_buckets`). The
rest is simulation/publication_world.py: the code of a run chooses the ranks that send and calls the
engines; network cards, NVLink, servers and the way of a call are simulated.

`wire` is the least time in which the bytes can pass: through the cards of an engine, one a GPU, or
through those of all ranks. What a bucket costs a server beside its bytes, and a call the service,
was measured on a CPU by bucket_costs.py and can be given.
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
    from backends.megatron.convert.layout import weight_specs

from benchmarks.simulation.publication_world import Costs, publish
from rlcore.planning.publication import bucket_limit
from rlcore.quantised_weights import quantised_bucket
from rlcore.weights import Bucket, cut_buckets

GIB = 1 << 30
ENGINES = (8, 16, 64, 256)
GOALS = {("7B", 64): 1.0, ("70B", 64): 4.0, ("235B", 64): 10.0}  # seconds
# (name of a configuration of transformers, its values, ranks of the trainer, GPUs of an engine)
MODELS: dict[str, tuple[str, dict[str, int], int, int]] = {
    "7B": (
        "Qwen2",
        {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
        16,
        1,
    ),
    "70B": (
        "Llama",
        {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256},
        64,
        4,
    ),
    "235B": (
        "Qwen3Moe",
        {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
         "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288,
         "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
         "vocab_size": 151936},
        128,
        8,
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
        16,
    ),
}  # fmt: skip


def buckets_of(family: str, values: dict[str, int], bucket_bytes: int) -> tuple[Bucket, ...]:
    """The buckets that a run would publish, in bf16."""
    with tempfile.TemporaryDirectory() as scratch:
        write_config(Path(scratch), family, values)
        architecture = read_architecture(Path(scratch))
    specs = weight_specs(architecture, torch.bfloat16)
    return cut_buckets(specs, bucket_limit(sum(spec.num_bytes for spec in specs), bucket_bytes))


def write_config(folder: Path, family: str, values: dict[str, int]) -> None:
    """Write a model's folder without its weights."""
    config = getattr(transformers, f"{family}Config")(
        **values, architectures=[f"{family}ForCausalLM"], tie_word_embeddings=False
    )
    config.save_pretrained(folder)
    (folder / "model.safetensors").touch()


def wire(size: int, ranks: int, engines: int, gpus: int, card: float) -> float:
    """Return the seconds that the bytes of a model need at least, to engines of `gpus` cards."""
    return size / card * max(1 / gpus, engines / ranks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = Costs()
    for name, default, what in (
        ("card-gb", usual.card / 1e9, "GB/s of a network card"),
        ("nvlink-gb", usual.nvlink / 1e9, "GB/s within a node"),
        ("broadcast-gb", usual.broadcast / 1e9, "GB/s to all ranks of the trainer"),
        ("load-ms", usual.load_s * 1e3, "a bucket at a server, beside its bytes and the call"),
        ("stock-load-ms", usual.stock_load_s * 1e3, "the same at a stock server"),
        ("digest-gb", usual.digest_rate / 1e9, "GB/s of a server's GPU that computes digests"),
        ("load-gb", usual.load_rate / 1e9, "GB/s from a bucket into the server's weights"),
        ("quantise-gb", usual.quantise_rate / 1e9, "GB/s in bf16 that a rank rounds to FP8"),
        ("way-ms", usual.way_s * 1e3, "the way of a call to a server and back"),
        ("call-ms", usual.call_s * 1e3, "of rank 0, a call"),
        ("bucket-gib", 1.0, "rollout.engine.bucket_bytes"),
    ):
        parser.add_argument(f"--{name}", type=float, default=default, help=what)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--engines", type=int, nargs="+", default=ENGINES)
    parser.add_argument("--ranks", type=int, help="of the trainer, for every model")
    parser.add_argument("--rails", type=int, help="rollout.engine.rails")
    parser.add_argument("--fp8", action="store_true", help="rollout.engine.quantization: fp8")
    given = parser.parse_args()
    costs = Costs(
        card=given.card_gb * 1e9,
        nvlink=given.nvlink_gb * 1e9,
        broadcast=given.broadcast_gb * 1e9,
        load_s=given.load_ms / 1e3,
        stock_load_s=given.stock_load_ms / 1e3,
        digest_rate=given.digest_gb * 1e9,
        load_rate=given.load_gb * 1e9,
        quantise_rate=given.quantise_gb * 1e9,
        way_s=given.way_ms / 1e3,
        call_s=given.call_ms / 1e3,
    )
    head = ("model", "buckets", "engines", "wire", "stock", "one rail", "ours", "goal")
    print(f"| {' | '.join(head)} |")
    print("|---|" + "---:|" * (len(head) - 1))
    for name in given.models:
        family, values, usual_ranks, gpus = MODELS[name]
        ranks = given.ranks or usual_ranks
        buckets = buckets_of(family, values, int(given.bucket_gib * GIB))
        whole = None
        if given.fp8:
            whole = buckets
            buckets = tuple(map(quantised_bucket, whole))
        size = sum(bucket.num_bytes for bucket in buckets)
        for engines in given.engines:
            goal = GOALS.get((name, engines))
            world = {"ranks": ranks, "engines": engines, "gpus": gpus, "costs": costs}
            world["whole"] = whole
            row = (
                f"{name}, {size / 1e9:.0f} GB, {ranks} ranks, {gpus} GPUs",
                str(len(buckets)),
                str(engines),
                f"{wire(size, ranks, engines, gpus, costs.card):.1f} s",
                f"{publish(buckets, calls_ahead=False, rails=1, **world).seconds:.1f} s",
                f"{publish(buckets, rails=1, **world).seconds:.1f} s",
                f"{publish(buckets, rails=given.rails, **world).seconds:.1f} s",
                "" if goal is None else f"{goal:g} s",
            )
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
