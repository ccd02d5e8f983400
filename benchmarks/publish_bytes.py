"""Counts what each sender of a real publication broadcasts to engines, beside the simulation.

The ranks are Megatron's, over gloo; the engines are embedded ones in processes of their own, which
compare digests of what they received. The simulation is that of publish_scale.py,
for the same buckets, ranks and engines: both must send the same bytes from the same ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gloo_ranks import run_ranks
from benchmarks.publish_scale import buckets_of
from benchmarks.simulation.publication_world import Costs, publish

WORKER = Path(__file__).with_name("workers") / "sending_ranks.py"
# (ranks of the trainer, engines): 2, 4, 6, 8 and 8 processes
LAYOUTS = ((1, 1), (2, 2), (2, 4), (3, 5), (4, 4))
BUCKET_BYTES = 1 << 20
MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}


class Sent(NamedTuple):
    """Bytes that each rank sent to engines, in a real publication and in the simulation."""

    real: Sequence[int]
    simulated: Sequence[int]


def compare(folder: Path, ranks: int, engines: int) -> Sent:
    """Publish once. `folder` is empty, and is left with logs."""
    from transformers import Qwen2Config

    Qwen2Config(
        **MODEL, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"]
    ).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    settings = {"engines": engines, "bucket_bytes": BUCKET_BYTES}
    (folder / "settings.json").write_text(json.dumps(settings))
    run_ranks(WORKER, folder, ranks)
    real = [int(json.loads((folder / f"sent_{rank}.json").read_text())) for rank in range(ranks)]
    buckets = buckets_of("Qwen2", MODEL, BUCKET_BYTES)
    simulated = publish(buckets, ranks=ranks, engines=engines, senders=ranks, costs=Costs()).sent
    return Sent(real, [simulated.get(rank, 0) for rank in range(ranks)])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    print("| ranks | engines | sent by each rank, bytes | simulated |")
    print("|---:|---:|---|---|")
    equal = True
    for ranks, engines in LAYOUTS:
        with tempfile.TemporaryDirectory() as scratch:
            sent = compare(Path(scratch), ranks, engines)
        equal = equal and sent.real == sent.simulated
        real, simulated = (", ".join(f"{size:,}" for size in sizes) for sizes in sent)
        same = "the same" if sent.real == sent.simulated else simulated
        print(f"| {ranks} | {engines} | {real} | {same} |", flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
