"""The heads of the models: log-probs and entropy, or values, at trainable positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from backends.megatron.batch.pack import MicroBatch
from backends.megatron.model.fused_head import fused_logprobs


@dataclass(frozen=True)
class HeadOptions:
    """Options of the output layer."""

    temperature: float  # log-probs are those of logits / temperature
    # logits that exist at one time; by default `default_chunk_elements` of the device
    chunk_elements: int | None
    entropy: bool = True  # whether to compute the entropy


@dataclass(frozen=True)
class Targets:
    """The micro-batch whose M targets on this rank are predicted, and how."""

    micro: MicroBatch
    options: HeadOptions


class LogprobHead(ColumnParallelLinear):
    """Megatron's output layer with another `forward`.

    It is called as a module, since Megatron's DDP waits for gathered parameters in a pre-forward
    hook. Names and sharding of its state are those of the stock layer.
    """

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Targets, vocab_size: int, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute (logprobs [M], entropy [M] or None), in fp32.

        Args:
            hidden: [T, 1, H], or its sequence-parallel share.
            weight: the shared embedding where the model ties its head, else the layer's own.
        """
        assert self.bias is None, "an output layer with a bias is not supported"
        assert hidden.size(1) == 1, "packed input has a batch dimension of 1"
        micro = targets.micro
        # the backward of the gather is the reduce-scatter of the ranks' parts
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self.tp_group
            )
            rows = hidden[:, 0].index_select(0, micro.target_index)
        else:  # index first: the backward then all-reduces [M, H], not [T, H]
            rows = copy_to_tensor_model_parallel_region(
                hidden[:, 0].index_select(0, micro.target_index), group=self.tp_group
            )
        return fused_logprobs(
            rows,
            self.weight if weight is None else weight,
            micro.target_tokens,
            vocab_size=vocab_size,
            tp=self.tp_group,
            entropy=targets.options.entropy,
            temperature=targets.options.temperature,
            tile_elements=targets.options.chunk_elements,
            sampling_mask=micro.sampling_mask,
        )


class ValueHead(nn.Module):
    """A linear map to one value, replicated over TP.

    Its weight is initialised with std 1 / sqrt(hidden + 1), the same on every rank. Values are
    computed in fp32 on the rank's own share of the tokens, so that under sequence parallelism only
    [T] is gathered. The weight's gradient is then partial on every rank; Megatron sums it because
    of the mark on the weight.
    """

    def __init__(self, config: Any, tp_group: ProcessGroup, *, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        initial = (
            torch.randn(1, config.hidden_size, generator=generator)
            * (config.hidden_size + 1) ** -0.5
        )
        device = torch.cuda.current_device()  # the CPU inside `megatron_device("cpu")`
        self.weight = nn.Parameter(initial.to(device=device, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group

    def forward(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Compute the values [M] of the states before the target tokens, in fp32.

        `hidden` is [T, 1, H], or its sequence-parallel share.
        """
        values = (hidden[:, 0].float() @ self.weight.float().t())[:, 0]
        # all ranks go on with the same values: the backward takes the own share, without a sum
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values.index_select(0, targets.micro.target_index)
