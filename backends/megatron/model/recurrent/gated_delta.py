"""Gated delta layers (Qwen3-Next, Qwen3.5) over packs, in the place of self-attention.

A key head serves several heads of values; these heads are a group. The rows of the input projection
and of the convolution alternate group by group,

    linear_in     query | key | values | output gates | rates | decays
    conv_weight   query | key | values

so tensor parallelism gives each rank whole groups, and a checkpoint is the same under every
tensor-parallel size. Context-parallel ranks exchange slots for groups: for the convolution and the
rule each rank has all slots of the pack and its share of the groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    checkpoint,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from backends.megatron.batch.cp_layout import PackLayout
from backends.megatron.model.elementwise import scaled_norm
from backends.megatron.model.recurrent.delta_rule import convolve, delta_rule, kernels_for


@dataclass
class GatedDeltaParts:
    """The classes of the two projections."""

    linear_in: Any = ColumnParallelLinear
    linear_out: Any = RowParallelLinear


class GatedDelta(MegatronModule):
    """One layer's gated delta rule with its projections, convolution, gate and norm."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaParts,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.layer_number = layer_number
        self.tp_group: ProcessGroup = groups.tp
        self.cp_group: ProcessGroup = groups.cp
        self.sizes = GroupSizes.of_config(config)
        # Of this rank.
        self.groups = self.sizes.groups // self.tp_group.size()
        heads = self.groups * self.sizes.heads
        common: dict[str, Any] = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": self.tp_group,
        }
        self.linear_in = build_module(
            submodules.linear_in,
            config.hidden_size,
            self.sizes.groups * self.sizes.rows,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **common,
        )
        self.linear_out = build_module(
            submodules.linear_out,
            self.sizes.groups * self.sizes.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **common,
        )
        channels = self.groups * self.sizes.convolved
        width = config.linear_conv_kernel_dim
        self.conv_weight = self._parameter(channels, 1, width)
        self.A_log = self._parameter(heads)
        self.dt_bias = self._parameter(heads)
        for split in (self.conv_weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(split, True, 0, 1)
        self.norm_weight = self._parameter(self.sizes.value_dim)
        self.recomputes = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def _parameter(self, *shape: Any) -> nn.Parameter:
        return nn.Parameter(
            torch.zeros(*shape, dtype=self.config.params_dtype, device=torch.cuda.current_device())
        )

    def forward(
        self, hidden_states: Tensor, *unused: Any, packed_seq_params: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        """[T, 1, hidden] -> [T, 1, hidden]; under SP a rank's T / TP slots."""
        layout: PackLayout = packed_seq_params.layout
        mixed: Tensor = self.linear_in(hidden_states)[0]

        def mix(mixed: Tensor) -> Tensor:
            return self._mix(mixed, layout)

        if self.recomputes and self.training:
            heads: Tensor = checkpoint(mix, False, mixed)
        else:
            heads = mix(mixed)
        return self.linear_out(heads)

    def _mix(self, mixed: Tensor, layout: PackLayout) -> Tensor:
        """The projections of T slots -> gated heads of values, [T, 1, groups * values]."""
        sizes = self.sizes
        by_group = mixed.view(mixed.size(0), self.groups, sizes.rows)
        through, gate, of_heads = by_group.split(
            (sizes.convolved, sizes.values, 2 * sizes.heads), -1
        )
        whole = self._slots_for_groups(torch.cat((through, of_heads), -1), layout)
        through, rate, decay = whole.split((sizes.convolved, sizes.heads, sizes.heads), -1)
        mine = self._own_groups()
        kernels = kernels_for(mixed.device, mixed.dtype)
        convolved = convolve(through.flatten(1), mine(self.conv_weight), layout, kernels).view_as(
            through
        )
        query, key, value = convolved.split((sizes.key_dim, sizes.key_dim, sizes.values), -1)
        bias = decay.flatten(1).float() + mine(self.dt_bias).float()
        out = delta_rule(
            query,
            key,
            value.reshape(value.size(0), -1, sizes.value_dim),
            -mine(self.A_log).float().exp() * F.softplus(bias),
            rate.flatten(1).sigmoid(),
            layout,
            kernels,
        )
        out = self._groups_for_slots(out.view(value.shape), layout)
        heads = out.reshape(*gate.shape[:2], sizes.heads, sizes.value_dim)
        return self._gated(heads, gate.reshape(heads.shape)).reshape(mixed.size(0), 1, -1)

    def _gated(self, heads: Tensor, gate: Tensor) -> Tensor:
        """RMSNorm of each head, times its gate."""
        # Each tensor-parallel rank has its own heads: in the backward pass the gradients of the
        # weight, which all ranks hold, are summed.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        return scaled_norm(heads, weight, self.config.layernorm_epsilon, gate=gate)

    # --- context parallelism ----------------------------------------------------------------------

    def _slots_for_groups(self, x: Tensor, layout: PackLayout) -> Tensor:
        """[T, groups, d] -> [CP * T, groups / CP, d], in the order of the sequences."""
        ranks = self.cp_group.size()
        if ranks == 1:
            return x
        # [CP, T, groups / CP, d]: for each rank its groups.
        parts = x.unflatten(1, (ranks, -1)).transpose(0, 1)
        received: Tensor = all_to_all(self.cp_group, parts.contiguous())
        return received.flatten(0, 1).index_select(0, layout.order[0])

    def _groups_for_slots(self, x: Tensor, layout: PackLayout) -> Tensor:
        """[CP * T, groups / CP, d] -> [T, groups, d]: the inverse of `_slots_for_groups`."""
        ranks = self.cp_group.size()
        if ranks == 1:
            return x
        parts = x.index_select(0, layout.order[1]).unflatten(0, (ranks, -1))
        received: Tensor = all_to_all(self.cp_group, parts.contiguous())
        return received.transpose(0, 1).flatten(1, 2)

    def _own_groups(self) -> Any:
        """A function that takes the part of a weight for the groups that this rank computes.

        Its gradient has zeros elsewhere, and Megatron's DDP adds those of the CP ranks.
        """
        ranks = self.cp_group.size()
        rank = self.cp_group.rank()
        return lambda weight: weight if ranks == 1 else weight.chunk(ranks)[rank]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the state for checkpoints; tensor parallelism splits all but the norm."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(("conv_weight", "A_log", "dt_bias"), 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state


@dataclass(frozen=True)
class GroupSizes:
    """The sizes of a group: a key head and its heads of values."""

    groups: int  # of the model
    heads: int  # of values, in a group
    key_dim: int
    value_dim: int

    @classmethod
    def of_config(cls, config: TransformerConfig) -> GroupSizes:
        """Read Megatron's `linear_*` fields."""
        fields: Any = config
        groups: int = fields.linear_num_key_heads
        return cls(
            groups,
            fields.linear_num_value_heads // groups,
            fields.linear_key_head_dim,
            fields.linear_value_head_dim,
        )

    @property
    def values(self) -> int:
        """The number of values of a group, over its heads."""
        return self.heads * self.value_dim

    @property
    def convolved(self) -> int:
        """The channels that the convolution passes over."""
        return 2 * self.key_dim + self.values

    @property
    def rows(self) -> int:
        """The rows of the input projection."""
        return self.convolved + self.values + 2 * self.heads
