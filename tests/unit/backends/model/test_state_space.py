"""Mamba-2's state space over packs, against sums token by token in float64."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.batch.cp_layout import PackLayout
    from backends.megatron.batch.scan import Scan
    from backends.megatron.model.elementwise import scaled_norm
    from backends.megatron.model.recurrent.kernels import Kernels
    from backends.megatron.model.recurrent.state_space import chunked_state_space, state_space

CPU = torch.device("cpu")
TORCH = Kernels("torch", "")
MAMBA_SSM = Kernels("mamba_ssm", "")
# Parts of a chunk, whole chunks, one token more, and several sequences with as many chunks.
LENGTHS = (5, 130, 1, 64, 65, 17, 200, 64)
KEY_HEADS = 2
HEADS = 4


def drawn(
    lengths: Sequence[int], dtype: torch.dtype = torch.float64, *, step: float = 1.0
) -> list[Tensor]:
    """Query, key, value, step, decay and skip."""
    generator = torch.Generator().manual_seed(1)
    total = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found = [
        normal(total, KEY_HEADS, 6),
        normal(total, KEY_HEADS, 6),
        normal(total, HEADS, 10),
        step * F.softplus(normal(total, HEADS)),
        -normal(HEADS).exp(),
        normal(HEADS),
    ]
    return [x.to(dtype).requires_grad_() for x in found]


def by_token(
    query: Tensor, key: Tensor, value: Tensor, step: Tensor, decay: Tensor, skip: Tensor
) -> Tensor:
    """One sequence, by the definition."""
    shared = value.size(1) // key.size(1)
    query, key = (x.repeat_interleave(shared, 1) for x in (query, key))
    state = value.new_zeros(value.size(1), key.size(2), value.size(2))
    outputs = []
    for q, k, v, dt in zip(query, key, value, step):
        state = state * (dt * decay).exp()[:, None, None]
        state = state + torch.einsum("h,hk,hv->hkv", dt, k, v)
        outputs.append(torch.einsum("hkv,hk->hv", state, q) + skip[:, None] * v)
    return torch.stack(outputs)


def of_pack(inputs: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    rows = zip(*(x.split(list(lengths)) for x in inputs[:4]))
    return torch.cat([by_token(*one, *inputs[4:]) for one in rows])


def gradients(out: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    return torch.autograd.grad((out * weight).sum(), inputs)


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("step", [0.05, 1.0, 60.0])
def test_a_pack_is_the_state_space_token_by_token_in_each_sequence(size: int, step: float) -> None:
    """Also where the state has vanished long before the chunk ends; and all gradients."""
    inputs = drawn(LENGTHS, step=step)
    got = chunked_state_space(*inputs, Scan.of_lengths(LENGTHS, CPU, size))
    want = of_pack(inputs, LENGTHS)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    for own, expected in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-8, atol=1e-7)


def test_transformers_computes_the_same() -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    query, key, value, raw, decay, skip = drawn((200,), torch.float32)
    bias = torch.tensor([-9.0, -8.0, -0.5, 1.0])
    step = F.softplus(raw + bias)
    got = state_space(
        query, key, value, step, decay, skip, PackLayout.of_lengths((200,), CPU), TORCH
    )
    rows = (x[None] for x in (value, raw))
    want = mamba2_chunk_scan(
        *rows, decay, key[None], query[None], chunk_size=128, D=skip, dt_bias=bias,
        dt_softplus=True,
    )  # fmt: skip
    torch.testing.assert_close(got, want[0], rtol=1e-5, atol=1e-4)


def test_half_precision_computes_in_single() -> None:
    rows = drawn(LENGTHS, torch.float32)
    half = [x.detach().bfloat16() for x in rows[:3]]
    others = [x.detach() for x in rows[3:]]
    layout = PackLayout.of_lengths(LENGTHS, CPU)
    got = state_space(*half, *others, layout, TORCH)
    want = state_space(*(x.float() for x in half), *others, layout, TORCH)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want.bfloat16())


def test_no_sequence_sees_another() -> None:
    inputs = [x.detach() for x in drawn(LENGTHS)]
    layout = PackLayout.of_lengths(LENGTHS, CPU)
    own = slice(sum(LENGTHS[:3]), sum(LENGTHS[:4]))
    changed = [x.clone() for x in inputs]
    for x in changed[:4]:
        x[own] = x[own].flip(0)
    moved = state_space(*inputs, layout, TORCH) != state_space(*changed, layout, TORCH)
    assert moved[own].any(1).any(1).all()
    moved[own] = False
    assert not moved.any()


def test_a_norm_of_gated_groups_and_its_gradients() -> None:
    generator = torch.Generator().manual_seed(4)
    inputs = [
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 3, 8), (3, 8), (5, 3, 8))
    ]
    x, weight, gate = inputs
    got = scaled_norm(x, weight, 1e-3, gate=gate, gates_input=True)
    want = F.rms_norm(x * F.silu(gate), (8,), None, 1e-3) * weight
    torch.testing.assert_close(got, want)
    for own, expected in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(own, expected)


def test_the_package_is_called_as_it_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that keeps the package's contract: a row of tokens, numbers of sequences."""

    def mamba_chunk_scan_combined(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, *,
        D: Tensor, seq_idx: Tensor,
    ) -> Tensor:  # fmt: skip
        assert chunk_size & (chunk_size - 1) == 0, "a power of two"
        assert D.dtype == torch.float32
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == x.shape[:2]
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return of_pack([C[0], B[0], x[0], dt[0], A, D.to(A)], lengths)[None]

    stub = ModuleType("mamba_ssm.ops.triton.ssd_combined")
    stub.mamba_chunk_scan_combined = mamba_chunk_scan_combined  # type: ignore[attr-defined]
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", stub.__name__):
        monkeypatch.setitem(sys.modules, name, stub)
    inputs = drawn(LENGTHS)
    layout = PackLayout.of_lengths(LENGTHS, CPU)
    got = state_space(*inputs, layout, MAMBA_SSM)
    torch.testing.assert_close(got, state_space(*inputs, layout, TORCH), rtol=1e-5, atol=1e-5)
