"""The frame of every script of ranks: join the others, run the cases, leave."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from backends.megatron import MegatronBackend
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.load import load_hf
from backends.megatron.convert.read import read_architecture
from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.model.gpt import build_chunks, in_dtype, transformer_config
    from backends.megatron.parallel.state import ParallelState
from rlcore.config import Config
from rlcore.config.sections.policy import ParallelConfig
from rlcore.planning.memory import padded_vocab_size
from rlcore.trainer.objective import Objective
from tests.process_groups import release_groups

TIMEOUT = timedelta(seconds=240)  # of the start, for a busy machine, and of a collective
ON_CUDA = {"RANKS_DEVICE": "cuda"}  # environment of ranks that compute there, over NCCL


def device() -> torch.device:
    """Where this rank computes. Ranks beyond the last GPU begin again with the first."""
    if os.environ.get("RANKS_DEVICE", "cpu") == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())


def build_backend(
    config: Config, *, reference: bool = False, critic: bool = False, total_steps: int = 10
) -> MegatronBackend:
    """The backend of this rank."""
    return MegatronBackend(
        config, Objective(config.algorithm), with_reference=reference, with_critic=critic,
        total_steps=total_steps, device=device(),
    )  # fmt: skip


def load_chunks(
    source: Path,
    layout: ParallelConfig,
    parallel: ParallelState,
    dtype: str = "fp32",
    *,
    value_head: bool = False,
) -> tuple[Architecture, Any, list[Any]]:
    """What this rank has of the model in a Hugging Face folder; with Megatron's configuration."""
    arch = read_architecture(source)
    config = transformer_config(arch, layout, dtype, torch.device("cpu"), {})
    padded = padded_vocab_size(arch.vocab_size, 1, layout.tensor)
    built = build_chunks(arch, config, padded_vocab=padded, value_head=value_head)
    chunks = in_dtype(built, config)
    load_hf(chunks, arch, source, parallel)
    return arch, config, chunks


def payload(folder: Path) -> Any:
    """The payload of `spawn.run_ranks`."""
    return json.loads((folder / "payload.json").read_text())


@contextmanager
def joined(folder: Path, *, alone: bool = False) -> Iterator[None]:
    """Inside, the group of the ranks that `RANK` and `WORLD_SIZE` name exists.

    One rank has none unless `alone` is set.
    """
    torch.set_num_threads(1)
    place = device()
    if place.type == "cuda":
        torch.cuda.set_device(place)
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    if size == 1 and not alone:  # the backend makes its own
        yield
        return
    dist.init_process_group(
        "gloo" if place.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )
    yield
    dist.destroy_process_group()


def main(run: Callable[[dict[str, Any], Path], None]) -> None:
    """Call `run(case, folder)` for every case. The folder is the script's argument."""
    folder = Path(sys.argv[1])
    with joined(folder):
        for case in payload(folder):
            print("case", case["name"], flush=True)
            run(case, folder)
            release_groups()
