"""Ranks of test_fp32_head.py: a step in which the head is computed again in float64.

The oracle takes the bf16 hidden states and weights that the head got, those of all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import TEMPERATURE, make_batch, make_config, make_plan, make_vectors
from rank_main import build_backend, main
from torch import Tensor

from backends.megatron.model import head as head_module

Errors = dict[str, float]


def gathered(shard: Tensor, tp: Any) -> Tensor:
    """The shards of all ranks, one below the other."""
    parts = [torch.empty_like(shard) for _ in range(tp.size())]
    dist.all_gather(parts, shard.contiguous(), group=tp)
    return torch.cat(parts)


def compare(hidden: Tensor, weight: Tensor, tokens: Tensor, given: dict[str, Any]) -> Errors:
    """Run the head on leaves of its own, both passes, and return its distances from float64."""
    tp = given["tp"]
    own = [t.detach().clone().requires_grad_(t.requires_grad) for t in (hidden, weight)]
    got = fused_logprobs(*own, tokens, **given)
    rows = hidden.detach().double().requires_grad_()
    whole = gathered(weight.detach(), tp).double().requires_grad_()
    log_p = (rows @ whole[: given["vocab_size"]].t() / TEMPERATURE).log_softmax(-1)
    want = (log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
    upstream = [torch.linspace(-1, 1, len(tokens)), torch.linspace(1, 2, len(tokens))]
    leaves = [t for t in own if t.requires_grad]
    got_gradients = torch.autograd.grad(got, leaves, upstream)
    want_gradients = torch.autograd.grad(want, (rows, whole), [u.double() for u in upstream])
    part = got_gradients[0].double()
    if tp.size() > 1:
        dist.all_reduce(part, group=tp)
    errors = {
        "logprobs": float((got[0] - want[0]).detach().abs().max()),
        "entropy": float((got[1] - want[1]).detach().abs().max()),
        "d_hidden": far(part, want_gradients[0]),
    }
    if weight.requires_grad:
        mine = want_gradients[1].chunk(tp.size())[tp.rank()]
        errors["d_weight"] = far(got_gradients[1], mine)
    return errors


def far(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


fused_logprobs = head_module.fused_logprobs


def run(case: dict[str, Any], folder: Path) -> None:
    config = make_config(case, folder.parent / "models")
    config.policy.logprobs.fp32_head = case["fp32_head"]
    found: list[Errors] = []

    def watched(hidden: Tensor, weight: Tensor, tokens: Tensor, **given: Any) -> Any:
        if torch.is_grad_enabled():
            found.append(compare(hidden, weight, tokens, given))
        return fused_logprobs(hidden, weight, tokens, **given)

    head_module.fused_logprobs = watched
    backend = build_backend(config)
    root = backend.rank == 0
    batch = make_batch() if root else None
    backend.load_batch(batch, [make_plan("one")] if root else None)
    scores = backend.score("policy", entropy=True)
    backend.assign(make_vectors(batch.num_trainable) if batch is not None else None)
    backend.update(0)
    backend.close()
    head_module.fused_logprobs = fused_logprobs
    everywhere: list[Any] = [found]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
    if root:
        errors = [one for rank in everywhere for one in rank]
        torch.save({"errors": errors, "scores": scores}, folder / f"{case['name']}.pt")


if __name__ == "__main__":
    main(run)
