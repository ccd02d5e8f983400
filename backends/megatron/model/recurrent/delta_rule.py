"""The gated delta rule (Yang et al. 2024) and the short convolution before it, over a pack.

The state S of a head maps keys to values. With the decay a_t = exp(g_t) <= 1 and the rate b_t of a
token,

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T        o_t = S_t^T q_t

Neither the state nor the convolution passes from one sequence of a pack to another.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.megatron.batch.cp_layout import PackLayout
from backends.megatron.batch.scan import Scan
from backends.megatron.convert.architecture import Architecture

# Of the lengths of queries and keys, as in transformers and in flash-linear-attention.
EPSILON = 1e-6


@dataclass(frozen=True)
class Kernels:
    """The choice of an implementation and its reason, which is printed when a run starts."""

    kind: Literal["fla", "torch"]
    reason: str

    def __str__(self) -> str:
        name = "flash-linear-attention" if self.kind == "fla" else "chunks of 64 in torch"
        return f"{name} ({self.reason})"


def choose_kernels(
    device: str, dtype: torch.dtype, *, installed: bool, deterministic: bool
) -> Kernels:
    """Choose the implementation for tensors of a device, "cpu" or "cuda", and dtype. Pure.

    Args:
        installed: the package flash-linear-attention is there.
    """
    if device != "cuda":
        return Kernels("torch", f"flash-linear-attention does not run on {device}")
    if not installed:
        return Kernels("torch", "slower: the package flash-linear-attention is not installed")
    if dtype not in (torch.float16, torch.bfloat16):
        return Kernels("torch", "flash-linear-attention takes half precision only")
    if deterministic:
        return Kernels("torch", "run.deterministic: not proven for flash-linear-attention")
    return Kernels("fla", "installed")


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Choose the implementation for tensors of this device and dtype, in this process."""
    # A dry run, whose tensors are on no device, computes in torch.
    return choose_kernels(
        device.type,
        dtype,
        installed=_fla_installed(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


@cache
def _fla_installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def chosen_kernels(arch: Architecture, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The line about kernels at the start of a run; empty for a model without the rule."""
    if not any(arch.recurrent_layers):
        return {}
    return {"gated delta rule": str(kernels_for(device, dtype))}


def convolve(x: Tensor, weight: Tensor, layout: PackLayout, kernels: Kernels) -> Tensor:
    """Causal convolution of each channel inside each sequence, then silu.

    Args:
        x: [N, channels], all slots of the pack in the order of the sequences.
        weight: [channels, 1, width]; the last column belongs to the token itself.
    """
    if kernels.kind == "fla":
        from fla.modules.causal_conv1d import causal_conv1d

        out: Tensor = causal_conv1d(
            x[None], weight[:, 0], activation="silu", cu_seqlens=layout.cu_seqlens.long()
        )[0]
        return out[0]
    # Zeros before each sequence, as many as its first token would see of another one.
    gap = weight.size(2) - 1
    sequences = layout.scan.sequences
    place = torch.arange(x.size(0), device=x.device) + gap * sequences
    apart = x.new_zeros(x.size(0) + gap * len(layout.lengths), x.size(1))
    apart = apart.index_copy(0, place + gap, x)
    convolved = F.conv1d(apart.t()[None], weight, groups=x.size(1))[0]
    return F.silu(convolved.t().index_select(0, place))


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    layout: PackLayout,
    kernels: Kernels,
) -> Tensor:
    """The gated delta rule inside each sequence of a pack of N slots.

    Queries and keys are scaled to length 1, and queries by d_k ** -0.5. A head of values belongs to
    the key head `head // (heads / key heads)`.

    Args:
        query, key: [N, key heads, d_k].
        value: [N, heads, d_v].
        decay: [N, heads], logarithms, at most 0.
        rate: [N, heads], between 0 and 1.

    Returns:
        [N, heads, d_v] in the dtype of `value`.
    """
    if kernels.kind == "fla":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        shared = value.size(1) // key.size(1)
        query, key = (x.repeat_interleave(shared, 1) for x in (query, key))
        found: tuple[Tensor, Any] = chunk_gated_delta_rule(
            *(x[None] for x in (query, key, value, decay, rate)),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=layout.cu_seqlens.long(),
        )
        return found[0][0]
    return chunked_delta_rule(query, key, value, decay, rate, layout.scan)


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, scan: Scan
) -> Tensor:
    """`delta_rule` in torch, in single precision at least, chunk by chunk.

    Inside a chunk the corrections d_i = b_i (v_i - what S_(i-1) returns for k_i) satisfy a
    triangular system: with the logarithm c_i of the decay since the chunk's start,

        d_i + sum over j < i of b_i exp(c_i - c_j) (k_i . k_j) d_j = b_i v_i - b_i exp(c_i) S^T k_i

    for the state S before the chunk. It is solved for both terms on the right, before S is known.
    """
    chunks = _solve_chunks(query, key, value, decay, rate, scan)
    fresh, _, _, _, to_state, _ = chunks
    sizes = (scan.counts[0], *fresh.shape[1:3], to_state.size(-2), fresh.size(-1))
    state = fresh.new_zeros(sizes)
    outputs: list[Tensor] = []
    # Of each step, for the sequences that are this long.
    for fresh, read, inside, from_state, to_state, over in zip(
        *(x.split(scan.counts) for x in chunks)
    ):
        state = state[: fresh.size(0)]
        corrections = fresh - read @ state
        outputs.append(from_state @ state + inside @ corrections)
        state = over * state + to_state @ corrections
    # [chunks, key heads, heads of each, size, d_v] -> [chunks * size, heads, d_v]
    flat = torch.cat(outputs).flatten(1, 2).transpose(1, 2).flatten(0, 1)
    return flat.index_select(0, scan.restore).to(value.dtype)


def _solve_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, scan: Scan
) -> tuple[Tensor, ...]:
    """What each chunk adds to its corrections, outputs and state, without the state before it.

    Returns tensors [chunks, key heads, heads of each, ...]: the corrections without a state, and
    the matrices by which they depend on the state, outputs depend on corrections and on the state,
    and the next state depends on the corrections and on the state.
    """
    heads = (key.size(1), value.size(1) // key.size(1))
    q, k = (_chunks(x, (heads[0], 1), scan.slots) for x in (query, key))
    v, g, b = (_chunks(x, heads, scan.slots) for x in (value, decay[..., None], rate[..., None]))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    q = q * q.size(-1) ** -0.5
    since = g.cumsum(-2)
    later = torch.ones(2 * (q.size(-2),), dtype=torch.bool, device=q.device).triu(1)
    # exp(c_i - c_j) where token i sees token j.
    kept = (since - since.transpose(-1, -2)).masked_fill(later, float("-inf")).exp()
    system = b * kept * (k @ k.transpose(-1, -2))
    terms = torch.cat((b * v, b * since.exp() * k), -1)
    solved = torch.linalg.solve_triangular(system, terms, upper=False, unitriangular=True)
    fresh, read = solved.split((v.size(-1), k.size(-1)), -1)
    inside = (q @ k.transpose(-1, -2)) * kept
    end = since[..., -1:, :]
    to_state = (k * (end - since).exp()).transpose(-1, -2)
    return fresh, read, inside, q * since.exp(), to_state, end.exp()


def _chunks(x: Tensor, heads: tuple[int, int], slots: Tensor) -> Tensor:
    """[N, heads, d] -> [chunks, key heads, heads of each, size, d], in fp32 at least."""
    rows = x.index_select(0, slots.view(-1)).to(torch.promote_types(x.dtype, torch.float32))
    return rows.view(*slots.shape, *heads, x.size(2)).permute(0, 2, 3, 1, 4)
