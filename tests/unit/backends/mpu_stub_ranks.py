"""One of two gloo ranks of test_stubbed_advantages.py: RANK STORE PLUGINS.

Prints its results as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpu_stub_cases import full_batch

from backends.megatron import ParallelState, compute_advantages_and_returns
from backends.megatron.testing import stub_config, stub_mpu
from rlcore.errors import RunFailed

DEADLINE_S = 30.0
WORLD = 2


def advantages(rank: int, parallel: ParallelState, *overrides: str) -> dict[str, Any]:
    config = stub_config(*overrides)
    batch = full_batch() if rank == 0 else None
    try:
        result = compute_advantages_and_returns(batch, config, parallel)
    except (RunFailed, ValueError) as error:
        return {"error": type(error).__name__, "says": str(error)}
    returns = None if result.returns is None else result.returns.tolist()
    return {
        "advantages": result.advantages.tolist(),
        "returns": returns,
        "dtype": str(result.advantages.dtype),
    }


def attempt(function: Any) -> str:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def main(rank: int, store: str, plugins: str) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, plugins)
    timeout = timedelta(seconds=DEADLINE_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timeout
    )
    parallel = ParallelState.from_mpu(stub_mpu(data=2), timeout_s=DEADLINE_S)
    alike = ParallelState.from_mpu(stub_mpu(rank=0), timeout_s=DEADLINE_S)
    plugin = "algorithm.estimator.name=stub_plugins:"
    seen = {
        "coordinates": [
            parallel.rank,
            parallel.world_size,
            parallel.dp_rank,
            list(parallel.replica_leaders),
        ],
        "ppo": advantages(
            rank, parallel, "algorithm.estimator.name=ppo", "algorithm.kl.reward_coef=0.2"
        ),
        "random": advantages(rank, parallel, plugin + "Random"),
        "alike": advantages(rank, alike, plugin + "Random"),
        "wide": advantages(rank, parallel, plugin + "Wide"),
        "broken": advantages(rank, parallel, plugin + "Broken"),
        "group": attempt(lambda: parallel.dp_group),
        "contradiction": attempt(
            lambda: ParallelState.from_mpu(stub_mpu(data=2, rank=0), timeout_s=DEADLINE_S)
        ),
        "calls": sys.modules["stub_plugins"].calls if "stub_plugins" in sys.modules else [],
    }
    dist.destroy_process_group()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
