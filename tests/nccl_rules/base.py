"""The base of the process group: its names, its communicators, and the checks of every call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl_rules.buffers import call_site, raw, unguarded
from tests.nccl_rules.communicator import Call, Communicator, shortened
from tests.nccl_rules.errors import Aborted, Refused
from tests.nccl_rules.operation import Arrived, Operation, Work, guard_depth
from tests.nccl_rules.peers import Peers

LIMIT_S = 300.0  # groups without a timeout of their own would wait for half an hour
_DTYPES = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip

Parts = list[Tensor]  # bytes: uint8 [n] each

groups: list[GroupBase] = []  # of this process, for `synchronize`
_peers: Peers | None = None


class GroupBase(dist.ProcessGroup):
    """What all kinds of operations have in common."""

    def __init__(self, options: Any, _: Any = None) -> None:
        global _peers
        super().__init__(options.group_rank, options.group_size)
        self.ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        self.timeout_s = min(LIMIT_S, options.timeout.total_seconds())
        self.batching = False  # inside batch_isend_irecv
        self._name = str(options.group_id)
        self._description = ""
        self._store = options.store
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._lock = threading.RLock()
        self._aborted = ""
        if _peers is None or not options.global_ranks_in_group:
            _peers = Peers(options.store, options.group_rank)
        groups.append(self)

    # torch asks a group written in C++ for these, which asks its backends: here is none

    def getBackendName(self) -> str:
        return "nccl_rules"

    def _get_backend(self, device: torch.device) -> GroupBase:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = "" if description == "undefined" else description

    def _group_name(self) -> str:
        return self._name

    def _group_desc(self) -> str:
        return self._description

    group_name = property(_group_name)
    group_desc = property(_group_desc)

    def _set_sequence_number_for_group(self) -> None: ...

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    set_timeout = _set_default_timeout

    def abort(self) -> None:
        """Give up all operations; the group is gone for good."""
        self._aborted = f"abort() at {call_site()}"
        for communicator in self._communicators.values():
            communicator.fail(Aborted(self._aborted))

    def shutdown(self) -> None:
        """End the threads."""
        for communicator in self._communicators.values():
            communicator.close()
        if self in groups:
            groups.remove(self)

    def complete_all(self) -> None:
        """Block until nothing is enqueued any more."""
        for communicator in list(self._communicators.values()):
            communicator.complete_all()

    def communicator(self, what: str, site: str, peer: int | None = None) -> Communicator:
        """The communicator of the group, or of this rank and `peer`, made by this call if new."""
        if self._aborted:
            raise Aborted(f"{what} at {site}: the group is gone: {self._aborted}")
        pair = () if peer is None else tuple(sorted((self.rank(), peer)))
        indices = pair or tuple(range(self.size()))
        with self._lock:
            if pair not in self._communicators:
                name = f"{self._description} ({self._name})" if self._description else self._name
                members = [self.ranks[i] for i in indices]
                self._communicators[pair] = Communicator(
                    f"{name}, pair {members}" if pair else name,
                    members,
                    indices.index(self.rank()),
                    self._store,
                    _peers,  # type: ignore[arg-type]
                )
            found = self._communicators[pair]
        if found.dead:
            raise Aborted(f"{what} at {site}: {found.name} is gone: {found.dead}")
        found.make(what, site, self.timeout_s)
        return found

    def check(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors that NCCL refuses."""
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise Refused(f"{what}: NCCL takes dense tensors only, at {call_site()}")
            if tensor.dtype not in _DTYPES:
                raise Refused(f"{what}: NCCL has no {tensor.dtype}, at {call_site()}")
            if not tensor.is_contiguous():
                shape = f"shape {list(tensor.shape)} has strides {tensor.stride()}"
                raise Refused(f"{what}: tensors must be contiguous; {shape}, at {call_site()}")

    def operation(self, communicator: Communicator, what: str, site: str, opts: Any) -> Operation:
        """A new operation; its limit is the call's own, or the group's."""
        given = getattr(opts, "timeout", None)
        seconds = given.total_seconds() if isinstance(given, timedelta) else -1.0
        timeout_s = min(LIMIT_S, seconds) if seconds > 0 else self.timeout_s
        blocks = not getattr(opts, "asyncOp", True) and not guard_depth()
        return Operation(communicator, what, site, timeout_s, blocks=blocks)

    def move(
        self,
        what: str,
        same: Any,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        out: Callable[[Parts], Parts],
        into: Callable[[Parts], Arrived],
        opts: Any,
        expects: list[int] | None = None,
    ) -> Work:
        """Enqueue a collective that computes nothing.

        Args:
            same: what the members' calls must have in common.
            out: from the bytes of `reads` to those for each member.
            into: from the bytes of each member to the buffers' new contents.
            expects: bytes from each member, where the program tells them.
        """
        site = call_site()
        communicator, operation = self._begin(what, site, reads, writes, opts)
        with unguarded():
            chunks = out([raw(operation.read(tensor)) for tensor in reads])
            for tensor in writes:
                operation.write(tensor)
        call = Call(what, shortened(str(same)), site, [c.numel() for c in chunks], expects)
        operation.run = lambda op: into(communicator.exchange(op, call, chunks))
        return communicator.enqueue(operation)

    def _begin(
        self, what: str, site: str, reads: Sequence[Tensor], writes: Sequence[Tensor], opts: Any
    ) -> tuple[Communicator, Operation]:
        if self.batching:
            raise Refused(f"{what}: nccl_rules batches sends and receives only, at {site}")
        self.check(what, [*reads, *writes])
        communicator = self.communicator(what, site)
        with unguarded():
            communicator.settle(reads, writes, f"{what} at {site}")
        return communicator, self.operation(communicator, what, site, opts)
