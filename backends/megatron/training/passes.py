"""Passes of a model over micro-batches, through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from backends.megatron.batch.pack import MicroBatch, gather_targets
from backends.megatron.convert.architecture import Architecture
from backends.megatron.model.head import Targets
from backends.megatron.model.moe import clear_losses, padding_mask
from backends.megatron.model.routing_replay import Routing, replaying, routed, start_step
from backends.megatron.training.offload import OffloadedTensors, Retention
from backends.megatron.training.optimizer import ScheduledOptimizer, StepReport


@dataclass
class Model:
    """One model on this rank, with its own TransformerConfig, since Megatron keeps hooks there."""

    arch: Architecture
    config: TransformerConfig
    chunks: list[GPTModel]  # bare: parameters, conversion, checkpoints
    modules: list[nn.Module]  # as they are called: behind Float16Module and DDP
    optimizer: ScheduledOptimizer | None = None  # None: frozen
    # weights, then gradients where there are any; empty while the model is built
    _offloadable: list[OffloadedTensors] = field(default_factory=list)

    def attach_optimizer(self, optimizer: ScheduledOptimizer) -> None:
        """Make the model trainable."""
        self.optimizer = optimizer
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = None  # no loss scale: fp32 gradients

    def make_offloadable(self, device: torch.device, *, offload: bool) -> None:
        """Let weights and gradient buffers leave `device`; with `offload` they do between uses."""
        retention = Retention.FROZEN if self.optimizer is None else Retention.CHANGING
        keep = not offload
        self._offloadable.append(
            OffloadedTensors(self._weights, device, retention, keep_on_device=keep)
        )
        if self.optimizer is not None:
            self._offloadable.append(
                OffloadedTensors(self._gradients, device, Retention.SCRATCH, keep_on_device=keep)
            )

    @property
    def offloadable(self) -> list[OffloadedTensors]:
        """Everything of the model that can leave the device."""
        return [*self._offloadable, *([] if self.optimizer is None else [self.optimizer.state])]

    @contextmanager
    def on_device(self, *, training: bool = False) -> Iterator[Model]:
        """Inside, the weights are on the device, and with `training` memory for gradients too."""
        with ExitStack() as stack:
            for tensors in self._offloadable if training else self._offloadable[:1]:
                stack.enter_context(tensors.on_device())
            yield self

    @contextmanager
    def on_device_with_optimizer(self) -> Iterator[None]:
        """Inside, weights and optimizer state are on the device."""
        with (
            self.on_device(),
            nullcontext() if self.optimizer is None else self.optimizer.state.on_device(),
        ):
            yield

    def _weights(self) -> list[Tensor]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    def _gradients(self) -> list[Tensor]:
        wrapped: list[Any] = self.modules
        return [
            buffer.grad_data
            for ddp in wrapped
            for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)
        ]


@dataclass(frozen=True)
class HeadOptions:
    """Options of the output layer."""

    temperature: float
    chunk_elements: int | None
    entropy: bool = True

    def targets(self, micro: MicroBatch) -> Targets:
        """The output layer's input for one micro-batch."""
        return Targets(
            micro.target_index,
            micro.target_tokens,
            self.entropy,
            self.temperature,
            self.chunk_elements,
            micro.sampling_mask,
        )


# (micro-batch, the head's result for all its targets) -> weighted sum
Loss = Callable[[MicroBatch, Any], Tensor]


def score_pass(
    model: Model,
    micro_batches: Sequence[MicroBatch],
    head: HeadOptions,
    *,
    routing: Routing = Routing.OWN,
) -> list[Any]:
    """Run the model without gradients. Collective.

    Args:
        routing: which experts the pass uses, and whether a later `training_pass` replays them.

    Returns:
        The output of the last stage for each micro-batch; an empty list on other stages.
    """

    def forward_step(
        data: Iterator[MicroBatch], module: nn.Module
    ) -> tuple[Any, Callable[..., Any]]:
        micro = next(data)
        with routed(routing, _chunk(model, module), micro):
            output = _forward(model, module, micro, head)
        # With experts Megatron asks for the device of the model's output: one tensor is enough.
        first = output[0] if isinstance(output, tuple) else output
        return first, lambda _, non_loss_data: whole(micro, output)

    whole = _over_context(model)
    with _evaluating(model), torch.no_grad():
        return _run(model, forward_step, micro_batches, forward_only=True)


def training_pass(
    model: Model,
    micro_batches: Sequence[MicroBatch],
    head: HeadOptions,
    loss: Loss,
    *,
    step_tokens: int,
) -> StepReport:
    """Forward, backward and one optimizer step. Collective.

    Args:
        loss: the weighted sum over a micro-batch. Weights are those of the whole optimizer step, so
            the sums of its micro-batches add up.
        step_tokens: model tokens of the optimizer step over all ranks.
    """
    assert model.optimizer is not None, "a frozen model takes no step"
    whole = _over_context(model)

    def forward_step(
        data: Iterator[MicroBatch], module: nn.Module
    ) -> tuple[Any, Callable[..., Any]]:
        micro = next(data)

        def scheduled(output: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            # Megatron divides by the tokens of the step again. A micro-batch without tokens keeps
            # its empty sum in the graph.
            total = loss(micro, whole(micro, output)) * step_tokens
            return total, torch.tensor(micro.num_tokens, dtype=torch.int, device=total.device), {}

        with replaying(_chunk(model, module), micro):
            return _forward(model, module, micro, head), scheduled

    for module in model.modules:
        module.zero_grad_buffer()  # type: ignore[operator]
    model.optimizer.zero_grad()
    clear_losses(model.chunks)
    start_step(model.chunks)
    _run(model, forward_step, micro_batches, forward_only=False)
    return model.optimizer.step()


def _forward(model: Model, module: nn.Module, micro: MicroBatch, head: HeadOptions) -> Any:
    # With rotary embeddings position ids are not looked at; attention needs no mask.
    return module(
        micro.input_ids,
        None,
        None,
        labels=head.targets(micro),
        packed_seq_params=micro.packed,
        padding_mask=padding_mask(micro.padding, model.config, _chunk(model, module)),
    )


def _chunk(model: Model, module: nn.Module) -> GPTModel:
    return model.chunks[model.modules.index(module)]


def _over_context(model: Model) -> Callable[[MicroBatch, Any], Any]:
    """Return a function that gathers the head's results of a micro-batch from all CP ranks."""
    group = model.chunks[0].pg_collection.cp
    return lambda micro, output: gather_targets(
        output, micro.target_own, micro.num_trainable, group
    )


def _run(
    model: Model,
    forward_step: Callable[..., Any],
    micro_batches: Sequence[MicroBatch],
    *,
    forward_only: bool,
) -> list[Any]:
    iterators = [iter(micro_batches) for _ in model.modules]
    several = len(model.modules) > 1
    outputs: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if several else iterators[0],
        model=model.modules if several else model.modules[0],
        num_microbatches=len(micro_batches),
        # All micro-batches have the same length under pipeline stages. Megatron divides by CP.
        seq_length=micro_batches[0].num_slots * model.config.context_parallel_size,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return outputs


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    trained = [module for module in model.modules if module.training]
    for module in trained:
        module.eval()
    try:
        yield
    finally:
        for module in trained:
            module.train()
