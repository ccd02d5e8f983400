"""A rank of a gloo world: run each case of each layout of the payload."""

from __future__ import annotations

import sys
from pathlib import Path

from checkpoint_case import train_and_save_or_load
from convert_case import convert, save_weights
from refused_case import try_file_of_rank_0, try_full_disk, try_refused

from backends.megatron.cpu.shim import megatron_device
from backends.megatron.parallel.state import destroy_parallel, init_parallel
from rlcore.config.sections.policy import ParallelConfig
from tests.parity.rank_main import joined, payload
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
    folder = Path(sys.argv[1])
    with joined(folder, alone=True):
        for entry in payload(folder):
            layout = ParallelConfig(**entry["layout"])
            with megatron_device("cpu"):
                parallel = init_parallel(layout, timeout_s=60, seed=0)
                for kind, case in entry["cases"]:
                    KINDS[kind](case, layout, parallel)
                destroy_parallel()
                release_groups()


if __name__ == "__main__":
    main()
