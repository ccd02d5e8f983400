"""Routing replay: training sends each token to the experts that an earlier pass chose for it.

Megatron's routers get the top-k from the object in their `router_replay`, here an `ExpertChoice`.
Megatron's own `RouterReplay` keeps the routers of all models of the process in one list, and must
know before every call whether it is a recomputation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from backends.megatron.batch.pack import MicroBatch
from backends.megatron.convert.architecture import Architecture
from rlcore.data.batch import RolloutBatch
from rlcore.errors import ConfigError, RunFailed

TopK = Callable[..., tuple[Tensor, Tensor]]


class ExpertChoice:
    """The top-k of one router: its own choice or a given one, with the current scores.

    Gradients flow through the scores.
    """

    def __init__(self, index: int = 0) -> None:
        # Index among the whole model's layers with experts.
        self.index = index
        # int16 [t, k]: the experts of the next forward; -1: the router's own choice.
        self.given: Tensor | None = None
        # Whether the backward may recompute a forward that ran without gradients.
        self.recomputed = True
        # int64 [t]: how often metrics count a token: 0 for a pad, more than 1 for a shared token.
        self.counts: Tensor | None = None
        # int64 [t, k]: the choice of the last forward without `given`.
        self.made: Tensor | None = None
        # Number of tokens for which the router's own choice differs from the given one.
        self.changed: Tensor | None = None
        # The given choices of forwards that the backward will recompute, oldest first.
        self.again: deque[Tensor] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """Choose from scores [t, experts]: (scores, experts), both [t, topk].

        The name and the arguments are Megatron's.
        """
        # A recomputed layer has gradients only when the backward recomputes it.
        if torch.is_grad_enabled() and self.again:
            given = self.again.popleft().long()
            return scores.gather(1, given), given
        if self.given is None:
            chosen, self.made = default_compute_topk(
                scores, topk, num_groups=num_groups, group_topk=group_topk
            )
            return chosen, self.made
        own = default_compute_topk(
            scores.detach(), topk, num_groups=num_groups, group_topk=group_topk
        )[1]
        given = torch.where((self.given < 0).any(dim=1, keepdim=True), own, self.given.long())
        if self.recomputed and not torch.is_grad_enabled():
            self.again.append(given.to(torch.int16))
        differs = (own.sort(dim=1).values != given.sort(dim=1).values).any(dim=1)
        if self.counts is not None:
            differs = differs * self.counts
        self.changed = differs.sum() + (0 if self.changed is None else self.changed)
        return scores.gather(1, given), given


def replay_routing(chunks: Sequence[GPTModel], arch: Architecture) -> None:
    """Make the routers of a model ready for `recording` and `replaying`.

    Raises ConfigError for fused routers, which choose inside a kernel.
    """
    for chunk in chunks:
        if chunk.config.moe_router_fusion:
            raise ConfigError(
                "policy.routing_replay: a fused router cannot replay experts; set it to none,"
                " or policy.megatron.moe_router_fusion to false"
            )
        for layer in chunk.decoder.layers:
            if hasattr(layer.mlp, "router"):
                layer.mlp.router.router_replay = ExpertChoice(
                    sum(arch.moe_layers[: layer.layer_number - 1])
                )


@contextmanager
def recording(chunk: GPTModel, micro: MicroBatch) -> Iterator[None]:
    """Inside, a forward stores its experts with the micro-batch.

    Only the first such forward of a micro-batch is stored.
    """
    yield
    for layer, choice in _choices(chunk):
        if layer not in micro.experts and choice.made is not None:
            micro.experts[layer] = choice.made.to(torch.int16)
        choice.made = None


@contextmanager
def replaying(chunk: GPTModel, micro: MicroBatch) -> Iterator[None]:
    """Inside, a forward and its recomputation use the experts stored with the micro-batch.

    The inference engine's records are used if there are any; the router chooses for a token without
    a record. Raises RuntimeError for a micro-batch without stored experts.
    """
    choices = list(_choices(chunk))
    for layer, choice in choices:
        if layer not in micro.experts and micro.routed_experts is not None:
            micro.experts[layer] = _own_share(micro.routed_experts, chunk)[:, choice.index]
        if layer not in micro.experts:
            raise RuntimeError(
                f"routing replay: layer {layer} has no recorded experts; call score('policy')"
                " before update"
            )
        choice.given = micro.experts[layer]
        choice.counts = _own_share(micro.counts[0], chunk)
        choice.recomputed = chunk.training
    try:
        yield
    finally:
        for _, choice in choices:
            choice.given = choice.counts = None


def check_records(batch: RolloutBatch, arch: Architecture) -> None:
    """Refuse a batch without the engine's records, or with records of a model of another shape.

    Raises RunFailed.
    """
    wanted = (sum(arch.moe_layers), arch.transformer["moe_router_topk"])
    records = batch.routed_experts
    experts = arch.transformer["num_moe_experts"]
    if records is None or tuple(records.shape[1:]) != wanted:
        got = "missing" if records is None else tuple(records.shape[1:])
        raise RunFailed(
            f"policy.routing_replay is engine, but the samples' routed_experts are {got}, expected"
            f" [tokens, {wanted[0]} layers with experts, {wanted[1]} experts a token]: set it to"
            " logprobs, or use another engine"
        )
    if records.numel() and int(records.max()) >= experts:
        raise RunFailed(
            "policy.routing_replay is engine, but the samples' routed_experts name expert"
            f" {int(records.max())} of a model of {experts}: set it to logprobs, or use an engine"
            " with this model"
        )


Routing = Callable[[GPTModel, MicroBatch], AbstractContextManager[None]]


def own_routing(chunk: GPTModel, micro: MicroBatch) -> AbstractContextManager[None]:
    """Inside, the routers choose the experts, as without replay."""
    return nullcontext()


def start_step(chunks: Sequence[GPTModel]) -> None:
    """Drop the counts of the last optimizer step, and choices kept for skipped recomputations."""
    for chunk in chunks:
        for _, choice in _choices(chunk):
            choice.changed = None
            choice.again.clear()


def changed_share(chunks: Sequence[GPTModel], arch: Architecture, step_tokens: int) -> float:
    """The share of routing decisions in which the router would have chosen other experts.

    A decision is a pair of a token and a layer with experts in the optimizer step. The share is the
    same on every rank. Collective over all ranks.
    """
    count = torch.zeros((), dtype=torch.float64, device=next(chunks[0].parameters()).device)
    for chunk in chunks:
        for _, choice in _choices(chunk):
            count += 0 if choice.changed is None else choice.changed
    # Sum over layers on all stages, and tokens over data, context and sequence parallelism.
    dist.all_reduce(count)
    return float(count) / max(step_tokens, 1) / sum(arch.moe_layers)


def _choices(chunk: GPTModel) -> Iterator[tuple[int, ExpertChoice]]:
    """Yield (layer number in the model, choice) for each layer with experts and replay."""
    for layer in chunk.decoder.layers:
        choice = getattr(getattr(layer.mlp, "router", None), "router_replay", None)
        if choice is not None:
            yield int(layer.layer_number), choice


def _own_share(slots: Tensor, chunk: GPTModel) -> Tensor:
    """The part of a tensor [T, ...] for this rank's routers: [T / TP, ...] under SP, or all."""
    if not chunk.config.sequence_parallel:
        return slots
    tp = chunk.pg_collection.tp
    return slots.chunk(tp.size())[tp.rank()]
