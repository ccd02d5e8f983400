"""Packed (`thd`) causal self-attention without Transformer Engine, and RMSNorm.

A pack is T tokens of several concatenated sequences, or a context-parallel rank's share of them
(`PackLayout`).
"""

from __future__ import annotations

import importlib.util
import inspect
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from backends.megatron.batch.cp_layout import PackLayout
from backends.megatron.batch.pack import gather_keys_values
from backends.megatron.convert.rope import Rope
from backends.megatron.cpu.kernels import kernel_type
from backends.megatron.model.attention.merged import merged_attention, visible
from backends.megatron.model.elementwise import rotate_heads, scaled_norm
from rlcore.planning.activations import MAX_VARLEN_HEAD

# Merging is faster from this many copied keys for each token of the pack on, and from this many
# tokens in a prefix (benchmarks/prefixes.py).
MERGED_FROM = 3.0
LONG_PREFIX = 256
# The same for the variable-length kernel (section "sharing" of benchmarks/gpu.sh, on an H100).
MERGED_FROM_VARLEN = 4.0


class CoreAttention(MegatronModule):
    """Core attention over a pack of rotated queries and keys.

    On CUDA in half precision it calls a variable-length kernel, otherwise it makes a few batched,
    right-padded calls. Context-parallel ranks gather keys and values.

    Args:
        window: number of keys up to its own that a query sees; None: all.
        sinks: whether each head has a learned score beside those of the keys. On CUDA this needs
            half precision.
    """

    def __init__(
        self,
        config: Any,
        *,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        window: int | None = None,
        sinks: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["cp"])
        self.cp_group = groups.cp
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.window = window
        # Megatron's name for the sinks: fp32 or half precision, [heads of this rank].
        self.softmax_offset: nn.Parameter | None = None
        if sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = torch.cuda.current_device()
            offset = torch.zeros(heads, dtype=config.params_dtype, device=device)
            self.softmax_offset = nn.Parameter(offset)
            set_tensor_model_parallel_attributes(
                self.softmax_offset, is_parallel=True, dim=0, stride=1
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *unused: Any,
        packed_seq_params: Any = None,
        **unused_options: Any,
    ) -> Tensor:
        """q [T, heads, d], k [T, groups, d] and v [T, groups, d_v] -> [T, heads * d_v]."""
        key, value = gather_keys_values(key, value, self.cp_group)
        layout: PackLayout = packed_seq_params.layout
        varlen = query.size(-1) <= MAX_VARLEN_HEAD and uses_varlen(query.device, query.dtype)
        same_heads = query.size(-1) == value.size(-1)
        sinks = self.softmax_offset
        if sinks is not None or (
            self.window is None
            and merges(layout, query.device, same_heads=same_heads, varlen=varlen)
        ):
            return merged_attention(
                query,
                key,
                value,
                layout,
                self.scale,
                varlen=varlen,
                window=self.window,
                sinks=sinks,
            )
        attend = varlen_attention if varlen else bucketed_attention
        return attend(query, key, value, layout, self.scale, self.window)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the sinks as parts of the whole: Megatron takes them for replicated."""
        if self.softmax_offset is None:
            return {}
        state = self.state_dict(keep_vars=True)
        made: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets
        )
        return made


class PackedAttention(CoreAttention):
    """Core attention that first rotates q and k by the angles of the pack.

    Args:
        rope: the rotary positions of the layer; None: none.
    """

    def __init__(self, *args: Any, rope: Rope | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rope = rope

    def forward(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Rotate q and k, then attend."""
        if self.rope is not None:
            angles = kwargs["packed_seq_params"].angles[self.rope]
            query, key = rotate_heads(query, key, angles)
        return super().forward(query, key, *args, **kwargs)


def merges(layout: PackLayout, device: torch.device, *, same_heads: bool, varlen: bool) -> bool:
    """Whether to attend to a pack's prefixes separately, as copying their keys would cost more.

    Args:
        same_heads: queries and values have heads of one size, as the kernels require.
        varlen: use CUDA's variable-length kernel.
    """
    if layout.prefixes is None or not same_heads:
        return False
    copies = len(layout.prefixes.slots)
    if varlen:
        return copies >= MERGED_FROM_VARLEN * sum(layout.lengths)
    # For single precision on CUDA torch has no kernel that returns the parts' log-sum-exps.
    if kernel_type(device) != "cpu":
        return False
    behind = int(layout.prefixes.counts.count_nonzero())
    return copies >= MERGED_FROM * sum(layout.lengths) and copies >= LONG_PREFIX * behind


def uses_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length flash attention supports this device and dtype."""
    return kernel_type(device) == "cuda" and dtype in (torch.float16, torch.bfloat16)


@cache
def _varlen_attention() -> Any:
    """torch's kernel. Its import also imports the compiler, so it is only imported on CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    # Let torch call FlashAttention 3 if its package is installed and the GPU is a Hopper.
    kernels = torch.nn.attention
    if (
        importlib.util.find_spec("flash_attn_interface") is not None
        and torch.cuda.get_device_capability()[0] == 9
        and "FA3" in kernels.list_flash_attention_impls()
    ):
        kernels.activate_flash_attention_impl("FA3")
    # Before torch 2.12 the kernel takes fewer heads of keys without the option.
    takes_option = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if takes_option else varlen_attn


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackLayout,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention inside each sequence of a pack by a variable-length kernel.

    Returns [T, heads * d_v]. There is one call for the front chunks and one for the back chunks.
    For `window` see `CoreAttention`.
    """
    outputs: list[Tensor] = []
    width = value.size(-1)
    narrow = query.size(-1) - value.size(-1)
    # The kernel supports one head size: pad the values to the size of the queries.
    value = F.pad(value, (0, narrow)) if narrow else value
    for chunk in layout.chunks.parts:
        q = query if chunk.queries is None else query.index_select(0, chunk.queries)
        k, v = (x if chunk.keys is None else x.index_select(0, chunk.keys) for x in (key, value))
        # (-1, 0) is causal, aligned to the end of the keys if there are more keys than queries.
        out = _varlen_attention()(
            q,
            k,
            v,
            chunk.cu_queries,
            chunk.cu_keys,
            chunk.longest_queries,
            chunk.longest_keys,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
        )
        outputs.append(cast(Tensor, out)[..., :width].reshape(q.size(0), -1))
    restore = layout.chunks.restore
    return outputs[0] if restore is None else torch.cat(outputs).index_select(0, restore)


def bucketed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackLayout,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention inside each sequence of a pack by one batched call per bucket.

    Returns [T, heads * d_v]; for `window` see `CoreAttention`.
    """
    heads = query.size(1)
    groups = key.size(1)
    buckets = layout.buckets
    outputs: list[Tensor] = []
    for bucket in buckets.parts:
        q, k, v = (
            (x if buckets.identity else x.index_select(0, index.view(-1))).reshape(
                *index.shape, x.size(1), x.size(2)
            )
            for x, index in ((query, bucket.queries), (key, bucket.keys), (value, bucket.keys))
        )
        if heads != groups and kernel_type(q.device) == "cuda":
            # torch's only kernel for single precision that takes fewer heads of keys stores the
            # scores of all pairs.
            k, v = (x.repeat_interleave(heads // groups, 2) for x in (k, v))
        seen = None
        # Some runs of queries begin in the middle of their sequence.
        if bucket.before is not None or (window is not None and window < k.size(1)):
            seen = visible(bucket.before, q.size(1), k.size(1), window).to(q.device)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=seen,
            is_causal=seen is None,
            scale=scale,
            enable_gqa=k.size(2) != heads,
        )
        outputs.append(out.transpose(1, 2).reshape(bucket.queries.numel(), -1))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat if buckets.identity else flat.index_select(0, buckets.restore)


class LocalRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's mark, by which SP sums the weight's gradient over TP.

    With Megatron's field `layernorm_zero_centered_gamma` it scales by 1 + weight.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        if not self.zero_centered:
            return super().forward(x)
        # In half precision 1 + weight has too few digits.
        return scaled_norm(x, self.weight, self.eps or 0.0, offset=1.0)


class HeadsRMSNorm(torch.nn.Module):
    """RMSNorm over `heads` query or key heads of all tensor-parallel ranks.

    A rank holds the weight of its own heads, [heads / TP * d]. The ranks add up the squares of
    theirs, and the gradient of the sum.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, *, heads: int) -> None:
        super().__init__()
        own = heads // config.tensor_model_parallel_size * hidden_size
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(own, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self.width = heads * hidden_size
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads of this rank, d] -> the same shape."""
        normed = scaled_norm(x.flatten(-2), self.weight, self.eps, mean=self._mean)
        return normed.view(x.shape)

    def _mean(self, own: Tensor) -> Tensor:
        """The mean over all ranks' heads: [..., heads of this rank * d] -> [..., 1]."""
        total: Tensor = reduce_from_tensor_model_parallel_region(own.sum(-1, keepdim=True))
        return total / self.width

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the weight as a part of the whole one: Megatron takes it for replicated."""
        state = self.state_dict(prefix="", keep_vars=True)
        made: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets
        )
        return made
