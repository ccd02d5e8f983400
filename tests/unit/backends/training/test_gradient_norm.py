"""The gradient norm without Apex: Megatron's bits, without reading a number a tensor."""

from __future__ import annotations

import torch

from backends.megatron.cpu.shim import importing_megatron, megatron_device

with importing_megatron():
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    from backends.megatron.training.optimizer import l2_norm

NO_FLAG = torch.zeros(1, dtype=torch.int)
SHAPES = ((1,), (3,), (64, 32), (17, 5), (1000,))


def test_the_bits_are_megatrons() -> None:
    generator = torch.Generator().manual_seed(2)
    for count in (1, 2, 7, 100, 340):
        tensors = [
            torch.randn(SHAPES[i % 5], generator=generator) * 10.0 ** (i % 7 - 4)
            for i in range(count)
        ]
        with megatron_device("cpu"):
            want, _ = local_multi_tensor_l2_norm(65536, NO_FLAG, [tensors], False)
        assert torch.equal(l2_norm(65536, NO_FLAG, [tensors], False)[0], want)


def test_nothing_is_read_from_the_device() -> None:
    """A meta tensor has no value to read."""
    norm, _ = l2_norm(65536, NO_FLAG, [[torch.zeros(3, device="meta")] * 2], False)
    assert (norm.shape, norm.device.type) == ((1,), "meta")


def test_megatron_calls_it() -> None:
    assert clip_grads.l2_norm_impl is l2_norm
