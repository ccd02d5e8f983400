"""RMSNorm over all query or key heads of a layer, which tensor-parallel ranks share."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


class HeadsRMSNorm(nn.Module):
    """One norm over `heads` heads of all tensor-parallel ranks.

    A rank holds the weight of its own heads, [heads / TP * d]. The ranks add up the squares of
    theirs, and the gradient of the sum.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, heads: int
    ) -> None:
        super().__init__()
        own = heads // config.tensor_model_parallel_size * hidden_size
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(own, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self.width = heads * hidden_size
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads of this rank, d] -> the same shape."""
        flat = x.flatten(-2).float()
        squares = reduce_from_tensor_model_parallel_region(flat.square().sum(-1, keepdim=True))
        mean = copy_to_tensor_model_parallel_region(squares) / self.width
        normed = (flat * torch.rsqrt(mean + self.eps)).to(x.dtype)
        return (normed * self.weight).view(x.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the weight as a part of the whole one: Megatron takes it for replicated."""
        state = self.state_dict(prefix="", keep_vars=True)
        made: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets
        )
        return made
