"""Measures how long a publication takes, beside the raw transfers of the same bytes.

Two Megatron ranks (TP 2) hold a model of the shape of Qwen2.5-0.5B with random weights in bf16, and
publish it as a run does, to one and to two engine processes over gloo. In the same rounds the same
processes pass the same number of bytes without anything around it: rank 1 its part to rank 0 (the
gather), then rank 0 everything to the engines (the broadcast). `ratio` is the time of that, one
after the other, over the time of a whole publication; above 1 is possible, since a publication
gathers the next bucket while the last is being sent. Both take turns, and the medians over rounds
are compared. Each round also has a publication without digests: `digests cost` is the median over
rounds of what digests add to a publication.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gloo_ranks import run_ranks
from process import busy_seconds

WORKER = Path(__file__).with_name("workers") / "publish_ranks.py"
GOAL = 0.8
MOST_FOR_DIGESTS = 0.05
WARMUP_ROUNDS = 2  # buffers, connections


def write_model(folder: Path, layers: int, vocab: int) -> None:
    """Write a config and an empty weights file: the ranks make the weights up."""
    from transformers import Qwen2Config

    (folder / "model.safetensors").touch()
    Qwen2Config(
        hidden_size=896,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=vocab,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)


def run_publications(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the ranks, and return the rounds that rank 0 measured."""
    (folder / "settings.json").write_text(json.dumps(settings))
    run_ranks(WORKER, folder, 2)
    rounds: list[dict[str, Any]] = json.loads((folder / "rounds.json").read_text())
    return rounds[WARMUP_ROUNDS:]


def report(receivers: int, num_bytes: int, rounds: Sequence[dict[str, float]], idle: str) -> float:
    """Print medians, and return the ratio."""
    median = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    ratios = [(one["raw_gather"] + one["raw_broadcast"]) / one["publish"] for one in rounds]
    ratio = statistics.median(ratios)
    raw = median["raw_gather"] + median["raw_broadcast"]
    print(
        f"\n{receivers} receiver{'s' * (receivers > 1)}, {num_bytes / 1e9:.3f} GB, medians of"
        f" {len(rounds)} rounds ({idle})"
    )
    print(
        f"  raw gather {median['raw_gather']:.3f} s + raw broadcast {median['raw_broadcast']:.3f} s"
        f" = {raw:.3f} s"
    )
    print(
        f"  publication {median['publish']:.3f} s, {num_bytes / median['publish'] / 1e9:.2f} GB/s"
    )
    print(f"  ratio {ratio:.2f} (from {min(ratios):.2f} to {max(ratios):.2f}; the goal is {GOAL})")
    added = [one["publish"] / one["plain"] - 1 for one in rounds]
    print(
        f"  without digests {median['plain']:.3f} s: digests cost {statistics.median(added):.1%}"
        f" (from {min(added):.1%} to {max(added):.1%}; the goal is {MOST_FOR_DIGESTS:.0%})"
    )
    print(
        f"  CPU seconds of all processes: raw {median['raw_cpu']:.2f}, publication"
        f" {median['publish_cpu']:.2f}, without digests {median['plain_cpu']:.2f}"
    )
    print(
        f"  in it: pause and begin {median['prepare']:.3f} s, waiting for the gather"
        f" {median['waiting']:.3f} s, sending {median['sending']:.3f} s, end and resume"
        f" {median['finish']:.3f} s"
    )
    print(
        f"  by itself: gather and conversion {median['export']:.3f} s; at the engines: receiving"
        f" {median['wire']:.3f} s, applied in {median['apply']:.3f} s"
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--bucket-mb", type=int, help="default: what rollout.engine.bucket_bytes is"
    )
    parser.add_argument("--json", type=Path, help="write all rounds there")
    arguments = parser.parse_args()
    results: dict[int, Any] = {}
    for receivers in arguments.receivers:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write_model(folder, arguments.layers, arguments.vocab)
            began = time.monotonic()
            busy = busy_seconds()
            rounds = run_publications(
                folder,
                {
                    "receivers": receivers,
                    "rounds": arguments.rounds + WARMUP_ROUNDS,
                    "bucket_mb": arguments.bucket_mb,
                },
            )
            idle = (
                f"{(busy_seconds() - busy) / (time.monotonic() - began):.1f} of {os.cpu_count()}"
                " cores busy, ours included"
            )
            num_bytes = int(rounds[0].pop("num_bytes"))
            for one in rounds[1:]:
                one.pop("num_bytes")
            results[receivers] = {
                "ratio": report(receivers, num_bytes, rounds, idle),
                "num_bytes": num_bytes,
                "rounds": rounds,
            }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
