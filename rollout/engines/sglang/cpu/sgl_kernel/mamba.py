"""The functions for layers with a gated delta rule (Qwen3.5), in torch.

Written for tests on a CPU, token by token. Those that SGLang looks up as operators are put in their
namespace by `sgl_kernel`, with the names in `OPERATORS`.

States are kept by slots. A row without a slot, -1, pads the batch, and its result is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve sequences that lie one behind the other, and keep the last inputs of each.

    Args:
        x: [channels, tokens].
        weight: [channels, kernel size].
        conv_states: [slots, channels, kernel size - 1], changed in place.
        has_initial_state, cache_indices: [sequences].
        query_start_loc: [sequences + 1].
    """
    made = torch.empty_like(x)
    width = weight.shape[1] - 1
    for row, slot, part in sequences(cache_indices, query_start_loc):
        before = conv_states[slot].to(x.dtype)
        if not has_initial_state[row]:
            before = torch.zeros_like(before)
        whole = torch.cat([before, x[:, part]], dim=1)
        made[:, part] = conv1d(whole[None], weight[:, None], bias, groups=len(weight))[0]
        conv_states[slot] = whole[:, -width:].to(conv_states.dtype)
    return silu(made) if activation is not None else made


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve one more token of each sequence, [sequences, channels]."""
    slots = conv_state_indices.long()
    whole = torch.cat([conv_states[slots].to(x.dtype), x[..., None]], dim=-1)
    made = (whole * weight).sum(-1)
    if bias is not None:
        made += bias
    real = slots >= 0
    conv_states[slots[real]] = whole[real][..., 1:].to(conv_states.dtype)
    return silu(made) if activation is not None else made


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Compute sequences that lie one behind the other, from their states on.

    Args:
        q, k: [1, tokens, key heads, key size].
        v: [1, tokens, value heads, value size].
        g: [1, tokens, value heads], the logarithm of the decay.
        beta: [1, tokens, value heads].
        initial_state: [slots, value heads, value size, key size], changed in place.
    """
    made = torch.empty_like(v)
    for _row, slot, part in sequences(initial_state_indices, cu_seqlens):
        state = initial_state[slot][None].float()
        for token in range(part.start, part.stop):
            row = (0, slice(token, token + 1))
            state, made[row] = delta_rule(state, q[row], k[row], v[row], g[row], beta[row])
        initial_state[slot] = state[0].to(initial_state.dtype)
    return made, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """Compute one more token of each sequence, with its gates: [sequences, 1, heads, value size].

    Shapes are those of `chunk_gated_delta_rule_cpu`; a token belongs to a sequence of its own.
    """
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    slots = initial_state_indices.long()
    state = initial_state_source[slots].float()
    state, made = delta_rule(state, q[0], k[0], v[0], g[0], beta[0])
    real = slots >= 0
    initial_state_source[slots[real]] = state[real].to(initial_state_source.dtype)
    return made[:, None]


def fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """The logarithm of the decay, in fp32, and beta: [1, tokens, heads] each."""
    g = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return g[None], b.sigmoid()[None]


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of R rows: the new states [R, heads, value size, key size], and [R, heads, value].

    S = exp(g) S;  S = S + beta (v - S k) k^T;  o = S q  (Yang et al., "Gated Delta Networks", 2024)
    """
    groups = v.shape[1] // k.shape[1]
    keys = unit(k).repeat_interleave(groups, dim=1)
    queries = unit(q).repeat_interleave(groups, dim=1) * q.shape[-1] ** -0.5
    state = state * g.float().exp()[..., None, None]
    known = (state * keys[..., None, :]).sum(-1)
    change = (v.float() - known) * beta.float()[..., None]
    state = state + change[..., None] * keys[..., None, :]
    return state, (state * queries[..., None, :]).sum(-1).to(v.dtype)


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1, in fp32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def sequences(slots: Tensor, starts: Tensor) -> Iterator[tuple[int, int, slice]]:
    """Yield the number, the slot and the tokens of each sequence that has a slot."""
    bounds = starts.tolist()
    for row, (slot, start, end) in enumerate(zip(slots.tolist(), bounds, bounds[1:])):
        if slot >= 0 and end > start:
            yield row, slot, slice(start, end)


# --- attention layers and norms of such models ----------------------------------------------------


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divide projections [tokens, q | k | v | z] and [tokens, b | a] into qkv, z, b and a."""
    values = value_heads * value_size
    qkv, z = qkvz.split([2 * key_heads * key_size + values, values], dim=-1)
    b, a = ba.split([value_heads, value_heads], dim=-1)
    return (
        qkv.contiguous(),
        z.reshape(len(z), value_heads, value_size),
        b.contiguous(),
        a.contiguous(),
    )


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, size: int
) -> tuple[Tensor, Tensor]:
    """Zero-centred RMSNorms of the heads: [tokens * heads, size] each."""
    return (
        zero_centred_norm(q.reshape(-1, size), q_weight, eps),
        zero_centred_norm(k.reshape(-1, size), k_weight, eps),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, size: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of queries and gates [tokens, heads * (query | gate)], and the gates."""
    q, gate = q_gate.reshape(len(q_gate), heads, 2, size).unbind(2)
    queries, keys = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, size)
    return queries, keys, gate.reshape(-1, size).contiguous()


def zero_centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm whose weight is 1 + `weight`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (1 + weight.float())).to(x.dtype)


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """RMSNorm, times silu(gate)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float() * silu(gate.float())).to(x.dtype)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply by sigmoid(gate), in place."""
    x.mul_(gate.sigmoid())


OPERATORS: tuple[Callable[..., Any], ...] = (
    fused_gdn_gating_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
)
