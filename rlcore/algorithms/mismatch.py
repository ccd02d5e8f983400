"""The distance of the sampling engine from the scoring trainer, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.algorithms.kl import approx_kl, clamped_log_ratio


@torch.no_grad()
def mismatch_vectors(logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Return the vectors of `rollout/train_rollout_logprob_diff*` and `rollout/ess`, float64 `[M]`.

        engine_gap    |logprobs - rollout_logprobs|
        engine_kl     w - 1 - log w, the k3 estimate of KL(engine || trainer)
        engine_ratio  w = exp(logprobs - rollout_logprobs), the log-ratio clamped to +-20

    Args:
        logprobs: float `[M]`, the trainer's, of the policy before the step.
        rollout_logprobs: float `[M]`, the engine's. Where they are not finite the metrics are not,
            and should not be.
    """
    trainer = logprobs.double()
    engine = rollout_logprobs.double()
    return {
        "engine_gap": (trainer - engine).abs(),
        "engine_kl": approx_kl(engine, trainer, "k3"),
        "engine_ratio": clamped_log_ratio(trainer, engine).exp(),
    }
