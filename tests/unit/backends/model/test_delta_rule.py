"""The gated delta rule and its convolution over packs, against sums token by token in float64."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.batch.cp_layout import PackLayout
    from backends.megatron.batch.scan import Scan
    from backends.megatron.model.elementwise import scaled_norm
    from backends.megatron.model.recurrent.chunks import convolve
    from backends.megatron.model.recurrent.delta_rule import chunked_delta_rule, delta_rule
    from backends.megatron.model.recurrent.kernels import PACKAGES, Kernels, Library, choose_kernels

CPU = torch.device("cpu")
TORCH = Kernels("torch", "")
FLA = Kernels("fla", "")
# Parts of a chunk, whole chunks, one token more, and several sequences with as many chunks.
LENGTHS = (5, 130, 1, 64, 65, 17, 200, 64)
KEY_HEADS = 2
HEADS = 4


def drawn(
    lengths: Sequence[int], dtype: torch.dtype = torch.float64, *, decay: float = 1.0
) -> list[Tensor]:
    """Query, key, value, decay and rate; queries and keys of any length."""
    generator = torch.Generator().manual_seed(1)
    total = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(total, *shape, generator=generator, dtype=torch.float64)

    found = [
        normal(KEY_HEADS, 6),
        normal(KEY_HEADS, 6),
        normal(HEADS, 10),
        -decay * F.softplus(normal(HEADS)),
        normal(HEADS).sigmoid(),
    ]
    return [x.to(dtype).requires_grad_() for x in found]


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def by_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    """One sequence, by the definition."""
    shared = value.size(1) // key.size(1)
    query, key = (unit(x.repeat_interleave(shared, 1)) for x in (query, key))
    state = value.new_zeros(value.size(1), key.size(2), value.size(2))
    outputs = []
    for q, k, v, g, b in zip(query, key, value, decay, rate):
        state = state * g.exp()[:, None, None]
        error = b[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, error)
        outputs.append(torch.einsum("hkv,hk->hv", state, q) * key.size(2) ** -0.5)
    return torch.stack(outputs)


def of_pack(rows: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    return torch.cat([by_token(*one) for one in zip(*(x.split(list(lengths)) for x in rows))])


def gradients(out: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    return torch.autograd.grad((out * weight).sum(), inputs)


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("decay", [0.05, 1.0, 60.0])
def test_a_pack_is_the_rule_token_by_token_in_each_sequence(size: int, decay: float) -> None:
    """Also where the state has vanished long before the chunk ends; and all gradients."""
    rows = drawn(LENGTHS, decay=decay)
    got = chunked_delta_rule(*rows, Scan.of_lengths(LENGTHS, CPU, size))
    want = of_pack(rows, LENGTHS)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    for own, expected in zip(gradients(got, rows), gradients(want, rows), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-8, atol=1e-9)


def test_transformers_computes_the_same() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    rows = drawn((200,), torch.float32)
    got = delta_rule(*rows, PackLayout.of_lengths((200,), CPU), TORCH)
    want = torch_chunk_gated_delta_rule(*(x[None] for x in rows), use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(got, want[0][0], rtol=1e-6, atol=1e-6)


def test_half_precision_computes_in_single() -> None:
    rows = [x.detach().bfloat16() for x in drawn(LENGTHS)]
    layout = PackLayout.of_lengths(LENGTHS, CPU)
    got = delta_rule(*rows, layout, TORCH)
    want = delta_rule(*(x.float() for x in rows), layout, TORCH)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want.bfloat16())


@pytest.mark.parametrize("biased", [False, True])
def test_the_convolution_is_that_of_each_sequence(biased: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(LENGTHS), 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 1, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    inputs = [x, weight, bias] if biased else [x, weight]
    own_bias = bias if biased else None
    got = convolve(x, weight, own_bias, PackLayout.of_lengths(LENGTHS, CPU), TORCH)
    padded = [F.pad(one.t(), (3, 0)) for one in x.split(list(LENGTHS))]
    want = torch.cat([F.silu(F.conv1d(one, weight, own_bias, groups=6)).t() for one in padded])
    torch.testing.assert_close(got, want)
    for own, expected in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize(("gated", "offset"), [(True, 0.0), (False, 1.0), (True, 1.0)])
def test_a_scaled_norm_and_its_gradients(gated: bool, offset: float) -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight, gate = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 5, 8), (8,), (3, 5, 8))
    )
    inputs = [x, weight, gate] if gated else [x, weight]
    got = scaled_norm(x, weight, 1e-3, offset=offset, gate=gate if gated else None)
    want = F.rms_norm(x, (8,), None, 1e-3) * (offset + weight) * (F.silu(gate) if gated else 1)
    torch.testing.assert_close(got, want)
    for own, expected in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(own, expected)
    rounded = scaled_norm(x.bfloat16(), weight.bfloat16(), 1e-3, offset=offset)
    exact = scaled_norm(x.bfloat16().float(), weight.bfloat16().float(), 1e-3, offset=offset)
    assert torch.equal(rounded, exact.bfloat16()), "rounded once, at the end"


def test_no_sequence_sees_another() -> None:
    rows = [x.detach() for x in drawn(LENGTHS)]
    layout = PackLayout.of_lengths(LENGTHS, CPU)
    changed = [x.clone() for x in rows]
    own = slice(sum(LENGTHS[:3]), sum(LENGTHS[:4]))
    for x in changed:
        x[own] = x[own].flip(0)
    moved = delta_rule(*rows, layout, TORCH) != delta_rule(*changed, layout, TORCH)
    assert moved[own].any(1).any(1).all()
    moved[own] = False
    assert not moved.any()


def test_a_shared_prefix_has_no_state() -> None:
    from backends.megatron.batch.cp_layout import Prefixes

    shared = Prefixes(torch.tensor([0, 2]), torch.tensor([0, 1]), 5)
    with pytest.raises(ValueError, match="share a prefix"):
        _ = PackLayout.of_lengths((3, 3), CPU, prefixes=shared).scan


@pytest.mark.parametrize("library", PACKAGES)
@pytest.mark.parametrize(
    ("device", "dtype", "installed", "deterministic", "kind", "reason"),
    [
        ("cuda", torch.bfloat16, True, False, None, "installed"),
        ("cuda", torch.bfloat16, False, False, "torch", "not installed"),
        ("cuda", torch.float32, True, False, "torch", "half precision"),
        ("cuda", torch.bfloat16, True, True, "torch", "run.deterministic"),
        ("cpu", torch.bfloat16, True, False, "torch", "does not run on cpu"),
    ],
)
def test_the_choice_and_its_reason(
    library: Library,
    device: str,
    dtype: torch.dtype,
    installed: bool,
    deterministic: bool,
    kind: str | None,
    reason: str,
) -> None:
    chosen = choose_kernels(
        library, device, dtype, installed=installed, deterministic=deterministic
    )
    assert chosen.kind == (kind or library)
    assert reason in str(chosen)


def test_the_package_is_called_as_it_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that keeps the package's contract: one row of tokens, offsets as int64."""

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
        use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert use_qk_l2norm_in_kernel
        assert q.size(2) == v.size(2), "older versions need as many heads of keys"
        assert cu_seqlens.dtype == torch.int64
        lengths = cu_seqlens.diff().tolist()
        return of_pack([x.squeeze(0) for x in (q, k, v, g, beta)], lengths)[None], None

    def causal_conv1d(
        x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str, cu_seqlens: Tensor
    ) -> tuple[Tensor, None]:
        assert activation == "silu"
        lengths = tuple(cu_seqlens.diff().tolist())
        layout = PackLayout.of_lengths(lengths, CPU)
        return convolve(x.squeeze(0), weight[:, None], bias, layout, TORCH)[None], None

    functions: dict[str, Any] = {
        "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
        "fla.modules.causal_conv1d": causal_conv1d,
    }
    for name in ("fla", "fla.ops", "fla.modules", *functions):
        stub = ModuleType(name)
        if name in functions:
            setattr(stub, functions[name].__name__, functions[name])
        monkeypatch.setitem(sys.modules, name, stub)
    rows = drawn(LENGTHS)
    layout = PackLayout.of_lengths(LENGTHS, CPU)
    torch.testing.assert_close(delta_rule(*rows, layout, FLA), delta_rule(*rows, layout, TORCH))
    x = rows[2].detach().flatten(1)
    weight = torch.randn(x.size(1), 1, 4, dtype=x.dtype)
    own, expected = (convolve(x, weight, None, layout, kind) for kind in (FLA, TORCH))
    torch.testing.assert_close(own, expected)
