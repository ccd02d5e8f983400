"""Times the work between log-probs and optimizer, on a step of 4 million tokens."""

from __future__ import annotations

from types import ModuleType

import torch
from estimators import batch as batches
from estimators.loops import deltas, filter_sequences
from estimators.ppo import COPY, GAMMA, KL_COEF, LAM, LFILTER
from estimators.race import Entry, Goal, Section, agreement, race, ratio

from rlcore.algorithms import (
    approx_kl,
    build_estimator,
    loss_weights,
    normalize_advantages,
    rollout_metrics,
    whiten,
)

SEQUENCES = 1024
TOKENS = 4_000_000
ALL = "rlcore, all of it"
WHITEN = "rlcore whiten"
WEIGHTS = "rlcore loss_weights"
METRICS = "rlcore rollout_metrics"
KL = "rlcore approx_kl"
PPO = "rlcore ppo"


def measure(device: torch.device, verl: dict[str, ModuleType]) -> Section:
    batch = batches.make(batches.lengths_in_total(SEQUENCES, TOKENS), device)
    found = race(f"{SEQUENCES} sequences: {batch.tokens:,} tokens", _entries(batch, verl), device)
    goals = (Goal("post-processing / lfilter fp32", ratio(found, ALL, LFILTER), 10.0),)
    note = (
        "approx_kl (k1), `ppo`, normalize_advantages, loss_weights and rollout_metrics of a step"
        " with values, log-probs of policy, reference and engine, entropy and versions."
    )
    return Section("post-processing", note, tuple(found.values()), goals)


def _entries(batch: batches.Batch, verl: dict[str, ModuleType]) -> list[Entry]:
    estimator = build_estimator("ppo", gamma=GAMMA, lam=LAM, kl_coef=KL_COEF)
    kl = approx_kl(batch.logprobs, batch.ref_logprobs, "k1")
    inputs = batch.inputs(
        values=batch.values, kl=kl, logprobs=batch.logprobs, ref_logprobs=batch.ref_logprobs,
        rollout_logprobs=batch.rollout_logprobs, versions=batch.versions,
    )  # fmt: skip
    result = estimator(inputs)
    reasons = ["stop"] * batch.sequences
    out = torch.empty_like(kl)
    borders = batch.cu_seqlens.tolist()
    delta = deltas(
        batch.values, kl, batch.rewards, batch.cu_seqlens, gamma=GAMMA, kl_coef=KL_COEF
    ).astype("float32")

    def metrics(returns: torch.Tensor | None) -> dict[str, float]:
        return rollout_metrics(
            inputs,
            finish_reasons=reasons,
            entropy=batch.entropy,
            returns=returns,
            reward_coef=KL_COEF,
            version=1,
        )

    def everything() -> None:
        approx_kl(batch.logprobs, batch.ref_logprobs, "k1")
        found = estimator(inputs)
        normalize_advantages(found.advantages, batch.cu_seqlens, batch.group_ids, "batch")
        loss_weights("token-mean", batch.cu_seqlens)
        metrics(found.returns)

    filtered = torch.from_numpy(filter_sequences(delta, borders, LAM).copy())
    entries = [
        Entry(COPY, lambda: out.copy_(kl)),
        Entry(
            LFILTER,
            lambda: filter_sequences(delta, borders, LAM),
            agreement(result.advantages, filtered),
        ),
        Entry(ALL, everything),
        Entry(KL, lambda: approx_kl(batch.logprobs, batch.ref_logprobs, "k1")),
        Entry(PPO, lambda: estimator(inputs)),
        Entry(WHITEN, lambda: whiten(result.advantages)),
        Entry(WEIGHTS, lambda: loss_weights("token-mean", batch.cu_seqlens)),
        Entry(METRICS, lambda: metrics(result.returns)),
    ]
    if verl:
        masked_whiten = verl["torch_functional"].masked_whiten
        mask = torch.ones_like(kl)
        same = agreement(whiten(result.advantages), masked_whiten(result.advantages, mask))
        entries.append(
            Entry("verl masked_whiten", lambda: masked_whiten(result.advantages, mask), same)
        )
    return entries
