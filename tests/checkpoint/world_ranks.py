"""A rank of a gloo world: run each case of each layout of the payload."""

from __future__ import annotations

import torch.distributed as dist
from checkpoint_case import train_and_save_or_load
from convert_case import convert, save_weights
from gloo_world import join_world
from refused_case import try_file_of_rank_0, try_full_disk, try_refused

from backends.megatron.cpu.shim import megatron_device
from backends.megatron.parallel.state import destroy_parallel, init_parallel
from rlcore.config.sections.policy import ParallelConfig
from tests.process_groups import release_groups

KINDS = {
    "convert": convert,
    "save_weights": save_weights,
    "checkpoint": train_and_save_or_load,
    "refused": try_refused,
    "full_disk": try_full_disk,
    "file_of_rank_0": try_file_of_rank_0,
}


def main() -> None:
    for entry in join_world():
        layout = ParallelConfig(**entry["layout"])
        with megatron_device("cpu"):
            parallel = init_parallel(layout, timeout_s=60, seed=0)
            for kind, case in entry["cases"]:
                KINDS[kind](case, layout, parallel)
            destroy_parallel()
            release_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
