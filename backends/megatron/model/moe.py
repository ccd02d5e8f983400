"""Mixtures of experts on Megatron: routers with correct losses under padding, CP and SP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from backends.megatron.convert.architecture import Architecture
from rlcore.config.sections.policy import ParallelConfig


def moe_fields(arch: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    """The TransformerConfig fields of experts that the architecture does not set.

    A dense model has none. The routers' losses are off by default; the coefficients of pre-training
    in `config.json` are ignored.
    """
    if not arch.num_experts:
        return {}
    return {
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
    }


# Attributes in which Megatron's dispatcher keeps tensors of the last tokens.
_OF_TOKENS = ("probs", "routing_map", "reversed_local_input_permutation_mapping")


class PackRouter(TopKRouter):
    """Megatron's top-k router with its own sums of the two losses.

    The loss of a micro-batch is the mean over its n tokens, without pads, and counts n times among
    the N tokens of the optimizer step (Megatron divides by N later). Each of the ranks that share a
    micro-batch (context parallelism, and tensor parallelism under sequence parallelism) adds the
    part of its tokens. Megatron's own parts are too small by the number of those ranks, and NaN for
    a micro-batch of only pads.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Loss -> sum of its parts, each n times, since the last `clear_losses`.
        self.sums: dict[str, Tensor] = {}

    def gating(self, input: Tensor) -> Tensor:
        """Compute the logits in `moe_router_dtype`, or in the dtype of the input.

        Megatron's own function needs Transformer Engine to be installed.
        """
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(
            self.config.moe_router_dtype, input.dtype
        )
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias)

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Attach E * sum of (share of choices) * (mean probability), Fedus et al. 2021."""
        # [E], summed over the ranks that share the micro-batch.
        chosen = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), self.tp_cp_group)
        share = chosen / chosen.sum().clamp(min=1)
        part = self.num_experts * (scores_for_aux_loss.sum(dim=0) * share).sum()
        return self._attach(probs, "aux", part, self.get_aux_loss_coeff("aux_loss"))

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the mean of the squared log of the softmax's denominator, Zoph et al. 2022."""
        coeff = self.config.moe_z_loss_coeff
        if not coeff or not self.training or not torch.is_grad_enabled():
            return logits
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask, 0.0)
        return self._attach(logits, "z", squares.sum(), coeff)

    def _attach(self, activation: Tensor, name: str, part: Tensor, coeff: float) -> Tensor:
        self.sums[name] = self.sums.get(name, 0.0) + part.detach().double()
        attached: Tensor = MoEAuxLossAutoScaler.apply(activation, coeff * part)
        return attached


class SigmoidRouter(PackRouter):
    """The router of DeepSeek-V3: sigmoid scores, a bias that corrects the choice, expert groups.

    `expert_bias` [experts] is always in fp32. It is loaded with the weights; no step changes it.

    Megatron has such a router too. It scores a group by its best `topk // groups` experts, although
    the model was trained with the best two, always normalises the chosen scores, and its count of
    tokens for updates of the bias fails with a padding mask.
    """

    expert_bias: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Megatron sets it to None.
        del self.expert_bias
        device = torch.cuda.current_device()
        self.register_buffer(
            "expert_bias", torch.zeros(self.num_experts, dtype=torch.float32, device=device)
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        # Restore fp32: a change of dtype would change the choice.
        self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route by logits [T, 1, experts].

        Returns the weights of the experts (0 if not chosen) and the choice, both [T, experts].
        """
        logits = logits.view(-1, self.num_experts)
        hidden = None if padding_mask is None else padding_mask.reshape(-1)
        logits = self.apply_z_loss(logits, padding_mask=hidden)
        scores = logits.float().sigmoid()
        biased = scores.detach() + self.expert_bias
        if self.router_replay is None:
            chosen = self._best(biased, self.topk)[1]
        else:
            replayed = self.router_replay.get_replay_topk
            chosen = replayed(biased, self.topk, default_compute_topk=self._best)[1]
        weights = scores.gather(1, chosen)
        if not self.config.moe_router_pre_softmax:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        weights = weights * self.config.moe_router_topk_scaling_factor
        probs = torch.zeros_like(scores).scatter(1, chosen, weights)
        chosen_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            seen = torch.ones_like(chosen_map[:, :1]) if hidden is None else ~hidden[:, None]
            balanced = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
            probs = self._apply_aux_loss(probs, balanced * seen, chosen_map & seen)
        return probs, chosen_map

    def _best(self, biased: Tensor, topk: int, **groups: Any) -> tuple[Tensor, Tensor]:
        """The best experts of the best groups; a group is scored by its two best experts."""
        count = self.config.moe_router_num_groups
        keep = self.config.moe_router_group_topk
        by_group = biased.view(len(biased), count, -1)
        best_groups = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(keep, dim=-1).indices
        left_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(
            1, best_groups, False
        )
        best = (
            by_group.masked_fill(left_out[..., None], float("-inf")).flatten(1).topk(topk, dim=-1)
        )
        return best.values, best.indices


def router_class(config: TransformerConfig) -> type[PackRouter]:
    """The router class of a model with experts, for either kind of layers."""
    return SigmoidRouter if config.moe_router_score_function == "sigmoid" else PackRouter


class GraphFreeMoELayer(MoELayer):
    """Megatron's layer of experts, with a dispatcher that keeps no graph after a forward pass.

    Megatron's dispatchers keep the probabilities only for their dtype. In a recomputed layer their
    graph holds the layer's input and its gradient until the layer runs again.
    """

    def combine(self, output: Tensor) -> Tensor:
        """Return the experts' outputs to the ranks of their tokens."""
        for name in ("probs", "local_probs"):
            kept = getattr(self.token_dispatcher, name, None)
            if kept is not None:
                setattr(self.token_dispatcher, name, kept.detach())
        combined: Tensor = super().combine(output)
        return combined


def forget_tokens(chunk: GPTModel) -> None:
    """Drop the tensors that a chunk's dispatchers keep of the last tokens, between passes.

    Each layer keeps tokens times experts elements, which the next forward pass makes again.
    """
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            for name in _OF_TOKENS:
                if getattr(module.token_dispatcher, name, None) is not None:
                    setattr(module.token_dispatcher, name, None)


def keep_no_graphs(chunk: GPTModel) -> None:
    """Turn a chunk's layers of experts into `GraphFreeMoELayer`.

    Layer specifications cannot name this class, since Megatron compares the class by identity.
    """
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            module.__class__ = GraphFreeMoELayer


def padding_mask(padding: Tensor, config: TransformerConfig, chunk: GPTModel) -> Tensor | None:
    """The mask that hides pads from the routers of a chunk: bool [1, T], True at a pad.

    None for a dense model. Under sequence parallelism Megatron splits the mask over the
    tensor-parallel ranks on the first stage only.
    """
    if config.num_moe_experts is None:
        return None
    if chunk.pre_process or not config.sequence_parallel:
        return padding
    tp = chunk.pg_collection.tp
    return padding.chunk(tp.size(), dim=1)[tp.rank()].contiguous()


def clear_losses(chunks: Sequence[GPTModel]) -> None:
    """Reset the sums of the losses, before an optimizer step."""
    for router in _routers(chunks):
        router.sums.clear()


def mean_losses(
    chunks: Sequence[GPTModel], arch: Architecture, step_tokens: int
) -> dict[str, float]:
    """The metrics `moe_aux_loss` and `moe_z_loss`, if they are switched on.

    They are means over the optimizer step's tokens and over the layers with experts, without
    coefficients, and the same on every rank. Collective over all ranks.
    """
    config = chunks[0].config
    coefficients = (
        {"aux": config.moe_aux_loss_coeff, "z": config.moe_z_loss_coeff} if arch.num_experts else {}
    )
    names = [name for name, coeff in coefficients.items() if coeff]
    if not names:
        return {}
    sums = torch.zeros(len(names), dtype=torch.float64, device=next(chunks[0].parameters()).device)
    for router in _routers(chunks):
        sums += torch.stack([router.sums.get(name, sums.new_zeros(())) for name in names])
    if dist.is_initialized():
        # Sum over layers on all stages, and tokens over data, context and sequence parallelism.
        dist.all_reduce(sums)
    layers = sum(arch.moe_layers) + (arch.mtp and arch.moe_layers[-1])
    means = sums / max(step_tokens, 1) / layers
    return {f"moe_{name}_loss": mean for name, mean in zip(names, means.tolist())}


def _routers(chunks: Sequence[GPTModel]) -> Iterator[PackRouter]:
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, PackRouter))
