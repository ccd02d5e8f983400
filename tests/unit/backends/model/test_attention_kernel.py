"""Calls of torch's variable-length attention, by the signature of each torch."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.megatron.batch.cp_layout import PackLayout
from backends.megatron.cpu.kernels import assuming_kernels
from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.model.attention import core

LENGTHS = [5, 1, 7]
SCALE = 0.3
HALF = torch.bfloat16


def causal(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, scale: float) -> Tensor:
    """Attend inside each sequence by loops, with fewer heads of keys than of queries."""
    out = torch.empty(q.size(0), q.size(1), v.size(2))
    share = q.size(1) // k.size(1)
    starts = cu_q.tolist()
    for begin, end in itertools.pairwise(starts):
        for head in range(q.size(1)):
            keys = k[begin:end, head // share]
            scores = q[begin:end, head] @ keys.t() * scale
            scores += torch.full_like(scores, float("-inf")).triu(1)
            out[begin:end, head] = scores.softmax(-1) @ v[begin:end, head // share]
    return out


def of_torch_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
    max_q: int, max_k: int, *, return_aux: Any = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert scale is not None
    assert window_size == (-1, 0)
    return causal(query, key, value, cu_seq_q, scale)


def of_torch_2_12(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
    max_q: int, max_k: int, *, return_aux: Any = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert enable_gqa or query.size(1) == key.size(1), "torch 2.12 and later refuse this"
    assert scale is not None
    assert window_size == (-1, 0)
    return causal(query, key, value, cu_seq_q, scale)


@pytest.fixture
def of_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Puts a function in the place of torch's."""

    def put(function: Any) -> None:
        module = ModuleType("torch.nn.attention.varlen")
        module.varlen_attn = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        core._varlen_attention.cache_clear()

    yield put
    core._varlen_attention.cache_clear()


@pytest.mark.parametrize("kernel", [of_torch_2_11, of_torch_2_12])
@pytest.mark.parametrize("groups", [4, 2])
def test_each_torch_is_called_by_its_signature(
    of_torch: Callable[[Any], None], kernel: Any, groups: int
) -> None:
    of_torch(kernel)
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(sum(LENGTHS), heads, 8, generator=generator) for heads in (4, groups, groups)
    )
    layout = PackLayout.of_lengths(LENGTHS, torch.device("cpu"))
    got = core.varlen_attention(query, key, value, layout, SCALE)
    want = core.bucketed_attention(query, key, value, layout, SCALE)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("groups", [4, 2])
def test_single_precision_on_cuda_copies_keys_for_a_kernel_that_takes_no_groups(
    monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    sizes: list[tuple[int, int, bool]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        sizes.append((k.size(1), v.size(1), options["enable_gqa"]))
        return attend(q, k, v, **options)

    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(sum(LENGTHS), heads, 8, generator=generator) for heads in (4, groups, groups)
    )
    layout = PackLayout.of_lengths(LENGTHS, torch.device("cpu"))
    want = core.bucketed_attention(query, key, value, layout, SCALE)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    with assuming_kernels("cuda"):
        got = core.bucketed_attention(query, key, value, layout, SCALE)
    assert {*sizes} == {(4, 4, False)}
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_flash_attention_serves_half_precision_on_cuda() -> None:
    assert core.uses_varlen(torch.device("cuda"), HALF)
    assert not core.uses_varlen(torch.device("cuda"), torch.float32)
    assert not core.uses_varlen(torch.device("cpu"), HALF)


@pytest.mark.parametrize(("installed", "capability"), [(True, 9), (True, 8), (False, 9)])
def test_flash_attention_3_on_a_hopper_that_has_it(
    of_torch: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    capability: int,
) -> None:
    activated: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    of_torch(of_torch_2_12)
    core._varlen_attention()
    assert activated == (["FA3"] if installed and capability == 9 else [])
