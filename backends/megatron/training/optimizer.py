"""AdamW through Megatron's optimizers, and the learning-rate schedule.

It also has helpers to load the state of AdamW without Apex and Transformer Engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, clip_grads, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor, nn

from backends.megatron.cpu.kernels import kernel_type
from backends.megatron.cpu.shim import replaced
from backends.megatron.training.offload import OffloadedTensors
from rlcore.config.sections.policy import OptimizerConfig
from rlcore.planning.memory import OPTIMIZER_PIECE

# Lists of model parameters in Megatron's optimizers, with those of their fp32 weights.
_COPIED = (
    ("float16_groups", "fp32_from_float16_groups"),
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)


def l2_norm(
    chunk_size: int, unused: Tensor, tensors: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """The norm of all tensors together; replaces Megatron's function for machines without Apex.

    Megatron's function reads a number from the device for every tensor. On a CPU the result is
    bit-identical.
    """
    return torch.stack(torch._foreach_norm(tensors[0])).norm().view(1), None


if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
    clip_grads.l2_norm_impl = l2_norm


def uses_fused_adamw(device: torch.device) -> bool:
    """Whether torch's AdamW runs as one kernel, which on CUDA is faster and needs no temporaries.

    On a CPU the fused kernel would change the bits of a step.
    """
    return kernel_type(device) == "cuda"


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, 0-based.

    A linear warm-up to `lr` is followed by a constant rate, or by a linear or cosine decay to
    `min_lr`. Warm-up step k of w uses (k + 1) / w of the rate; decay ends at `decay_steps`
    (default: `total_steps`).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    end = config.decay_steps or total_steps
    progress = min(max((step - config.warmup_steps) / max(end - config.warmup_steps, 1), 0.0), 1.0)
    share = (
        1.0 - progress
        if config.schedule == "linear"
        else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    return config.min_lr + (config.lr - config.min_lr) * share


@dataclass(frozen=True)
class StepReport:
    """The outcome of one optimizer step."""

    lr: float
    grad_norm: float
    skipped: bool  # nothing changed, as the norm was exactly 0 or not finite


class ScheduledOptimizer:
    """Megatron's AdamW for one model's chunks, with gradient clipping and a schedule.

    `state` holds its moments and fp32 weights, which may be offloaded between steps.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        modules: Sequence[nn.Module],
        *,
        params_dtype: torch.dtype,
        total_steps: int,
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.steps_taken = 0
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=params_dtype == torch.bfloat16,
                params_dtype=params_dtype,
                use_distributed_optimizer=config.distributed,
            ),
            list(modules),
            # `init_parallel` makes no gloo groups.
            use_gloo_process_groups=False,
        )
        device = self._device = next(modules[0].parameters()).device
        self._in_bf16 = params_dtype == torch.bfloat16 and not config.grad_reduce_in_fp32
        for part in self.parts if uses_fused_adamw(device) else ():
            if isinstance(part.optimizer, torch.optim.AdamW):
                for group in part.optimizer.param_groups:
                    group["fused"] = True
        # The optimizer must not offload tensors that belong to the model (all weights in fp32, or
        # views of a buffer).
        self._model_storages = {
            p.untyped_storage()._cdata for module in modules for p in module.parameters()
        }
        self.state = OffloadedTensors(self._own_tensors, device, keep_on_device=not config.offload)

    @property
    def parts(self) -> list[MegatronOptimizer]:
        """The chained optimizers, one for each kind of parameter (dense, expert).

        A kind of which no rank trains any, as with adapters of experts alone, has none.
        """
        chained = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [part for part in chained if not part.is_stub_optimizer]

    @torch.no_grad()
    def step(self) -> StepReport:
        """Clip and apply the gradients that the schedule left in the DDP buffers.

        A gradient norm that is not finite, or exactly 0, leaves the parameters, the moments and the
        schedule unchanged; the norm is all-reduced, so all ranks agree. If no term of the loss has
        a gradient, a step would still move the weights by the moments of earlier steps. Collective.
        """
        lr = learning_rate(self.config, self.steps_taken, self.total_steps)
        if self._in_bf16:
            norm = self._norm_in_pieces()
        else:
            self.megatron.prepare_grads()
            norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm) or norm == 0.0:
            return StepReport(lr, norm, skipped=True)
        scale = self.config.clip_grad / (norm + 1e-6) if self.config.clip_grad else 1.0
        if not self._in_bf16:
            _scale([p for part in self.parts for p in part.get_parameters()], scale)
        for group in self.megatron.param_groups:
            group["lr"] = lr * group["lr_mult"]
            # Megatron's scheduler, which is not used, would set this. Without `wd_mult` norms
            # and biases would decay.
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        if self.state.is_away or self._in_bf16:
            for part in self.parts:
                self._step_in_pieces(part, scale)
        else:
            self.megatron.step_with_ready_grads()
        self.steps_taken += 1
        return StepReport(lr, norm, skipped=False)

    # --- pieces -----------------------------------------------------------------------------------

    def _step_in_pieces(self, part: MegatronOptimizer, scale: float) -> None:
        """Step like Megatron's `step_with_ready_grads`, with one piece at a time on the device.

        Gradients in bf16 are converted and scaled here: in fp32 all of them would take more than
        they save.
        """

        def step(parameters: Sequence[Tensor]) -> None:
            if self._in_bf16:
                part._copy_model_grads_to_main_grads()
                _scale(parameters, scale)
            part.optimizer.step()
            # Weights in fp32 are stepped themselves.
            if isinstance(part, MixedPrecisionOptimizer):
                part._copy_main_params_to_model_params()
            if self._in_bf16:
                _drop_gradients(parameters)

        self._in_pieces(part, step)
        if isinstance(part, DistributedOptimizer):
            for chunk in part.model_chunks:
                chunk.start_param_sync()

    def _norm_in_pieces(self) -> float:
        """The norm of gradients in bf16, as Megatron's `get_grad_norm`. Collective."""
        return math.sqrt(sum(self._squared_norm(part) for part in self.parts))

    def _squared_norm(self, part: MegatronOptimizer) -> float:
        total = torch.zeros(1, device=self._device)

        def add(parameters: Sequence[Tensor]) -> None:
            part._copy_model_grads_to_main_grads()
            if gradients := part.get_main_grads_for_grad_norm():
                total.add_(torch.stack(torch._foreach_norm(gradients)).square().sum())
            _drop_gradients(parameters)

        self._in_pieces(part, add, state=False)
        dist.all_reduce(total, group=part.get_grad_stats_parallel_group())
        return float(total)

    def _in_pieces(
        self,
        part: MegatronOptimizer,
        work: Callable[[Sequence[Tensor]], object],
        *,
        state: bool = True,
    ) -> None:
        """Work on a few parameters at a time, which are all that `part` then has.

        Args:
            work: called with the fp32 parameters of each piece.
            state: bring the state of these parameters to the device.
        """
        groups = part.param_groups
        try:
            for group in groups:
                for parameters in _pieces(group["params"]):
                    piece = {**group, "params": parameters}
                    part.optimizer.param_groups = [piece]
                    own = partial(self._tensors_of, part, parameters if state else [])
                    with self.state.part_on_device(own), _only_copied(part, parameters):
                        work(parameters)
                # Transformer Engine's AdamW counts steps here.
                if group["params"] and "step" in piece:
                    group["step"] = piece["step"]
        finally:
            part.optimizer.param_groups = groups

    def _own_tensors(self) -> Iterator[Tensor]:
        for part in self.parts:
            parameters = [p for group in part.param_groups for p in group["params"]]
            yield from self._tensors_of(part, parameters)

    def _tensors_of(self, part: MegatronOptimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The fp32 weights and moments of some parameters, without the model's own memory."""
        tensors = list(parameters)
        for parameter in parameters:
            state = part.optimizer.state.get(parameter, {})
            tensors += [t for t in state.values() if isinstance(t, Tensor)]
        return [t for t in tensors if t.untyped_storage()._cdata not in self._model_storages]

    def zero_grad(self) -> None:
        """Drop the gradients of the last step."""
        self.megatron.zero_grad()

    def reload_weights(self) -> None:
        """Take over the model's weights, which have been loaded without the optimizer's state."""
        for part in self.parts:
            # Weights in fp32 are their own.
            if isinstance(part, MixedPrecisionOptimizer):
                self._in_pieces(part, partial(_reload, part))

    def prepare_for_load(self) -> None:
        """Create the moments to load a checkpoint into: AdamW has none before a step."""
        for part in self.parts:
            self._in_pieces(part, partial(_make_moments, part.optimizer))

    def set_steps_taken(self, steps: int) -> None:
        """Continue the schedule and AdamW's count after `steps` steps, with loaded moments."""
        self.steps_taken = steps
        if not steps:
            return
        # torch's AdamW counts per parameter, Transformer Engine's and Apex's per group.
        in_groups = not all(isinstance(part.optimizer, torch.optim.AdamW) for part in self.parts)
        for part in self.parts:
            for group in part.param_groups:
                if in_groups:
                    group["step"] = steps
                    continue
                # Each parameter needs a separate tensor, since AdamW counts in place; fused AdamW
                # needs it on the device.
                for parameter in group["params"]:
                    device = parameter.device if group.get("fused") else "cpu"
                    count = torch.tensor(float(steps), device=device)
                    part.optimizer.state[parameter]["step"] = count


def _reload(part: MixedPrecisionOptimizer, unused: Sequence[Tensor]) -> None:
    part._copy_model_params_to_main_params()


def _make_moments(adamw: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        state: dict[str, Tensor] = adamw.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)


def _scale(parameters: Sequence[Tensor], scale: float) -> None:
    """Multiply gradients by a factor below 1."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if scale < 1.0 and gradients:
        torch._foreach_mul_(gradients, scale)


def _drop_gradients(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _pieces(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide parameters into lists whose state has at most OPTIMIZER_PIECE bytes, if it can be."""
    piece: list[Tensor] = []
    size = 0
    for parameter in parameters:
        own = 12 * parameter.numel()
        if piece and size + own > OPTIMIZER_PIECE:
            yield piece
            piece = []
            size = 0
        piece.append(parameter)
        size += own
    if piece:
        yield piece


@contextmanager
def _only_copied(part: MegatronOptimizer, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside, Megatron copies between the model and these fp32 weights alone."""
    wanted = {id(parameter) for parameter in parameters}
    with ExitStack() as stack:
        for model_name, main_name in _COPIED:
            if not hasattr(part, main_name):
                continue
            model = chain.from_iterable(getattr(part, model_name))
            main = chain.from_iterable(getattr(part, main_name))
            pairs = [pair for pair in zip(model, main, strict=True) if id(pair[1]) in wanted]
            stack.enter_context(replaced(part, model_name, [[one for one, _ in pairs]]))
            stack.enter_context(replaced(part, main_name, [[one for _, one in pairs]]))
        yield
