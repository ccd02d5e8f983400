"""What breaks a rule of NCCL. Each error names the calls, with rank, file and line."""

from __future__ import annotations

import torch.distributed as dist


class NcclRuleError(dist.DistBackendError):
    """A program that gloo runs, and NCCL does not."""


class Refused(NcclRuleError):
    """NCCL has no such operation, data type or tensor."""


class Mismatch(NcclRuleError):
    """The members of a communicator made different calls: NCCL hangs, or mixes bytes up."""


class BufferRace(NcclRuleError):
    """A buffer was used while the communication had it: CUDA reads or writes the wrong bytes."""


class Stuck(NcclRuleError):
    """An operation, or the making of a communicator, ran into its time limit."""


class Aborted(NcclRuleError):
    """The communicator is gone, since it was aborted or one of its operations failed."""
