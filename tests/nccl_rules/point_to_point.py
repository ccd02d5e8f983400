"""Sends and receives, one by one or batched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl_rules.base import GroupBase
from tests.nccl_rules.buffers import call_site, raw, signature, unguarded
from tests.nccl_rules.communicator import HEADER_BYTES, Call, Communicator
from tests.nccl_rules.errors import Mismatch, Refused
from tests.nccl_rules.operation import Arrived, Operation, Work

_HEADER_TAG = 1
_DATA_TAG = 2


class Transfer(NamedTuple):
    """A send to a member of the communicator, or a receive from it."""

    is_send: bool
    tensor: Tensor
    peer: int
    tag: int

    @property
    def name(self) -> str:
        """As torch calls it."""
        return f"{'isend' if self.is_send else 'irecv'} {signature(self.tensor)}, tag {self.tag}"


class PointToPoint(GroupBase):
    """Sends and receives. A batch is one operation on the communicator of the whole group.

    A single one is an operation on a communicator of the two ranks.
    """

    def __init__(self, options: Any, _: Any = None) -> None:
        super().__init__(options)
        self._batch: list[Transfer] = []

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Work | None:
        """Send; inside a batch with it."""
        return self._transfer(Transfer(True, tensors[0], dst, tag))

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work | None:
        """Receive; inside a batch with it."""
        return self._transfer(Transfer(False, tensors[0], src, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        """NCCL cannot."""
        raise Refused(f"recv: NCCL receives from a named rank only, at {call_site()}")

    def _transfer(self, one: Transfer) -> Work | None:
        self.check(one.name, [one.tensor])
        if self.batching:
            self._batch.append(one)
            return None
        site = call_site()
        what = f"{one.name} {'to' if one.is_send else 'from'} rank {self.ranks[one.peer]}"
        if one.peer == self.rank():
            raise Refused(f"{what}: outside of a batch it waits for itself, at {site}")
        communicator = self.communicator(what, site, one.peer)
        pair = sorted((self.rank(), one.peer))
        return self._enqueue(communicator, what, site, [one._replace(peer=pair.index(one.peer))])

    def batch_isend_irecv(self, operations: Sequence[dist.P2POp]) -> list[Work]:
        """One operation for all of them."""
        self.batching = True
        try:
            for one in operations:
                peer = "group_dst" if one.op is dist.isend else "group_src"
                one.op(one.tensor, group=self, tag=one.tag, **{peer: one.group_peer})
        finally:
            self.batching = False
            batch = self._batch
            self._batch = []
        site = call_site()
        words = [f"{'isend to' if t.is_send else 'irecv from'} {self.ranks[t.peer]}" for t in batch]
        what = f"batch_isend_irecv({', '.join(dict.fromkeys(words))})"
        return [self._enqueue(self.communicator(what, site), what, site, batch)]

    def _enqueue(
        self, communicator: Communicator, what: str, site: str, batch: Sequence[Transfer]
    ) -> Work:
        reads = [one.tensor for one in batch if one.is_send]
        writes = [one.tensor for one in batch if not one.is_send]
        with unguarded():
            communicator.settle(reads, writes, f"{what} at {site}")
            operation = self.operation(communicator, what, site, None)
            sends = [
                one._replace(tensor=operation.read(one.tensor)) for one in batch if one.is_send
            ]
            for tensor in writes:
                operation.write(tensor)
        receives = [one for one in batch if not one.is_send]
        operation.run = lambda op: _carry_out(communicator, op, sends, receives)
        return communicator.enqueue(operation)


def _carry_out(
    on: Communicator, operation: Operation, sends: Sequence[Transfer], receives: Sequence[Transfer]
) -> Arrived:
    """Gloo's sends end when the other side has posted its receive, as large ones of NCCL do."""
    arrived: Arrived = []
    begun: list[dist.Work] = []
    to_itself = [one.tensor for one in sends if one.peer == on.rank]
    for one in sends:
        if one.peer == on.rank:
            continue
        data = raw(one.tensor)
        call = Call(one.name, signature(one.tensor), operation.site, [data.numel()])
        begun.append(on.gloo.send([call.encode()], one.peer, _HEADER_TAG))
        if data.numel():
            begun.append(on.gloo.send([data], one.peer, _DATA_TAG))
    for one in receives:
        if one.peer == on.rank:
            arrived.append((one.tensor, raw(to_itself.pop(0))))
            continue
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        on.wait(operation, on.gloo.recv([header], one.peer, _HEADER_TAG))
        sent = Call.decode(header)
        data = torch.empty_like(raw(one.tensor))
        if sent.sends != [data.numel()] or not sent.what.endswith(f"tag {one.tag}"):
            raise Mismatch(
                f"a send and its receive on {on.name} differ:\n"
                f"  rank {on.members[one.peer]}: {sent.what} at {sent.site}\n"
                f"  rank {on.members[on.rank]}: {one.name} at {operation.site}"
            )
        if data.numel():
            on.wait(operation, on.gloo.recv([data], one.peer, _DATA_TAG))
        arrived.append((one.tensor, data))
    for work in begun:
        on.wait(operation, work)
    return arrived
