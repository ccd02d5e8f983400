"""Process groups of ranks that set up one layout after the other."""

from __future__ import annotations

import torch.distributed as dist


def release_groups() -> None:
    """Destroy every group but the default one.

    Megatron forgets its groups without destroying them. Each gloo group has threads that wake up a
    hundred times a second: after twenty layouts a rank has 1,600, and the machine does little else.
    """
    if not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
