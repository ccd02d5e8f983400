"""Functions that CUDA compiles: by torch's compiler for the CPU, and where it cannot work."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.megatron.cpu.shim import importing_megatron
from backends.megatron.model.fused import Fused, fused_kernels, fuses, why_not

with importing_megatron():
    from backends.megatron.model import elementwise, head

CUDA = torch.device("cuda")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def clear_cache() -> Iterator[None]:
    why_not.cache_clear()
    yield
    why_not.cache_clear()


def statistics(rows: int) -> tuple[Tensor, ...]:
    return (drawn(rows), drawn(rows, seed=1).exp(), drawn(rows, seed=2), drawn(rows, seed=3))


CASES: list[tuple[Fused, Callable[[int], tuple[Any, ...]]]] = [
    (elementwise._fused_swiglu, lambda n: (drawn(n, 5), drawn(n, 5, seed=1))),
    (
        elementwise._fused_swiglu_gradient,
        lambda n: (drawn(n, 5), drawn(n, 5, seed=1), drawn(n, 5, seed=2)),
    ),
    (head._fused_absorb, lambda n: (drawn(n, 7, seed=5), torch.arange(n) - 2, *statistics(n))),
    (
        head._fused_gradient,
        lambda n: (drawn(n, 7, seed=5), torch.arange(n) - 2, *statistics(n), torch.bfloat16),
    ),
]


@pytest.mark.rest
@pytest.mark.parametrize(("function", "make"), CASES)
def test_the_compiler_changes_no_value(
    function: Fused, make: Callable[[int], tuple[Any, ...]]
) -> None:
    for rows in (9, 4):
        torch.testing.assert_close(function(*make(rows)), function._plain(*make(rows)))
    assert function._chosen is not function._plain  # it did not fail


def test_the_activation_and_its_gradient_are_those_without_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for fusing in (False, True):
        monkeypatch.setattr(elementwise, "fuses", lambda device, fusing=fusing: fusing)
        given = drawn(6, 10).requires_grad_()
        out = elementwise.SwiGLU()(given)
        results.append([out, *torch.autograd.grad((out * drawn(6, 5, seed=3)).sum(), given)])
    torch.testing.assert_close(*results)


def test_where_the_compiler_fails_the_function_is_called_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def breaks(*_: Any) -> None:
        raise BackendCompilerFailed(breaks, ValueError("no Python.h"), None)

    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: breaks)
    function = Fused(doubled)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert function(torch.ones(1)) == 2
    [record] = caplog.records
    assert "doubled runs operation by operation" in record.getMessage()
    assert "no Python.h" in record.getMessage()


def test_another_error_is_not_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: breaks)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        Fused(lambda x: x)(torch.ones(1))


@pytest.mark.usefixtures("clear_cache")
def test_when_functions_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    there: dict[str, Any] = {"triton": object()}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there.get(name))
    monkeypatch.setattr(shutil, "which", lambda name: there.get(name))
    monkeypatch.delenv("CC", raising=False)
    assert why_not() == "there is no C compiler (gcc, cc, clang), which triton needs"
    assert not fuses(CUDA)
    there["cc"] = "/usr/bin/cc"
    why_not.cache_clear()
    assert fuses(CUDA)
    assert not fuses(torch.device("cpu"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not fuses(CUDA)
    assert fused_kernels(CUDA).endswith("which is slower: the run is deterministic")
    del there["triton"]
    why_not.cache_clear()
    assert why_not() == "the package triton is not installed"
