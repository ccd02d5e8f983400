"""A model's optimizer state as whole tensors under Hugging Face names, without code of checkpoints.

The state of every parameter is copied into a blank fp32 model of the same layout, which is then
exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.layout import owned_parameters
from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from backends.megatron.parallel.state import ParallelState
    from backends.megatron.training.optimizer import ScheduledOptimizer
    from backends.megatron.weights.export import WeightExporter
    from backends.megatron.weights.folder import export_hf

KEYS = ("param", "exp_avg", "exp_avg_sq")  # the first: the fp32 masters


def export_state(
    folder: Path, optimizer: ScheduledOptimizer, modules: Sequence[nn.Module],
    blank: Sequence[nn.Module],
    arch: Architecture, parallel: ParallelState, *, head: str,
) -> None:  # fmt: skip
    """Write one folder a key. Collective.

    It also checks that every parameter's step count is the optimizer's, in its own tensor.
    """
    counts = [state["step"] for part in optimizer.parts for state in part.optimizer.state.values()]
    assert {float(count) for count in counts} <= {float(optimizer.steps_taken)}
    assert len({count.data_ptr() for count in counts}) == len(counts)
    states = [
        _whole_state(optimizer, parameter) for _, parameter, _ in owned_parameters(modules, arch)
    ]
    exporter = WeightExporter(blank, arch, parallel, dtype=torch.float32, head=head)
    for key in KEYS:
        for (_, parameter, _), state in zip(owned_parameters(blank, arch), states, strict=True):
            parameter.data.copy_(state[key].view(parameter.shape))
        export_hf(exporter, folder / key)


def _whole_state(optimizer: ScheduledOptimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The whole of this rank's parameter, which the distributed optimizer splits over DP ranks."""
    for part in optimizer.parts:
        if isinstance(part, DistributedOptimizer):
            if any(parameter in buffer.param_index_map for buffer in part.buffers):
                return _gathered(part, parameter)
        else:
            master: Any = getattr(parameter, "main_param", parameter)
            if master in part.optimizer.state:
                return {"param": master.detach(), **part.optimizer.state[master]}
    raise KeyError(f"no optimizer has a parameter of shape {tuple(parameter.shape)}")


def _gathered(part: DistributedOptimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    whole = {key: torch.zeros(parameter.numel()) for key in KEYS}
    if parameter in part.model_param_group_index_map:  # this rank has a piece of it
        piece = part._get_model_param_range_map(parameter)["param"]
        own = part._get_main_param_and_optimizer_states(parameter)
        for key in KEYS:
            whole[key][piece.start : piece.end] = own[key]
    for tensor in whole.values():
        dist.all_reduce(tensor, group=part.data_parallel_group)
    return whole
