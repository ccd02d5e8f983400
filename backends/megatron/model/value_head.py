"""The head of value models: values at trainable positions."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from backends.megatron.model.head import Targets


class ValueHead(nn.Module):
    """A linear map to one value, replicated over TP.

    Its weight is initialised with std 1 / sqrt(hidden + 1), the same on every rank. Values are
    computed in fp32 on the rank's own share of the tokens, so that under sequence parallelism only
    [T] is gathered. The weight's gradient is then partial on every rank; the mark on the weight
    makes Megatron sum it.
    """

    def __init__(self, config: Any, tp_group: ProcessGroup, *, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        initial = (
            torch.randn(1, config.hidden_size, generator=generator)
            * (config.hidden_size + 1) ** -0.5
        )
        # Inside `megatron_device("cpu")` this is the CPU.
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(initial.to(device=device, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group

    def forward(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Compute the values [M] of the states before the target tokens, in fp32.

        `hidden` is [T, 1, H], or its sequence-parallel share.
        """
        values = (hidden[:, 0].float() @ self.weight.float().t())[:, 0]
        # All ranks compute the same loss, so the backward takes the rank's share without a sum.
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values.index_select(0, targets.micro.target_index)
