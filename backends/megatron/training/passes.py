"""Passes of a model over micro-batches, through Megatron's pipeline schedules, and their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from backends.megatron.batch.local_batch import LocalBatch
from backends.megatron.batch.pack import MicroBatch, gather_predicted, gather_targets
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.layout import named_weights
from backends.megatron.model.head import HeadOptions, Targets
from backends.megatron.model.moe import clear_losses, padding_mask
from backends.megatron.model.mtp import prediction_pass
from backends.megatron.model.routing_replay import Routing, own_routing, replaying, start_step
from backends.megatron.parallel.agreement import broadcast_json, union_of_names
from backends.megatron.parallel.state import ParallelState
from backends.megatron.training.offload import OffloadedTensors, Retention
from backends.megatron.training.optimizer import ScheduledOptimizer, StepReport
from rlcore.algorithms import (
    Moments,
    PolicyLoss,
    PolicyLossInputs,
    approx_kl,
    value_clipped,
    value_loss,
)
from rlcore.config.sections.policy import CriticConfig

# `step_kl` is measured on so many trainable tokens of a replica at least, and on this share.
MEASURED_TOKENS = 128
MEASURED_SHARE = 1 / 16

_PER_TOKEN = ("ref_logprobs", "rollout_logprobs", "versions")


@dataclass
class Model:
    """One model on this rank, with its own TransformerConfig, in which Megatron keeps hooks."""

    arch: Architecture
    config: TransformerConfig
    chunks: list[GPTModel]  # unwrapped: for parameters, conversion, checkpoints
    modules: list[nn.Module]  # for calls: wrapped in Float16Module and DDP
    optimizer: ScheduledOptimizer | None = None  # None: frozen
    # The model whose frozen weights this one computes with, besides its own adapters and head.
    base: Model | None = None
    # Both are empty while the model is being built.
    _offloadable_weights: list[OffloadedTensors] = field(default_factory=list)
    _offloadable_gradients: list[OffloadedTensors] = field(default_factory=list)

    def make_offloadable(self, device: torch.device, *, offload: bool) -> None:
        """Make weights and gradient buffers offloadable; `offload`: offload them between uses."""
        keep = not offload
        trained = [] if self.optimizer is None else [self._trained]
        # What an update leaves alone is copied out once.
        self._offloadable_weights = [
            OffloadedTensors(self._frozen, device, Retention.FROZEN, keep_on_device=keep),
            *(OffloadedTensors(t, device, keep_on_device=keep) for t in trained),
        ]
        if self.optimizer is not None:
            self._offloadable_gradients = [
                OffloadedTensors(self._gradients, device, Retention.SCRATCH, keep_on_device=keep)
            ]

    @property
    def offloadable(self) -> list[OffloadedTensors]:
        """All tensors of the model that can be offloaded."""
        state = [] if self.optimizer is None else [self.optimizer.state]
        return [*self._offloadable_weights, *self._offloadable_gradients, *state]

    @contextmanager
    def on_device(self, *, training: bool = False) -> Iterator[Model]:
        """Inside, the weights are on the device; with `training` the gradient buffers are too."""
        with ExitStack() as stack:
            if self.base is not None:
                stack.enter_context(self.base.on_device())
            gradients = self._offloadable_gradients if training else []
            for tensors in (*self._offloadable_weights, *gradients):
                stack.enter_context(tensors.on_device())
            yield self

    def parameters(self) -> list[Tensor]:
        """The parameters of this rank, trained and frozen ones."""
        return [p for chunk in self.chunks for p in chunk.parameters()]

    def _trained(self) -> list[Tensor]:
        return [p for p in self.parameters() if p.requires_grad]

    def _frozen(self) -> list[Tensor]:
        if self.base is not None:
            return []
        trains = self.optimizer is not None
        return [p for p in self.parameters() if not (trains and p.requires_grad)]

    def _gradients(self) -> list[Tensor]:
        wrapped: list[Any] = self.modules
        return [
            buffer.grad_data
            for ddp in wrapped
            for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)
        ]


class SwappedIn:
    """Weights in host memory (pinned on CUDA) that are swapped into the policy for a pass.

    They need no device memory besides the policy's.

    Args:
        own: the policy's tensors that they replace.
    """

    def __init__(self, policy: Model, own: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self._policy = policy
        self._own = own
        self._weights = weights
        # The policy's own weights during a swap; allocated at the first swap.
        self._aside: list[Tensor] = []

    @contextmanager
    def on_device(self) -> Iterator[Model]:
        """Inside, the policy's modules have these weights; afterwards their own, bit for bit.

        Weights are copied into existing storage, of which gradient and optimizer buffers are views.
        """
        with self._policy.on_device():
            if not self._aside:
                self._aside = [torch.empty_like(w, pin_memory=w.is_pinned()) for w in self._weights]
            copy_weights(self._own, self._aside)
            copy_weights(self._weights, self._own)
            try:
                yield self._policy
            finally:
                copy_weights(self._aside, self._own)


Frozen = Model | SwappedIn  # a model for passes without gradients


@torch.no_grad()
def copy_weights(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    """Copy tensor by tensor into existing storage."""
    for given, own in zip(source, target):
        own.copy_(given)


def weights_of(chunks: Sequence[nn.Module]) -> list[Tensor]:
    """Return the weights of a model's chunks, as `named_weights` orders them."""
    return [weight for chunk in chunks for _, weight in named_weights(chunk)]


# (micro-batch, the head's result for all its targets) -> weighted sum.
Loss = Callable[[MicroBatch, Any], Tensor]


def score_pass(
    model: Model,
    micro_batches: Sequence[MicroBatch],
    head: HeadOptions,
    *,
    routing: Routing = own_routing,
) -> list[Any]:
    """Run the model without gradients. Collective.

    Args:
        routing: `own_routing`; `recording`, for a later `training_pass`; or `replaying`.

    Returns:
        The output of the last stage for each micro-batch; an empty list on other stages.
    """

    def forward_step(
        data: Iterator[MicroBatch], module: nn.Module
    ) -> tuple[Any, Callable[..., Any]]:
        micro = next(data)
        with routing(_chunk(model, module), micro):
            output = _forward(model, module, micro, head)
        # With experts Megatron reads the device of the model's output, for which one tensor is
        # enough.
        first = output[0] if isinstance(output, tuple) else output
        return first, lambda _, non_loss_data: whole(micro, output)

    whole = _over_context(model)
    trained = [module for module in model.modules if module.training]
    for module in trained:
        module.eval()
    try:
        with torch.no_grad():
            return _run(model, forward_step, micro_batches, forward_only=True)
    finally:
        for module in trained:
            module.train()


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
            # Megatron divides by the tokens of the step again. The empty sum of a micro-batch
            # without tokens stays in the graph.
            total = loss(micro, whole(micro, output)) * step_tokens
            return total, torch.tensor(micro.num_tokens, dtype=torch.int, device=total.device), {}

        with replaying(_chunk(model, module), micro):
            return _forward(model, module, micro, head), scheduled

    for module in model.modules:
        module.zero_grad_buffer()  # type: ignore[operator]
    model.optimizer.zero_grad()
    clear_losses(model.chunks)
    start_step(model.chunks)
    with prediction_pass(model.chunks) if model.arch.mtp else nullcontext():
        _run(model, forward_step, micro_batches, forward_only=False)
    return model.optimizer.step()


def _forward(model: Model, module: nn.Module, micro: MicroBatch, head: HeadOptions) -> Any:
    # Rotary embeddings ignore position ids, and attention needs no mask.
    return module(
        micro.input_ids,
        None,
        None,
        labels=Targets(micro, head),
        packed_seq_params=micro.packed,
        padding_mask=padding_mask(micro.padding, model.config, _chunk(model, module)),
    )


def _chunk(model: Model, module: nn.Module) -> GPTModel:
    return model.chunks[model.modules.index(module)]


def _over_context(model: Model) -> Callable[[MicroBatch, Any], Any]:
    """Return a function that gathers the head's results of a micro-batch from all CP ranks."""
    group = model.chunks[0].pg_collection.cp

    def whole(micro: MicroBatch, output: Any) -> Any:
        predicted: tuple[Tensor, ...] = ()
        # Log-probs, entropies, and log-probs of multi-token prediction.
        if isinstance(output, tuple) and len(output) == 3:
            predicted = (gather_predicted(output[2], micro, group),)
            output = output[:2]
        gathered = gather_targets(output, micro.target_own, micro.num_trainable, group)
        return (*gathered, *predicted) if predicted else gathered

    return whole


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
        # Pipeline stages need micro-batches of the same length. Megatron divides the length by CP.
        seq_length=micro_batches[0].num_slots * model.config.context_parallel_size,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    # Without this a later stage would keep the last hidden states that it received.
    for chunk in model.chunks:
        chunk.set_input_tensor([None])
    return outputs


# --- losses ---------------------------------------------------------------------------------------


def policy_loss(
    objective: Callable[[PolicyLossInputs], PolicyLoss],
    batch: LocalBatch,
    minibatch: int,
    moments: Moments,
) -> Loss:
    """The policy's loss of a micro-batch: `sum(weights * objective)`.

    With a layer for multi-token prediction its cross-entropy is added, with the same weights and
    the batch's `mtp_coef`. Without assigned `old_logprobs` the step is on-policy and uses its own
    log-probs, detached.
    """
    stats = batch.batch_stats(minibatch)
    batch.updates.begin(minibatch)

    def loss(micro: MicroBatch, output: Any) -> Tensor:
        logprobs, entropy, *predicted = output
        given = {
            name: batch.vectors[name][micro.rows] for name in _PER_TOKEN if name in batch.vectors
        }
        if "sequence_ids" in batch.vectors:
            given["sequence_ids"] = batch.vectors["sequence_ids"][micro.sequences]
        old = batch.vectors.get("old_logprobs")
        inputs = PolicyLossInputs(
            cu_seqlens=micro.cu_seqlens,
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if old is None else old[micro.rows],
            advantages=batch.vector("advantages")[micro.rows],
            entropy=entropy,
            weights=batch.vector("weights")[micro.rows],
            batch_stats=stats,
            **given,
        )
        result = objective(inputs)
        assert inputs.weights is not None
        batch.updates.add_logprobs(logprobs)
        if old is not None:
            batch.updates.add(minibatch, inputs, result)
        moments.add_objective(result, inputs.weights)
        total = (inputs.weights * result.per_token).sum()
        for predicted_logprobs in predicted:
            assert micro.next is not None
            moments.add("mtp_loss", -predicted_logprobs[micro.next.predicted])
            total = total - batch.mtp_coef * (inputs.weights * predicted_logprobs).sum()
        return total

    return loss


def step_distance(
    model: Model, batch: LocalBatch, head: HeadOptions, parallel: ParallelState
) -> Moments:
    """Measure how far the updates of a batch moved the policy, as `step_kl`. Collective.

    A forward pass over a few sequences of one micro-batch of each replica gives the log-probs after
    the updates. The first update recorded the log-probs from before, with the same experts under
    routing replay. If no update changed the weights, the distance is 0 without a pass.
    """
    moments = Moments()
    record = batch.updates
    if record.first is None:
        return moments
    micro_batches = batch.micro_batches(record.first)
    # The interleaved schedule needs a multiple of the number of stages.
    size = parallel.pp_size if parallel.vpp_size > 1 else 1
    start = max(
        range(0, len(micro_batches), size),
        key=lambda k: sum(micro.num_trainable for micro in micro_batches[k : k + size]),
    )
    chosen = micro_batches[start : start + size]
    parts = chosen
    # Experts that a pass of ours has recorded are those of a whole micro-batch. A stage may have no
    # experts, so what it holds does not say whether there are records; the model does.
    if batch.batch.routed_experts is not None or not model.arch.num_experts:
        total = sum(micro.num_trainable for micro in micro_batches)
        parts = batch.excerpts(chosen, max(MEASURED_TOKENS, int(MEASURED_SHARE * total)))
    before = []
    for whole, part, logprobs in zip(chosen, parts, record.logprobs_before[start : start + size]):
        offset = part.rows.start - whole.rows.start
        before.append(logprobs[offset : offset + part.num_trainable])
    after = before
    if record.moved:
        head = replace(head, entropy=False)
        outputs = score_pass(model, parts, head, routing=replaying)
        after = [output[0] for output in outputs]
    for new, old in zip(after, before):
        moments.add("step_kl", approx_kl(new, old, "k2"))
    return shared_moments(moments, parallel)


def critic_loss(config: CriticConfig, batch: LocalBatch, moments: Moments) -> Loss:
    """The critic's loss of a micro-batch: `value_loss_coef * sum(weights * value_loss)`.

    The metric does not include the coefficient.
    """

    def loss(micro: MicroBatch, output: Any) -> Tensor:
        returns = batch.vector("returns")[micro.rows]
        weights = batch.vector("weights")[micro.rows]
        old = batch.vectors["values"][micro.rows] if "values" in batch.vectors else None
        per_token = value_loss(output, old, returns, config.value_clip)
        moments.add_value_loss(
            per_token, weights, value_clipped(output, old, returns, config.value_clip)
        )
        return config.value_loss_coef * (weights * per_token).sum()

    return loss


def shared_moments(moments: Moments, parallel: ParallelState) -> Moments:
    """Merge the moments of all replicas and send them to every pipeline stage. Collective.

    Replicas may have different names, as a loss may report a metric for only some micro-batches.
    """
    names = moments.names
    if parallel.is_last_stage and parallel.dp_size > 1:
        names = union_of_names(names, parallel.dp_group, moments.pack([])[0].device)
        sums, maxima = moments.pack(names)
        dist.all_reduce(sums, group=parallel.dp_group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=parallel.dp_group)
        moments = Moments.unpack(names, sums, maxima)
    if parallel.pp_size > 1:
        packed = [names, *(x.tolist() for x in moments.pack(names))]
        names, sums, maxima = broadcast_json(
            packed, parallel.score_sources[parallel.dp_rank], parallel.replica_group
        )
        wide = (torch.tensor(x, dtype=torch.float64) for x in (sums, maxima))
        moments = Moments.unpack(names, *wide)
    return moments
