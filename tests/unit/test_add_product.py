"""Products that are not rounded to the dtype of their factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.weights import add_product


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.7, 0.0), (2.0, 0.5)])
def test_a_product_of_bf16_is_that_of_float64(alpha: float, beta: float) -> None:
    a = drawn(5, 300, seed=0)
    b = drawn(300, 7, seed=1)
    out = drawn(5, 7, seed=2, dtype=torch.float32)
    want = beta * out.double() + alpha * a.double() @ b.double()
    if beta == 0:
        out.fill_(torch.nan)
    assert add_product(out, a, b, alpha=alpha, beta=beta) is out
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_into_the_dtype_of_the_factors_it_is_addmm_to_the_bit(dtype: torch.dtype) -> None:
    a = drawn(5, 300, seed=0, dtype=dtype)
    b = drawn(300, 7, seed=1, dtype=dtype)
    out = drawn(5, 7, seed=2, dtype=dtype)
    want = torch.addmm(out, a, b, alpha=0.7, beta=0.5)
    assert add_product(out, a, b, alpha=0.7, beta=0.5).equal(want)


class Calls(TorchDispatchMode):
    """The operators that are called, and the tensors that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_off_the_cpu_one_matmul_writes_fp32_and_nothing_is_copied() -> None:
    """A meta tensor stands for one on a GPU: torch checks the same operator's arguments."""
    a = torch.empty(5, 300, dtype=torch.bfloat16, device="meta")
    b = torch.empty(7, 300, dtype=torch.bfloat16, device="meta").t()
    out = torch.empty(5, 7, device="meta")
    with Calls() as seen:
        assert add_product(out, a, b, alpha=0.7, beta=0.0) is out
    [(func, args, kwargs)] = seen.calls
    assert func is torch.ops.aten.addmm.dtype_out
    assert [*map(id, args[:3])] == [id(out), id(a), id(b)]
    assert args[3] is torch.float32
    assert kwargs == {"alpha": 0.7, "beta": 0.0, "out": out}
