"""Mamba-2 layers: Nemotron-H, Nemotron-3."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from backends.megatron.batch.cp_layout import PackLayout
from backends.megatron.model.elementwise import scaled_norm
from backends.megatron.model.recurrent.grouped import RecurrentLayer
from backends.megatron.model.recurrent.kernels import Kernels
from backends.megatron.model.recurrent.state_space import state_space


class Mamba(RecurrentLayer):
    """A selective state space. A token gives each head a time step; a group has one norm."""

    library = "mamba_ssm"
    numbers = 1
    split = (*RecurrentLayer.split, "conv_bias", "D", "norm_weight")

    def make_vectors(self, heads: int) -> None:
        """Make the weights besides the projections."""
        super().make_vectors(heads)
        self.conv_bias = self.parameter(self.groups * self.sizes.convolved)
        self.D = self.parameter(heads)
        self.norm_weight = self.parameter(self.groups * self.sizes.values)

    def recur(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        numbers: Tensor,
        layout: PackLayout,
        kernels: Kernels,
    ) -> Tensor:
        """The state space."""
        return state_space(
            query,
            key,
            value,
            # Without a lower limit: see `as_trained`.
            F.softplus(numbers.flatten(1).float() + self.mine(self.dt_bias).float()),
            -self.mine(self.A_log).float().exp(),
            self.mine(self.D),
            layout,
            kernels,
        )

    def gated(self, values: Tensor, gate: Tensor) -> Tensor:
        """RMSNorm of each group's values times their gates."""
        weight = self.norm_weight.view(self.groups, -1)
        epsilon = self.config.layernorm_epsilon
        return scaled_norm(values, weight, epsilon, gate=gate, gates_input=True)
