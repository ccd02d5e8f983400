"""Meta tensors for floats, integers with values, and the bytes counted on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.dryrun.stubs import assumed_choice

from backends.megatron.dryrun.mode import FunctionsOfCuda, MetaFloats
from backends.megatron.dryrun.usage import Usage


@pytest.fixture
def usage() -> Iterator[Usage]:
    counted = Usage()
    with FunctionsOfCuda(counted), MetaFloats(counted):
        yield counted


def test_floats_have_no_memory_and_integers_have_values(usage: Usage) -> None:
    weights = torch.zeros(1 << 20, 1 << 20)
    assert weights.is_meta
    lengths = torch.tensor([3, 1, 2])
    assert lengths.cumsum(0).tolist() == [3, 4, 6]
    picked = torch.ones(10, 4).index_select(0, lengths)
    assert picked.is_meta
    assert picked.shape == (3, 4)
    chosen = torch.ones(2, 3).masked_select(torch.tensor([[True, False, True], [False] * 3]))
    assert chosen.shape == (2,), "how many is known, since the mask is"


def test_live_bytes_and_their_peak(usage: Usage) -> None:
    with usage.phase("step") as phase:
        x = torch.ones(1024, 256)  # 1 MiB
        y = x * 2
        z = y.view(-1)
        assert usage.live == 2 << 20, "a view is no memory of its own"
        del y, z
        assert usage.live == 1 << 20
        x.mul_(3)
    assert phase.peak.bytes == 2 << 20
    assert phase.peak.operation == "aten::mul [1024, 256] float32"
    del x
    assert usage.live == 0


def test_a_backward_pass_is_counted_by_its_node(usage: Usage) -> None:
    weight = torch.ones(512, 512, requires_grad=True)
    with usage.phase("backward") as phase:
        (torch.ones(64, 512) @ weight).sum().backward()
    # weight, its gradient and the input; the sum, and its gradient, which is only expanded
    assert phase.peak.bytes == 4 * (2 * 512 * 512 + 64 * 512) + 2 * 4
    assert phase.peak.place.startswith("MmBackward0")


def test_host_memory_is_not_counted(usage: Usage) -> None:
    host = torch.empty(1 << 20, pin_memory=False)
    again = torch.empty_like(host)
    named = torch.zeros(1 << 20, device="cpu")
    copied = torch.ones(4).cpu()
    assert usage.live == 0
    assert all(usage.is_host(t) for t in (host, again, named, copied))


def test_a_resized_storage_is_measured_again(usage: Usage) -> None:
    weight = torch.ones(1 << 20)
    weight.untyped_storage().resize_(0)
    usage.measure_again()
    assert usage.live == 0
    weight.untyped_storage().resize_(4 << 20)
    usage.measure_again()
    assert usage.live == 4 << 20


def test_a_number_that_the_host_reads_is_named(usage: Usage) -> None:
    with usage.phase("step") as phase:
        assert float(torch.ones(3).norm()) == 1.0
    assert sum(phase.reads.values()) == 1


def test_a_norm_keeps_what_the_kernel_of_cuda_keeps(usage: Usage) -> None:
    x = torch.ones(1024, 256, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(256, dtype=torch.bfloat16)
    before = usage.live
    y = F.rms_norm(x, (256,), weight, 1e-6)
    assert usage.live - before == 1024 * 256 * 2 + 1024 * 4, "its output, and 1 / rms"
    assert y.requires_grad


@pytest.mark.parametrize(("skew", "share"), [(1.0, 1.0), (2.0, 2.0), (3.5, 3.5)])
def test_the_assumed_choice_of_experts(skew: float, share: float) -> None:
    own = range(4, 8)
    choice = assumed_choice(4096, 32, 4, own, skew)
    assert choice.sum(1).eq(4).all(), "so many different experts a token"
    counts = choice.sum(0).double()
    even = 4096 * 4 / 32
    assert torch.allclose(counts[4:8], torch.full((4,), share * even).double(), atol=1)
    others = torch.cat([counts[:4], counts[8:]])
    assert float(others.max() - others.min()) <= 2
