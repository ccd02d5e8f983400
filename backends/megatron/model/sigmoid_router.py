"""The router of DeepSeek-V3: sigmoid scores, a bias that corrects the choice, groups of experts.

Megatron has such a router too. It scores a group by its best `topk // groups` experts where the
model was trained with the best two, always normalises the chosen scores, and counts tokens for its
update of the bias in a way that fails where pads are hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from backends.megatron.model.moe import PackRouter


class SigmoidRouter(PackRouter):
    """A router with `expert_bias` [experts], in fp32 whatever the dtype of the model.

    The bias comes with the weights, and no step changes it.
    """

    expert_bias: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.expert_bias  # Megatron's, None
        device = torch.cuda.current_device()
        self.register_buffer(
            "expert_bias", torch.zeros(self.num_experts, dtype=torch.float32, device=device)
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        # a change of dtype would change the choice
        self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route by logits [T, 1, experts].

        Returns the weights of the experts, 0 where not chosen, and the choice: both [T, experts].
        """
        logits = logits.view(-1, self.num_experts)
        hidden = None if padding_mask is None else padding_mask.reshape(-1)
        logits = self.apply_z_loss(logits, padding_mask=hidden)
        scores = logits.float().sigmoid()
        chosen = self._choice(scores.detach())
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

    def _choice(self, scores: Tensor) -> Tensor:
        """The experts with the best biased scores, or the replayed experts: int64 [T, topk]."""
        biased = scores + self.expert_bias
        if self.router_replay is None:
            return self._best(biased, self.topk)[1]
        chosen: Tensor = self.router_replay.get_replay_topk(
            biased, self.topk, default_compute_topk=self._best
        )[1]
        return chosen

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
    """The router of a model with experts, whatever layers are around it."""
    return SigmoidRouter if config.moe_router_score_function == "sigmoid" else PackRouter
