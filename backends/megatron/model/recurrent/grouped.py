"""Recurrent layers over packs, in the place of self-attention: what all kinds of states share.

A key head serves several heads of values; these heads are a group. The rows of the input projection
and of the convolution alternate group by group,

    linear_in     query | key | values | gates | numbers of each head
    conv_weight   query | key | values

so tensor parallelism gives each rank whole groups, and a checkpoint is the same under every
tensor-parallel size. Context-parallel ranks exchange slots for groups: for the convolution and the
state each rank has all slots of the pack and its share of the groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    checkpoint,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import all_to_all
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
from backends.megatron.model.recurrent.chunks import convolve
from backends.megatron.model.recurrent.kernels import Kernels, Library, kernels_for


@dataclass
class RecurrentParts:
    """The classes of the two projections."""

    linear_in: Any = ColumnParallelLinear
    linear_out: Any = RowParallelLinear


@dataclass(frozen=True)
class GroupSizes:
    """The sizes of a group: a key head and its heads of values."""

    groups: int  # of the model
    heads: int  # of values, in a group
    key_dim: int
    value_dim: int
    numbers: int  # of each head, besides values and gates

    @classmethod
    def of_config(cls, config: TransformerConfig, numbers: int) -> GroupSizes:
        """Read Megatron's `linear_*` fields."""
        fields: Any = config
        groups: int = fields.linear_num_key_heads
        return cls(
            groups,
            fields.linear_num_value_heads // groups,
            fields.linear_key_head_dim,
            fields.linear_value_head_dim,
            numbers,
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
        return self.convolved + self.values + self.numbers * self.heads


class RecurrentLayer(MegatronModule):
    """One layer's projections, convolution, state, gate and norm; subclasses have state and norm.

    Parameters named in `split` are divided along their first dimension; they and other vectors are
    made by subclasses.
    """

    library: Library
    # The numbers that a token gives each head, besides values and gates.
    numbers: int
    split: tuple[str, ...] = ("conv_weight", "A_log", "dt_bias")
    conv_bias: nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        submodules: RecurrentParts,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.layer_number = layer_number
        self.tp_group: ProcessGroup = groups.tp
        self.cp_group: ProcessGroup = groups.cp
        self.sizes = GroupSizes.of_config(config, self.numbers)
        # Of this rank.
        self.groups = self.sizes.groups // self.tp_group.size()
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
        self.conv_bias = None
        self.make_vectors(self.groups * self.sizes.heads)
        for name in self.split:
            set_tensor_model_parallel_attributes(getattr(self, name), True, 0, 1)
        self.recomputes = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def make_vectors(self, heads: int) -> None:
        """Make the weights besides the projections, for `heads` heads on this rank."""
        channels = self.groups * self.sizes.convolved
        self.conv_weight = self.parameter(channels, 1, self.config.linear_conv_kernel_dim)
        self.A_log = self.parameter(heads)
        self.dt_bias = self.parameter(heads)

    def parameter(self, *shape: Any) -> nn.Parameter:
        """Make a weight of zeros."""
        return nn.Parameter(
            torch.zeros(*shape, dtype=self.config.params_dtype, device=torch.cuda.current_device())
        )

    def recur(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        numbers: Tensor,
        layout: PackLayout,
        kernels: Kernels,
    ) -> Tensor:
        """Compute the state's outputs, for all slots of the pack and the groups of this rank.

        Args:
            query, key: [N, groups, d_k].
            value: [N, heads, d_v].
            numbers: [N, groups, numbers * heads of a group].

        Returns:
            [N, heads, d_v].
        """
        raise NotImplementedError

    def gated(self, values: Tensor, gate: Tensor) -> Tensor:
        """Norm and gate of [T, groups, values of a group]."""
        raise NotImplementedError

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
        of_heads = sizes.numbers * sizes.heads
        through, gate, numbers = by_group.split((sizes.convolved, sizes.values, of_heads), -1)
        whole = self._slots_for_groups(torch.cat((through, numbers), -1), layout)
        through, numbers = whole.split((sizes.convolved, of_heads), -1)
        kernels = kernels_for(self.library, mixed.device, mixed.dtype)
        bias = None if self.conv_bias is None else self.mine(self.conv_bias)
        convolved = convolve(
            through.flatten(1), self.mine(self.conv_weight), bias, layout, kernels
        ).view_as(through)
        query, key, value = convolved.split((sizes.key_dim, sizes.key_dim, sizes.values), -1)
        heads = value.reshape(value.size(0), -1, sizes.value_dim)
        out = self.recur(query, key, heads, numbers, layout, kernels)
        out = self._groups_for_slots(out.view(value.shape), layout)
        return self.gated(out, gate).reshape(mixed.size(0), 1, -1)

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

    def mine(self, weight: Tensor) -> Tensor:
        """The part of a weight for the groups that this rank computes.

        Its gradient has zeros elsewhere, and Megatron's DDP adds those of the CP ranks.
        """
        ranks = self.cp_group.size()
        return weight if ranks == 1 else weight.chunk(ranks)[self.cp_group.rank()]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the state for checkpoints."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(self.split, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state
