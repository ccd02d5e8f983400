"""Several ranks on one GPU, for debugging a layout: NCCL 2.30 takes them where it is asked to."""

from __future__ import annotations

import os

# NCCL reads it too. Without it a communicator refuses two ranks with the same GPU.
SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"
SINCE = "2.30"


def ranks_share_gpus() -> bool:
    """Whether the environment lets ranks, and engines in their process groups, share a GPU."""
    return os.environ.get(SWITCH) == "1"
