"""NCCL's memory on a rank: the communicators that a layout makes it join, and their buffers.

NCCL gives each channel of a communicator a buffer for each of its three protocols, at the receiving
side of a connection (NCCL 2.27, src/init.cc, computeBuffSizes):

    Simple   NCCL_BUFFSIZE, 4 MiB (https://docs.nvidia.com/deeplearning/nccl/user-guide, env.html)
    LL128    120 x 640 threads x 8 steps x 8 B = 4.7 MiB
    LL       8 lines x 512 threads x 8 steps x 16 B = 0.5 MiB

together 10 MiB in pages of 2 MiB. A ring has one connection a channel. An all-to-all has a buffer
of 2 MiB for each channel and each peer of the node (sizes as in NVIDIA/nccl issue 1685). torch
makes a communicator at a group's first call, so groups of one rank and unused ones cost nothing.
Trees, NVLS and what NCCL keeps on its own are not counted.
"""

from __future__ import annotations

from rlcore.planning.devices import GPUS_PER_NODE
from rlcore.planning.memory import Layout

MIB = 1 << 20
CHANNELS = 16  # assumed of a communicator; NCCL chooses, at most NCCL_MAX_CTAS (32)
RING_BYTES = 10 * MIB  # of a channel
PEER_BYTES = 2 * MIB  # of a channel and a peer that sends


def training_groups(layout: Layout, *, moe: bool, tied: bool) -> dict[str, int]:
    """Return the groups of a training step that a rank joins, with their sizes.

    The rank is of the first or last stage, which share tied embeddings.
    """
    tp = layout.tensor
    pp = layout.pipeline
    sizes = {
        "tensor": tp,
        "pipeline": pp,
        "context": layout.context,
        "data and context": layout.data * layout.context,
        "embeddings": 2 if tied and pp > 1 else 1,
    }
    if moe:
        sizes["expert"] = layout.expert
        sizes["expert tensor"] = layout.expert_tensor
        sizes["expert and its tensor"] = layout.expert * layout.expert_tensor
        sizes["expert data"] = layout.expert_data
    # for the norm of the gradient
    if layout.distributed:
        sizes["whole optimizer"] = layout.gpus
    else:
        sizes["model"] = tp * pp
        sizes["model with experts"] = layout.expert * layout.expert_tensor * pp if moe else 1
    return {name: size for name, size in sizes.items() if size > 1}


def publication_groups(layout: Layout, *, everywhere: bool, engines: int) -> dict[str, int]:
    """Return the groups of a publication that its busiest rank joins, with their sizes.

    Args:
        everywhere: all ranks get the buckets.
        engines: those that this rank sends to over NCCL, each in a group with it.
    """
    gather = layout.tensor * layout.pipeline  # rank 0, and those that have parts for it
    if layout.expert > 1:
        gather = max(gather, layout.expert * layout.expert_tensor * layout.pipeline)
    sizes = {"parts of buckets": gather, "whole buckets": layout.gpus if everywhere else 1}
    sizes |= {f"engine {index + 1}": 2 for index in range(engines)}
    return {name: size for name, size in sizes.items() if size > 1}


def nccl_bytes(groups: dict[str, int], *, channels: int = CHANNELS) -> int:
    """Return the bytes of the buffers of a rank's communicators."""
    peers = min(groups.get("expert", 1), GPUS_PER_NODE) - 1
    return channels * (len(groups) * RING_BYTES + peers * PEER_BYTES)
