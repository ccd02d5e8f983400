"""The batch, plans and configurations of the cases, the same in every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.config import Config
from rlcore.data.batch import RolloutBatch
from rlcore.data.packing.plan import MinibatchPlan

VOCAB = 31  # odd, so that TP 2 pads it
KL_COEF = 0.1
ENTROPY_COEF = 0.02
TEMPERATURE = 0.7
VALUE_CLIP = 0.3
VALUE_COEF = 0.5

# (tokens, trainable) of each sequence: unequal; 2 has no token at all, 3 and 6 have only a prompt,
# 7 a gap of tool output.
LENGTHS = [7, 12, 0, 5, 19, 9, 3, 40, 6]
TRAINABLE = [range(4, 7), range(1, 12), range(0), range(0), range(6, 19), range(8, 9), range(0),
             [*range(10, 17), *range(25, 40)], range(2, 6)]  # fmt: skip

# plan -> [data-parallel rank][micro-batch] = sequences
PLANS: dict[str, list[list[list[int]]]] = {
    "half0": [[[0, 4, 2], [3, 8]]],
    "half1": [[[1], [5, 6, 7]]],
    "dp2_half0": [[[0, 2]], [[4, 3, 8]]],
    "dp2_half1": [[[6]], [[1, 5, 7]]],
    "one": [[list(range(9))]],
    "alone": [[[k] for k in range(9)]],
    "uneven": [[[4, 0], [7], [2], [1, 3, 5, 6], [8]]],  # the third micro-batch has no token
    # an even number, for the interleaved schedule
    "pairs": [[[0, 1, 3], [7], [4, 5], [8, 2, 6]]],
    "dp2": [[[0, 4], [1, 8]], [[7, 2], [3, 5, 6]]],
    # the second rank has no trainable token
    "starved": [[[0, 1], [4, 5, 7], [8]], [[2, 3], [6], []]],
    "starved_1": [[[0, 1], [4, 5, 7], [8], [2, 3], [6], []]],  # the same micro-batches on one rank
    "dp4": [[[0, 4]], [[1, 8]], [[7, 2]], [[3, 5, 6]]],
}

# An optimizer step that is linear in the gradient, to read it off the weights: delta = lr * g /
# (|g| + eps) = 1000 g.
LINEAR: dict[str, float] = {"lr": 1e6, "eps": 1e3, "weight_decay": 0.0, "clip_grad": 0.0}

# An ordinary one, with everything switched on.
TRAINED: dict[str, Any] = {
    "lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1, "clip_grad": 1.0, "warmup_steps": 2,
    "schedule": "cosine", "min_lr": 1e-4,
    "decay_steps": 6,
}  # fmt: skip


# Objectives that know more than their micro-batch; far from the engine's log-probs, so that every
# part of them acts.
CLIP_COV: dict[str, Any] = {
    "loss": {"name": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 100.0},
    "old_logprobs": "rollout",
}  # fmt: skip
KL_COV: dict[str, Any] = {
    "loss": {"name": "kl_cov", "kl_cov_ratio": 0.2},
    "old_logprobs": "rollout",
}
CORRECTED: dict[str, Any] = {
    "loss": {"name": "ppo_clip", "aggregation": "seq-mean-token-mean", "per_rollout": True},
    "kl": {"loss_coef": KL_COEF, "loss_kind": "k3", "loss_unbiased": True},
    "correction": {"name": "mis", "level": "geometric", "lower": 0.5, "upper": 2.0},
    "normalize_advantages": "group",
}


def gradient(before: Tensor, after: Tensor) -> Tensor:
    """The gradient of the first AdamW step under LINEAR."""
    delta = before.double() - after.double()
    return LINEAR["eps"] * delta / (LINEAR["lr"] - delta.abs())


def make_batch() -> RolloutBatch:
    generator = torch.Generator().manual_seed(5)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask = torch.zeros(int(cu[-1]), dtype=torch.bool)
    for start, positions in zip(cu.tolist(), TRAINABLE):
        mask[[start + p for p in positions]] = True
    tokens = torch.randint(0, VOCAB, (int(cu[-1]),), generator=generator, dtype=torch.int32)
    share_beginnings(list(tokens.split(LENGTHS)))
    count = int(mask.sum())
    vectors = {
        "rollout_logprobs": torch.randn(count, generator=generator) * 0.1 - 3.4,
        "versions": torch.arange(count),
        # segments of a rollout share their reward
        "rewards": torch.randn(len(LENGTHS), generator=generator)[[0, 1, 2, 3, 0, 1, 6, 7, 8]],
        "group_ids": torch.tensor([5, 3, 5, 3, 5, 3, 3, 5, 3]),
        "rollout_ids": torch.tensor([0, 1, 2, 3, 0, 1, 4, 5, 6]),
        "sequence_ids": torch.arange(len(LENGTHS)) * 7 + 100,
    }
    return RolloutBatch(tokens, cu, mask, vectors)


def share_beginnings(sequences: list[Tensor]) -> None:
    """Let sequences begin alike, as those of groups and of trees do.

    One is the beginning of another, one begins with tokens that are trainable in the other alone,
    and some share nothing where a plan puts them into other micro-batches.
    """
    for sequence, other, size in (
        (4, 7, 6), (0, 4, 4), (1, 7, 3), (5, 1, 8), (3, 1, 5), (6, 5, 3), (8, 0, 2),
    ):  # fmt: skip
        sequences[sequence][:size] = sequences[other][:size]


def relative(got: Tensor, expected: Tensor) -> float:
    """The error by the norm; where that is 0, as of an expert without tokens, the error itself."""
    error = float((got.double() - expected.double()).norm())
    return error / (float(expected.double().norm()) or 1.0)


def make_vectors(count: int) -> dict[str, Tensor]:
    """The vectors [M] that rank 0 assigns."""
    generator = torch.Generator().manual_seed(6)

    def normal(scale: float, mean: float = 0.0) -> Tensor:
        return torch.randn(count, generator=generator) * scale + mean

    return {
        "advantages": normal(1.0),
        "weights": torch.rand(count, generator=generator) / count,
        "old_logprobs": normal(1.0, -3.4),
        "ref_logprobs": normal(0.5, -3.4),
        "values": normal(0.3),
        "returns": normal(1.0),
    }


def plan_of(ranks: list[list[list[int]]]) -> MinibatchPlan:
    return MinibatchPlan(tuple(tuple(tuple(micro) for micro in rank) for rank in ranks))


def make_plan(name: str) -> MinibatchPlan:
    return plan_of(PLANS[name])


def make_config(case: dict[str, Any], model: Path) -> Config:
    optimizer = {
        **LINEAR,
        "distributed": case.get("distributed", False),
        **case.get("optimizer", {}),
    }
    lora = case.get("lora")
    if lora is not None and "path" in lora:
        lora = {**lora, "path": str(model / lora["path"])}
    return Config.model_validate(
        {
            "run": {"name": "parity", "seed": 3},
            "data": {"paths": ["unused"]},
            "training": {"steps": 1},
            "model": {
                "path": str(model / case["model"]),
                "dtype": case.get("dtype", "fp32"),
                "vocab_divisible_by": case.get("divisible_by", 1),
            },
            "policy": {
                "parallel": case.get("parallel", {}),
                "optimizer": optimizer,
                "lora": lora,
                "mtp_coef": case.get("mtp_coef", 0.0),
                "megatron": case.get("megatron", {}),
                "share_prefixes": case.get("share", "auto"),
                "logprobs": {"chunk_elements": case.get("chunk_elements", 1 << 22)},
            },
            "reference": {
                "path": str(model / case["reference"]) if "reference" in case else None,
                "offload": case.get("offload", False),
            },
            "critic": {
                "optimizer": optimizer,
                "value_clip": VALUE_CLIP,
                "value_loss_coef": VALUE_COEF,
            },
            "algorithm": {
                "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3},
                "kl": {"loss_coef": KL_COEF, "loss_kind": "k3"},
                "entropy_coef": ENTROPY_COEF,
                **case.get("algorithm", {}),
            },
            "rollout": {"sampling": {"temperature": TEMPERATURE}},
            "cluster": {"collective_timeout_s": 60},
        }
    )
