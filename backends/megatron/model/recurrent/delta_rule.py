"""The gated delta rule (Yang et al. 2024) over a pack.

The state S of a head maps keys to values. With the decay a_t = exp(g_t) <= 1 and the rate b_t of a
token,

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T        o_t = S_t^T q_t
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backends.megatron.batch.cp_layout import PackLayout
from backends.megatron.batch.scan import Scan
from backends.megatron.model.recurrent.chunks import Chunks, by_chunk, kept_between
from backends.megatron.model.recurrent.kernels import Kernels

# Of the lengths of queries and keys, as in transformers and in flash-linear-attention.
EPSILON = 1e-6


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
    heads = (key.size(1), value.size(1) // key.size(1))
    q, k = (by_chunk(x, (heads[0], 1), scan.slots) for x in (query, key))
    v, g, b = (by_chunk(x, heads, scan.slots) for x in (value, decay[..., None], rate[..., None]))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    q = q * q.size(-1) ** -0.5
    since = g.cumsum(-2)
    kept = kept_between(since)
    system = b * kept * (k @ k.transpose(-1, -2))
    terms = torch.cat((b * v, b * since.exp() * k), -1)
    solved = torch.linalg.solve_triangular(system, terms, upper=False, unitriangular=True)
    added, read = solved.split((v.size(-1), k.size(-1)), -1)
    end = since[..., -1:, :]
    chunks = Chunks(
        added=added,
        read=read,
        inside=(q @ k.transpose(-1, -2)) * kept,
        from_state=q * since.exp(),
        to_state=(k * (end - since).exp()).transpose(-1, -2),
        over=end.exp(),
    )
    return chunks.outputs(scan).to(value.dtype)
