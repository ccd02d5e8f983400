"""Measures how long a checkpoint stops training.

One process, a model of about 100 million parameters in fp32 with AdamW's moments (1.3 GB), saved
alternately while training waits and in the background. Prints for each save how long training
stands still and how long the thread writes.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from backends.megatron.backend import MegatronBackend
from rlcore.algorithms import PolicyLoss
from rlcore.config.load import load_config

LIMIT_S = 600.0


def no_objective(inputs: Any) -> PolicyLoss:
    raise AssertionError("nothing is trained here")


def build(hidden: int, layers: int, folder: Path) -> MegatronBackend:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=3 * hidden,
        vocab_size=32768,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    loaded = load_config(
        [],
        [
            "run.name=bench",
            f"model.path={folder / 'model'}",
            "model.dtype=fp32",
            "data.paths=[none]",
            "training.steps=1",
            "algorithm.loss.name=sft",
        ],
    )
    backend = MegatronBackend(
        loaded.config,
        no_objective,
        with_reference=False,
        with_critic=False,
        total_steps=1,
        device="cpu",
    )
    optimizer = backend.policy.optimizer
    assert optimizer is not None
    optimizer.prepare_for_load()  # the moments, without a training pass
    optimizer.steps_taken = 1
    return backend


def save_while_waiting(backend: MegatronBackend, folder: Path) -> tuple[float, float]:
    """Return the seconds that training stood still, and 0 for the background."""
    began = time.perf_counter()
    backend.save(folder)
    return time.perf_counter() - began, 0.0


def save_in_background(backend: MegatronBackend, folder: Path) -> tuple[float, float]:
    began = time.perf_counter()
    backend.start_save(folder)
    blocked = time.perf_counter() - began
    while (written := backend.save_seconds()) is None:
        assert time.perf_counter() - began < LIMIT_S
        time.sleep(0.01)
    began = time.perf_counter()
    backend.finish_save()
    return blocked + time.perf_counter() - began, written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        folder = Path(scratch)
        backend = build(arguments.hidden, arguments.layers, folder)
        parameters = sum(p.numel() for chunk in backend.policy.chunks for p in chunk.parameters())
        print(
            f"{parameters / 1e6:.0f} M parameters, {parameters * 12 / 1e9:.2f} GB of weights and"
            " moments"
        )
        for number in range(arguments.repeats):
            for name, save in (("waiting", save_while_waiting), ("background", save_in_background)):
                target = folder / f"{name}{number}"
                blocked, written = save(backend, target)
                shutil.rmtree(target)
                print(
                    f"{name:10} stands still {blocked:6.2f} s, written in the background"
                    f" {written:6.2f} s",
                    flush=True,
                )
        print(f"host copies {backend._host_copies.num_bytes / 1e9:.2f} GB")
        backend.close()


if __name__ == "__main__":
    main()
