"""The selective state space of Mamba-2 (Dao and Gu 2024) over a pack.

The state S of a head maps keys to values. With the time step dt_t of a token and the head's decay
A < 0,

    S_t = exp(dt_t A) S_(t-1) + dt_t k_t v_t^T        o_t = S_t^T q_t + D v_t

In the words of state spaces v is x, k is B and q is C.
"""

from __future__ import annotations

from torch import Tensor

from backends.megatron.batch.cp_layout import PackLayout
from backends.megatron.batch.scan import Scan
from backends.megatron.model.recurrent.chunks import Chunks, by_chunk, kept_between
from backends.megatron.model.recurrent.kernels import Kernels
from rlcore.planning.activations import CHUNK


def state_space(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    decay: Tensor,
    skip: Tensor,
    layout: PackLayout,
    kernels: Kernels,
) -> Tensor:
    """The state space inside each sequence of a pack of N slots.

    A head of values belongs to the key head `head // (heads / key heads)`.

    Args:
        query, key: [N, key heads, d_k].
        value: [N, heads, d_v].
        step: [N, heads], at least 0, in fp32 at least.
        decay: [heads], A, below 0, in fp32 at least.
        skip: [heads], D.

    Returns:
        [N, heads, d_v] in the dtype of `value`.
    """
    if kernels.kind == "mamba_ssm":
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        found: Tensor = mamba_chunk_scan_combined(
            value[None],
            step[None],
            decay,
            key[None],
            query[None],
            2 * CHUNK,
            D=skip.float(),
            seq_idx=layout.scan.sequences.int()[None],
        )
        return found[0]
    return chunked_state_space(query, key, value, step, decay, skip, layout.scan)


def chunked_state_space(
    query: Tensor, key: Tensor, value: Tensor, step: Tensor, decay: Tensor, skip: Tensor, scan: Scan
) -> Tensor:
    """`state_space` in torch, in single precision at least, chunk by chunk."""
    heads = (key.size(1), value.size(1) // key.size(1))
    q, k = (by_chunk(x, (heads[0], 1), scan.slots) for x in (query, key))
    v, dt = (by_chunk(x, heads, scan.slots) for x in (value, step[..., None]))
    since = (dt * decay.view(*heads, 1, 1)).cumsum(-2)
    end = since[..., -1:, :]
    chunks = Chunks(
        added=dt * v,
        read=None,
        inside=(q @ k.transpose(-1, -2)) * kept_between(since),
        from_state=q * since.exp(),
        to_state=(k * (end - since).exp()).transpose(-1, -2),
        over=end.exp(),
    )
    return (chunks.outputs(scan) + skip[:, None] * value).to(value.dtype)
