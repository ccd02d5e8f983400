"""Collectives that move bytes and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.nccl_rules.base import GroupBase, Parts
from tests.nccl_rules.buffers import call_site, signature
from tests.nccl_rules.errors import Refused
from tests.nccl_rules.operation import Arrived, Work


class Moves(GroupBase):
    """Broadcast, gathers, scatter, all-to-all and barrier."""

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Send the root's tensor to all."""
        (tensor,) = tensors
        here = self.rank() == opts.rootRank
        return self.move(
            "broadcast",
            (signature(tensor), opts.rootRank),
            [tensor] if here else [],
            [] if here else [tensor],
            lambda own: (own if here else [_NOTHING]) * self.size(),
            lambda got: [] if here else [(tensor, got[opts.rootRank])],
            opts,
        )

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Gather tensors, also of different sizes, into a list on all."""
        (into,) = outputs
        (tensor,) = inputs
        if into[self.rank()].numel() != tensor.numel():
            place = signature(into[self.rank()])
            raise Refused(
                f"all_gather: {signature(tensor)} goes into {place} of the list, at {call_site()}"
            )
        return self.move(
            "all_gather",
            [signature(part) for part in into],
            [tensor],
            into,
            lambda own: own * self.size(),
            lambda got: list(zip(into, got)),
            opts,
            expects=[_num_bytes(part) for part in into],
        )

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Gather tensors of one size into one tensor each."""
        what = "all_gather_into_tensor"
        for output, tensor in zip(outputs, inputs):
            if (output.numel(), output.dtype) != (tensor.numel() * self.size(), tensor.dtype):
                pair = f"{signature(tensor)} of {self.size()} ranks into {signature(output)}"
                raise Refused(f"{what}: {pair}, at {call_site()}")
        sizes = [_num_bytes(tensor) for tensor in inputs]

        def into(got: Parts) -> Arrived:
            parts = [member.split(sizes) for member in got]
            return [(out, torch.cat([p[i] for p in parts])) for i, out in enumerate(outputs)]

        return self.move(
            what,
            [signature(tensor) for tensor in inputs],
            inputs,
            outputs,
            lambda own: [torch.cat(own)] * self.size(),
            into,
            opts,
        )

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> Work:
        """Exchange rows; the splits are lists, or arrays of numpy."""
        sends = _split_bytes(input, in_splits, self.size())
        return self.move(
            "all_to_all_single",
            input.dtype,
            [input],
            [output],
            lambda own: list(own[0].split(sends)),
            lambda got: [(output, torch.cat(got))],
            opts,
            expects=_split_bytes(output, out_splits, self.size()),
        )

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Exchange tensors."""
        return self.move(
            "all_to_all",
            inputs[0].dtype,
            inputs,
            outputs,
            lambda own: own,
            lambda got: list(zip(outputs, got)),
            opts,
            expects=[_num_bytes(output) for output in outputs],
        )

    # the names of torch 2.13
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Gather tensors into a list on the root."""
        (tensor,) = inputs
        into = outputs[0] if self.rank() == opts.rootRank else []
        return self.move(
            "gather",
            (signature(tensor), opts.rootRank),
            [tensor],
            into,
            lambda own: [own[0] if i == opts.rootRank else _NOTHING for i in range(self.size())],
            lambda got: list(zip(into, got)),
            opts,
        )

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Send each its tensor of the root's list."""
        (output,) = outputs
        here = self.rank() == opts.rootRank
        return self.move(
            "scatter",
            (signature(output), opts.rootRank),
            inputs[0] if here else [],
            [output],
            lambda own: own if here else [_NOTHING] * self.size(),
            lambda got: [(output, got[opts.rootRank])],
            opts,
        )

    def barrier(self, opts: Any = None) -> Work:
        """Meet; the host waits, on CUDA too."""
        work = self.move(
            "barrier", "", [], [], lambda own: [_NOTHING] * self.size(), lambda got: [], opts
        )
        work.operation.blocks = True
        return work


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _split_bytes(tensor: Tensor, rows: Any, size: int) -> list[int]:
    """Bytes of each part of a tensor that is split along its first dimension."""
    if rows is None or len(rows) == 0:
        return [_num_bytes(tensor) // size] * size
    row = _num_bytes(tensor[:1])
    return [int(count) * row for count in rows]
