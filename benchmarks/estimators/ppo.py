"""Times the `ppo` estimator beside the bare recurrence and loops over time."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from estimators import batch as batches
from estimators.loops import deltas, filter_sequences, pad, padded_gae, unpad
from estimators.race import Entry, Goal, Row, Section, agreement, race, ratio

from rlcore.algorithms import approx_kl, build_estimator, discounted_suffix_sum

SHAPES = ((64, 8192), (512, 8192), (64, 32768), (512, 32768))
GAMMA = 1.0
LAM = 0.95
KL_COEF = 0.05

OURS = "rlcore ppo"
SCAN = "rlcore discounted_suffix_sum"
COPY = "memory copy of one vector"
LFILTER = "scipy lfilter, fp32"
LFILTER64 = "scipy lfilter, fp64"
LOOP = "padded loop over time"
VERL = "verl compute_gae_advantage_return"


def measure(device: torch.device, verl: dict[str, ModuleType]) -> Section:
    rows: list[Row] = []
    goals: list[Goal] = []
    for sequences, longest in SHAPES:
        batch = batches.make(batches.lengths_up_to(sequences, longest), device)
        case = f"{sequences} x {longest}: {batch.tokens:,} tokens"
        found = race(case, _entries(batch, device, verl), device)
        rows += found.values()
        slowest = max(ratio(found, OURS, LFILTER), ratio(found, OURS, LFILTER64))
        goals.append(Goal(f"{sequences} x {longest}: ppo / the faster lfilter", slowest, 2.0))
        goals.append(
            Goal(
                f"{sequences} x {longest}: padded loop / ppo",
                ratio(found, LOOP, OURS),
                10.0,
                at_least=True,
            )
        )
    note = (
        "`build_estimator('ppo', gamma=1.0, lam=0.95, kl_coef=0.05)(inputs)`: guard, shaping,"
        " values, scan, returns. Lengths are log-normal (sigma 1), scaled so that the longest is"
        " the maximum. lfilter does the bare recurrence on ready deltas, a sequence at a time on"
        " one core; it is timed in the dtype of the batch, fp32, and in fp64, in which rlcore sums."
        " The padded loop gets its batch padded, and time first, for nothing. verl also whitens."
    )
    return Section("ppo", note, tuple(rows), tuple(goals))


def _entries(
    batch: batches.Batch, device: torch.device, verl: dict[str, ModuleType]
) -> list[Entry]:
    kl = approx_kl(batch.logprobs, batch.ref_logprobs, "k1")
    estimator = build_estimator("ppo", gamma=GAMMA, lam=LAM, kl_coef=KL_COEF)
    inputs = batch.inputs(values=batch.values, kl=kl)
    ours = estimator(inputs)
    assert ours.returns is not None

    borders = batch.cu_seqlens.tolist()
    delta = deltas(batch.values, kl, batch.rewards, batch.cu_seqlens, gamma=GAMMA, kl_coef=KL_COEF)
    delta32 = delta.astype(np.float32)
    on_device = torch.from_numpy(delta32).to(device)

    values = pad(batch.values, batch.cu_seqlens)
    penalty = pad(kl, batch.cu_seqlens)
    mask = pad(torch.ones_like(batch.values), batch.cu_seqlens)
    rewards = -KL_COEF * penalty
    rewards[torch.arange(batch.sequences), batch.lengths - 1] += batch.rewards
    by_time = [x.T.contiguous() for x in (rewards, values, mask)]
    looped = padded_gae(*by_time, gamma=GAMMA, lam=LAM)

    out = torch.empty_like(kl)
    filtered = [
        torch.from_numpy(filter_sequences(x, borders, LAM).copy()) for x in (delta32, delta)
    ]
    entries = [
        Entry(COPY, lambda: out.copy_(kl)),
        Entry(
            LFILTER,
            lambda: filter_sequences(delta32, borders, LAM),
            agreement(ours.advantages, filtered[0]),
        ),
        Entry(
            LFILTER64,
            lambda: filter_sequences(delta, borders, LAM),
            agreement(ours.advantages, filtered[1]),
        ),
        Entry(SCAN, lambda: discounted_suffix_sum(on_device, batch.cu_seqlens, LAM)),
        Entry(OURS, lambda: estimator(inputs)),
        Entry(
            LOOP,
            lambda: padded_gae(*by_time, gamma=GAMMA, lam=LAM),
            agreement(ours.advantages, unpad(looped[0].T, mask)),
        ),
    ]
    if verl:
        gae = verl["core_algos"].compute_gae_advantage_return

        def theirs() -> tuple[torch.Tensor, torch.Tensor]:
            result: tuple[torch.Tensor, torch.Tensor] = gae(rewards, values, mask, GAMMA, LAM)
            return result

        entries.append(
            Entry(VERL, theirs, "returns " + agreement(ours.returns, unpad(theirs()[1], mask)))
        )
    return entries
