"""Collectives that compute. Gloo itself reduces, so results equal gloo's to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl_rules.base import GroupBase
from tests.nccl_rules.buffers import call_site, raw, signature, unguarded
from tests.nccl_rules.communicator import Call, Communicator, shortened
from tests.nccl_rules.errors import Refused
from tests.nccl_rules.operation import Arrived, Operation, Work

_OPERATORS = {"SUM", "AVG", "PRODUCT", "MIN", "MAX"}

# from the copies of the inputs to the results of the outputs, by calls on gloo
Reduce = Callable[[Communicator, Operation, list[Tensor]], list[Tensor]]


class Reductions(GroupBase):
    """Reductions to all, to a root, and scattered."""

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce a tensor in place on all."""

        def reduce(on: Communicator, operation: Operation, copies: list[Tensor]) -> list[Tensor]:
            on.wait(operation, on.gloo.allreduce(copies, opts))
            return copies

        return self._reduce("all_reduce", tensors, tensors, reduce, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce tensors in place on all, in one operation."""

        def reduce(on: Communicator, operation: Operation, copies: list[Tensor]) -> list[Tensor]:
            on.wait(operation, on.gloo.allreduce_coalesced(copies, opts))
            return copies

        return self._reduce("all_reduce_coalesced", tensors, tensors, reduce, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduce a tensor in place on the root."""
        here = self.rank() == opts.rootRank

        def reduce(on: Communicator, operation: Operation, copies: list[Tensor]) -> list[Tensor]:
            on.wait(operation, on.gloo.reduce(copies, opts))
            return copies if here else []

        what = f"reduce to {opts.rootRank}"
        return self._reduce(what, tensors, tensors if here else [], reduce, opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Work:
        """Reduce a list, and give each its element; elements may differ in size."""
        (parts,) = inputs

        def reduce(on: Communicator, operation: Operation, copies: list[Tensor]) -> list[Tensor]:
            for root, copy in enumerate(copies):
                to_root = dist.ReduceOptions()
                to_root.reduceOp = opts.reduceOp
                to_root.rootRank = root
                if copy.numel():
                    on.wait(operation, on.gloo.reduce([copy], to_root))
            return [copies[self.rank()]]

        return self._reduce("reduce_scatter", parts, outputs, reduce, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Reduce tensors, and give each member its part of them."""
        for output, tensor in zip(outputs, inputs):
            if (output.numel() * self.size(), output.dtype) != (tensor.numel(), tensor.dtype):
                pair = f"{signature(tensor)} over {self.size()} ranks into {signature(output)}"
                raise Refused(f"reduce_scatter_tensor: {pair}, at {call_site()}")

        def reduce(on: Communicator, operation: Operation, copies: list[Tensor]) -> list[Tensor]:
            results = [torch.empty_like(output) for output in outputs]
            for result, copy in zip(results, copies):
                on.wait(operation, on.gloo._reduce_scatter_base(result, copy, opts))
            return results

        return self._reduce("reduce_scatter_tensor", inputs, outputs, reduce, opts)

    # the names of torch 2.13
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce(
        self,
        what: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        reduce: Reduce,
        opts: Any,
    ) -> Work:
        operator = str(opts.reduceOp.op).rsplit(".", 1)[-1]
        if operator not in _OPERATORS:
            raise Refused(f"{what}: nccl_rules and NCCL have no {operator}, at {call_site()}")
        if operator == "AVG" and not reads[0].is_floating_point():
            raise Refused(f"{what}: NCCL averages no {reads[0].dtype}, at {call_site()}")
        site = call_site()
        communicator, operation = self._begin(what, site, reads, writes, opts)
        with unguarded():
            copies = [operation.read(tensor) for tensor in reads]
            for tensor in writes:
                operation.write(tensor)
        same = shortened(f"{operator} {[signature(tensor) for tensor in reads]}")
        call = Call(what, same, site, [0] * self.size())

        def run(operation: Operation) -> Arrived:
            communicator.compare(operation, call)
            results = reduce(communicator, operation, copies)
            return [(tensor, raw(result)) for tensor, result in zip(writes, results)]

        operation.run = run
        return communicator.enqueue(operation)
