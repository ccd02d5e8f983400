"""Gated delta layers: Qwen3-Next, Qwen3.5."""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor

from backends.megatron.batch.cp_layout import PackLayout
from backends.megatron.model.elementwise import scaled_norm
from backends.megatron.model.recurrent.delta_rule import delta_rule
from backends.megatron.model.recurrent.grouped import RecurrentLayer
from backends.megatron.model.recurrent.kernels import Kernels


class GatedDelta(RecurrentLayer):
    """The gated delta rule. A token gives each head a rate and a decay; each head has a norm."""

    library = "fla"
    numbers = 2

    def make_vectors(self, heads: int) -> None:
        """Make the weights besides the projections."""
        super().make_vectors(heads)
        self.norm_weight = self.parameter(self.sizes.value_dim)

    def recur(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        numbers: Tensor,
        layout: PackLayout,
        kernels: Kernels,
    ) -> Tensor:
        """The gated delta rule."""
        rate, decay = numbers.split(2 * (self.sizes.heads,), -1)
        bias = decay.flatten(1).float() + self.mine(self.dt_bias).float()
        return delta_rule(
            query,
            key,
            value,
            -self.mine(self.A_log).float().exp() * F.softplus(bias),
            rate.flatten(1).sigmoid(),
            layout,
            kernels,
        )

    def gated(self, values: Tensor, gate: Tensor) -> Tensor:
        """RMSNorm of each head, times its gate."""
        heads = values.unflatten(-1, (self.sizes.heads, self.sizes.value_dim))
        # Each tensor-parallel rank has its own heads: in the backward pass the gradients of the
        # weight, which all ranks hold, are summed.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        epsilon = self.config.layernorm_epsilon
        return scaled_norm(heads, weight, epsilon, gate=gate.reshape(heads.shape))
