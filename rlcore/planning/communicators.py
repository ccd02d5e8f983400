"""NCCL's memory on a rank: the communicators that a layout makes it join, and their buffers.

NCCL gives each channel of a communicator a buffer for each of its three protocols (NCCL 2.27,
src/init.cc, computeBuffSizes): 4 + 4.7 + 0.5 MiB, in pages of 2 MiB. An all-to-all has a buffer of
2 MiB for each channel and each peer of the node (sizes as in NVIDIA/nccl issue 1685). torch makes a
communicator at a group's first call, so groups of one rank and unused ones cost nothing.
"""

from __future__ import annotations

from rlcore.planning.devices import GPUS_PER_NODE
from rlcore.planning.job import Job
from rlcore.planning.memory import Layout

MIB = 1 << 20
CHANNELS = 16  # assumed of a communicator; NCCL chooses, at most NCCL_MAX_CTAS (32)
RING_BYTES = 10 * MIB  # of a channel
PEER_BYTES = 2 * MIB  # of a channel and a peer that sends


def communicators(layout: Layout, job: Job) -> int:
    """Return how many groups the busiest rank joins, those of a publication included."""
    groups = len(training_groups(layout, moe=job.shape.experts > 0, tied=job.shape.tied))
    if job.publication is None:
        return groups
    exchanges_parts = layout.tensor * layout.pipeline * layout.expert > 1
    broadcasts = job.publication.is_everywhere(layout) and layout.gpus > 1
    return groups + exchanges_parts + broadcasts + job.publication.engines_of_a_sender(layout)


def nccl_bytes(layout: Layout, job: Job) -> int:
    """Return the bytes of the buffers of a rank's communicators."""
    peers = min(layout.expert, GPUS_PER_NODE) - 1
    return CHANNELS * (communicators(layout, job) * RING_BYTES + peers * PEER_BYTES)


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
