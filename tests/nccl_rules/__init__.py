"""`nccl_rules`: a backend of torch.distributed for CPU tests that is strict where gloo is kind.

    nccl_rules.install()    the default group, and all without a backend of their own, follow it

A communicator is made by the first call on a group, for which all of its ranks must come, and is
one queue. The bytes that are sent are those of the call, and a receive buffer is worthless until
`wait()`. A limit counts from the enqueueing; what is queued behind a stuck operation is stuck; a
communicator that failed is gone. docs/testing.md says what this is like, and what it cannot be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.nccl_rules.errors import Aborted, BufferRace, Mismatch, NcclRuleError, Refused, Stuck
from tests.nccl_rules.group import NcclRulesGroup
from tests.nccl_rules.guard import guard, synchronize

__all__ = [
    "INSTALLED",
    "ON",
    "Aborted",
    "BufferRace",
    "Mismatch",
    "NcclRuleError",
    "NcclRulesGroup",
    "Refused",
    "Stuck",
    "guard",
    "install",
    "install_if_asked",
    "register",
    "synchronize",
]

NAME = "nccl_rules"
SWITCH = "PROCESS_GROUPS"  # environment: ranks of tests with PROCESS_GROUPS=nccl_rules follow it
ON = {SWITCH: NAME}
INSTALLED = "nccl_rules: the default process group keeps NCCL's rules"  # in the rank's log


def register() -> None:
    """Make `dist.init_process_group("nccl_rules")` work."""
    if hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, NcclRulesGroup, extended_api=True, devices=["cpu"])
    batch = _batching(distributed_c10d.batch_isend_irecv)
    dist.batch_isend_irecv = distributed_c10d.batch_isend_irecv = batch


def install() -> None:
    """Let `dist.init_process_group("gloo")` make a group by NCCL's rules; subgroups follow it.

    Groups whose backend is given stay gloo's, as control groups are on CUDA.
    """
    register()
    print(INSTALLED, file=sys.stderr, flush=True)
    init = dist.init_process_group

    def init_process_group(backend: str, *args: Any, **kwargs: Any) -> None:
        init(NAME if backend == "gloo" else backend, *args, **kwargs)

    dist.init_process_group = init_process_group  # type: ignore[assignment]


def install_if_asked() -> None:
    """`install` where the environment asks for it."""
    if os.environ.get(SWITCH) == NAME:
        install()


def _batching(batch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """torch's, which makes one operation of a batch only for groups written in C++."""

    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Any]:
        group = p2p_op_list[0].group or dist.group.WORLD if p2p_op_list else None
        if not isinstance(group, NcclRulesGroup):
            return batch(p2p_op_list)
        return group.batch_isend_irecv(p2p_op_list)  # type: ignore[return-value]

    return batch_isend_irecv
