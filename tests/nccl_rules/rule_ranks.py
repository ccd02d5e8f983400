"""A rank of test_nccl_rules.py: run the programs of the payload, and write how each ended."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import nccl_rules
from tests.nccl_rules.rule_cases import CASES, PATIENCE, spare


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    nccl_rules.install()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    control = dist.new_group(backend="gloo")
    spare.append(dist.new_group([0, 1], timeout=PATIENCE))
    ended: dict[str, Any] = {}
    for name in json.loads((folder / "payload.json").read_text()):
        print(name, flush=True)
        program, ranks, limit = CASES[name]
        group = dist.new_group(list(range(ranks)), timeout=limit)
        if rank < ranks:
            try:
                ended[name] = program(group, rank)
            except nccl_rules.NcclRuleError as error:
                ended[name] = f"{type(error).__name__}: {error}"
        dist.barrier(control)
    (folder / f"rank{rank}.json").write_text(json.dumps(ended))
    dist.barrier(control)
    os._exit(0)  # some operations are stuck on purpose


if __name__ == "__main__":
    main()
