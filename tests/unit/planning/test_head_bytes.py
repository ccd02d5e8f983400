"""The planned scratch memory of the LM head, against the storages in its backward pass."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.model.head import fused_logprobs

from rlcore.planning.activations import head_peak_bytes
from rlcore.planning.memory import Layout, Load
from rlcore.planning.shape import ModelShape

ROWS = 384
HIDDEN = 96
VOCAB = 2000


class Alone:
    """A tensor-parallel group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages, made while it is open, that existed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.made = {key: held for key, held in self.made.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [1 << 12, 1 << 16, 1 << 22])
def test_scratch_memory_of_the_head(dtype: torch.dtype, elements: int) -> None:
    hidden = torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=dtype, requires_grad=True)
    tokens = torch.randint(VOCAB, (ROWS,))
    logprobs, entropy = fused_logprobs(
        hidden,
        weight,
        tokens,
        vocab_size=VOCAB,
        tp=cast(ProcessGroup, Alone()),
        tile_elements=elements,
    )
    assert entropy is not None
    loss = (logprobs + entropy).sum()
    with LiveBytes() as live:
        loss.backward()
    shape = ModelShape(
        layers=1, hidden=HIDDEN, heads=1, groups=1, head_dim=HIDDEN, ffn=1, vocab=VOCAB
    )
    load = Load(
        tokens=2 * ROWS, micro_batches=1, trainable=ROWS, dtype_bytes=dtype.itemsize,
        chunk_elements=elements
    )  # fmt: skip
    assert head_peak_bytes(shape, Layout(), load) == pytest.approx(live.peak, rel=0.1)
    if elements < ROWS * VOCAB // 8:
        assert live.peak < 4 * ROWS * VOCAB, "logits of all positions never exist"
