"""Times group estimators on 16384 sequences, beside one sort of their group ids."""

from __future__ import annotations

from types import ModuleType

import torch
from estimators import batch as batches
from estimators.loops import pad, unpad
from estimators.race import Entry, Goal, Row, Section, agreement, race, ratio

from rlcore.algorithms import EstimatorInputs, build_estimator

SEQUENCES = 16384
GROUP = 8
NAMES = ("grpo", "dr_grpo", "rloo", "opo", "max_rl", "gpg")
LARGE = 4_194_304
SORT = "torch.sort of the group ids"
COPY = "memory copy of the advantages"


def measure(device: torch.device, verl: dict[str, ModuleType]) -> Section:
    rows: list[Row] = []
    goals: list[Goal] = []
    order = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(0)).to(device)
    for tokens in (SEQUENCES, LARGE):
        ones = torch.ones(SEQUENCES, dtype=torch.int64)
        lengths = ones if tokens == SEQUENCES else batches.lengths_in_total(SEQUENCES, tokens)
        batch = batches.make(lengths, device, group_size=GROUP)
        for kind, group_ids in (
            ("in order", batch.group_ids),
            ("shuffled", batch.group_ids[order]),
        ):
            case = f"{batch.tokens:,} tokens, groups {kind}"
            found = race(case, _entries(batch, group_ids, verl, padded=tokens == SEQUENCES), device)
            rows += found.values()
            if tokens == SEQUENCES:
                goals += [
                    Goal(f"groups {kind}: {name} / sort", ratio(found, f"rlcore {name}", SORT), 4.0)
                    for name in NAMES
                ]
    note = (
        f"{SEQUENCES} sequences in groups of {GROUP}: of one token each, where all the work is on"
        f" groups; and of {LARGE:,} tokens, where most of it is writing the advantage of each."
        " Guard included. The goal is on the first."
    )
    return Section("groups", note, tuple(rows), tuple(goals))


def _entries(
    batch: batches.Batch, group_ids: torch.Tensor, verl: dict[str, ModuleType], *, padded: bool
) -> list[Entry]:
    inputs = EstimatorInputs(
        cu_seqlens=batch.cu_seqlens, rewards=batch.rewards, group_ids=group_ids
    )
    out = torch.empty_like(batch.values)
    entries = [
        Entry(SORT, lambda: torch.sort(group_ids)),
        Entry(COPY, lambda: out.copy_(batch.values)),
    ]
    for name in NAMES:
        estimator = build_estimator(name)
        entries.append(Entry(f"rlcore {name}", lambda estimator=estimator: estimator(inputs)))  # type: ignore[misc]
    if verl and padded:
        entries += _verl_entries(
            batch, group_ids, build_estimator("grpo")(inputs).advantages, verl["core_algos"]
        )
    return entries


def _verl_entries(
    batch: batches.Batch, group_ids: torch.Tensor, ours: torch.Tensor, core: ModuleType
) -> list[Entry]:
    mask = pad(torch.ones_like(batch.values), batch.cu_seqlens)
    scores = torch.zeros_like(mask)
    scores[torch.arange(batch.sequences), batch.lengths - 1] = batch.rewards
    index = group_ids.cpu().numpy()
    entries = []
    for name in ("compute_grpo_outcome_advantage", "compute_grpo_vectorized_outcome_advantage"):

        def theirs(function: object = getattr(core, name)) -> torch.Tensor:
            advantages: torch.Tensor = function(scores, mask, index)[0]  # type: ignore[operator]
            return advantages

        entries.append(Entry(f"verl {name}", theirs, agreement(ours, unpad(theirs(), mask))))
    return entries
