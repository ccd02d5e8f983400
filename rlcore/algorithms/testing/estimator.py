"""The contract of an advantage estimator, rule by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rlcore.algorithms.guard import ESTIMATOR_OPTIONAL, GuardedEstimator
from rlcore.algorithms.registry import build_estimator, guard_estimator
from rlcore.algorithms.testing import shared
from rlcore.algorithms.testing.batches import (
    NEIGHBOURS,
    NO_TOKENS,
    Layout,
    cast,
    cut,
    estimator_batch,
    loners,
    peers,
    shuffled,
    take,
)
from rlcore.algorithms.testing.contract import ContractError, ContractReport, Rule
from rlcore.algorithms.testing.trial import DTYPES, READ_ONLY, Outputs, Subject, Trial, at, largest
from rlcore.algorithms.types import Advantages, EstimatorInputs

if TYPE_CHECKING:
    from torch import Tensor


def check_estimator(
    estimator: str | Callable[..., Any],
    *,
    seed: int = 0,
    uses_batch: bool = False,
    discounts: bool = False,
    random: bool = False,
    **keywords: Any,
) -> ContractReport:
    """Try an estimator against every rule that the framework, and its users, take for granted.

    Args:
        estimator: a registered name, an import path `package.module:Name`, a class, a function that
            builds one, an instance, or what `build_estimator` returned.
        seed: of the batches; the same seed gives the same verdict.
        uses_batch: the estimator means to look beyond the group of a sequence, as whitening does.
            Leaves out `group-split`.
        discounts: the estimator means to credit a token by its distance to the end. Leaves out
            `rollout-split`, as does a need of `values`.
        random: two calls may differ. Leaves out every rule that compares two calls.
        **keywords: of its constructor. One that is named like an argument here needs an instance
            instead.

    Returns:
        The rules that were checked, and those left out.

    Raises:
        ContractError: a rule is broken. The message names it, with the smallest batch found, what
            was expected, what came, and what to do.
        AlgorithmError: the estimator cannot be built from these keywords.
    """
    guarded = shared.put_behind_guard(
        estimator,
        keywords,
        called="estimator",
        guard_type=GuardedEstimator,
        build=build_estimator,
        guard=guard_estimator,
    )
    skipped = {}
    if random:
        skipped = {rule: "random=True" for rule in _RULES if rule not in _ONE_CALL}
    if uses_batch:
        skipped.setdefault(GROUP_SPLIT, "uses_batch=True")
    if discounts:
        skipped.setdefault(ROLLOUT_SPLIT, "discounts=True")
    elif "values" in guarded.needs:
        skipped.setdefault(ROLLOUT_SPLIT, "needs values: a segment ends what follows a token")
    return shared.check_rules(_Subject(guarded, seed), _RULES, skipped)


@dataclass(frozen=True)
class _Subject(Subject[EstimatorInputs]):
    guarded: GuardedEstimator
    optional = ESTIMATOR_OPTIONAL

    def full(self, layout: Layout, seed: int) -> EstimatorInputs:
        return estimator_batch(layout, seed)

    def extreme(self, batch: EstimatorInputs) -> dict[str, EstimatorInputs]:
        found = {
            "rewards 100 +- 0.1": replace(batch, rewards=100 + 0.1 * batch.rewards),
            "rewards 1e4 +- 1e-2": replace(batch, rewards=1e4 + 1e-2 * batch.rewards),
            "rewards +-1e6": replace(batch, rewards=1e6 * batch.rewards.sign()),
        }
        if (parts := batch.reward_parts) is not None:
            found |= {
                "reward parts 100 +- 0.1": replace(batch, reward_parts=100 + 0.1 * parts),
                "reward parts 1e4 +- 1e-2": replace(batch, reward_parts=1e4 + 1e-2 * parts),
                "reward parts +-1e6": replace(batch, reward_parts=1e6 * parts.sign()),
            }
        for name in ("logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs"):
            value: Tensor | None = getattr(batch, name)
            if value is not None:
                low: dict[str, Any] = {name: torch.full_like(value, -1e4)}
                found[f"{name} -1e4"] = replace(batch, **low)
        if batch.kl is not None:
            found["kl 1e4"] = replace(batch, kl=torch.full_like(batch.kl, 1e4))
            found["kl -1e4"] = replace(batch, kl=torch.full_like(batch.kl, -1e4))
        return found

    def call(self, inputs: EstimatorInputs) -> Outputs:
        return _outputs(self.guarded(inputs))

    def call_with_all(self, inputs: EstimatorInputs) -> Outputs:
        everything = GuardedEstimator(
            self.guarded.name, self.guarded.estimator, (), ESTIMATOR_OPTIONAL
        )
        return _outputs(everything(inputs))

    def call_bare(self, inputs: EstimatorInputs) -> Outputs:
        with torch.no_grad():
            return _outputs(self.guarded.estimator(inputs))


def _outputs(result: Advantages) -> Outputs:
    both = {"advantages": result.advantages, "returns": result.returns}
    return {name: value for name, value in both.items() if value is not None}


# The rules, in the order in which they are tried: what is simplest, and explains the failure of
# others, comes first.

DECLARED = Rule(
    "declared-fields",
    "a field that is not in needs or optional is None, and has no part in the result",
    "declare it: needs for a field that must be there, optional for one that may be",
)
OUTPUTS = Rule(
    "outputs",
    "the result is Advantages of finite floats [M], one a trainable token, without gradient",
    "return Advantages(x), with one float for each trainable token in x;"
    " expand_to_tokens(scores, inputs.cu_seqlens) repeats the number of a sequence on its tokens",
)
RETURNS = Rule(
    "returns",
    "an estimator that needs values returns the targets of the critic",
    "return Advantages(advantages, returns)",
)
DETERMINISTIC = Rule(
    "deterministic",
    "the same batch gives the same result, whatever was called in between",
    "keep no state between calls and draw no random numbers, or pass random=True",
)
PERMUTATION = Rule(
    "permutation",
    "sequences in another order get the same numbers in that order",
    "nothing may depend on where a sequence stands; sums over neighbours stop at the borders in"
    " cu_seqlens",
)
GROUP_IDS = Rule(
    "group-ids",
    "groups come from group_ids: any integers, members anywhere, sizes unequal",
    "number the groups with group_index(inputs.group_ids), or take group_mean_std(rewards,"
    " group_ids)",
)
GROUP_OF_ONE = Rule(
    "group-of-one",
    "a sequence that is alone in its group has finite advantages",
    "std(n - 1) and a mean over the others are 0 / 0 there: divide by (n - 1).clamp(min=1), or"
    " choose a value",
)
EMPTY = Rule(
    "empty-sequences",
    "a sequence without tokens changes nothing, and its reward, which may be NaN, is not read",
    "leave out such sequences first: member = segment_lengths(inputs.cu_seqlens) > 0; rewards ="
    " inputs.rewards[member]",
)
NO_TOKENS_RULE = Rule(
    "no-tokens",
    "a batch without tokens, or without sequences, gives empty results",
    "max and min of nothing raise",
)
GROUP_SPLIT = Rule(
    "group-split",
    "what a group gets does not depend on the other groups of the batch",
    "compute inside each group, with sums that stop at its borders (a difference of running sums"
    " loses the small ones), or pass uses_batch=True",
)
CONSTANT = Rule(
    "constant-rewards",
    "equal rewards give finite advantages",
    "add an eps to what you divide by; take variances in two passes, so that none is negative",
)
FLOAT32 = Rule(
    "float32",
    "float32 gives what float64 gives, to the rounding of the inputs",
    "accumulate in float64 (x.double()) and convert the result",
)
EXTREMES = Rule(
    "extremes",
    "rewards of 1e4 +- 1e-2 or +-1e6 and log-probs of -1e4 stay finite and right in float32",
    "take variances in two passes, never E[x^2] - mean^2; clamp a log-ratio before exp",
)


ROLLOUT_SPLIT = Rule(
    "rollout-split",
    "a rollout counts once: cut into segments with the same outcome, its tokens get what they got",
    "take each of inputs.rollout_ids once (GroupedReturns does), or pass discounts=True where the"
    " distance to the end is meant to count",
)


def _check_outputs(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for change, dtype in DTYPES:
        trial.run(cast(subject.batch(NEIGHBOURS), dtype), change)


def _check_returns(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    batch = subject.batch(NEIGHBOURS)
    if "values" in subject.guarded.needs and "returns" not in trial.run(batch):
        trial.fail(batch, "", "returns: expected a tensor [M], got None")


def _check_permutation(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    """Swap two neighbours of one group: groups that are counted off by position survive that."""
    try:
        _swap_neighbours(subject, trial, NEIGHBOURS)
    except ContractError:
        for smaller in (Layout((1, 1), (0, 0)), Layout((2, 1, 1, 3), (0, 0, 1, 1))):
            _swap_neighbours(subject, trial, smaller)
        raise


def _swap_neighbours(subject: _Subject, trial: Trial[EstimatorInputs], layout: Layout) -> None:
    order = [b + 1 - 2 * (b % 2) for b in range(len(layout.lengths))]
    _reorder(trial, subject.batch(layout), order)


def _reorder(trial: Trial[EstimatorInputs], batch: EstimatorInputs, order: list[int]) -> None:
    moved, index = take(batch, order)
    change = f"sequences in the order {order}"
    trial.same(batch, change, at(trial.run(batch), index), trial.run(moved, change), places=index)


def _check_group_ids(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for layout in peers(subject.seed):
        batch = subject.batch(layout)
        expected = trial.run(batch)
        _, number = torch.unique(batch.group_ids, return_inverse=True)
        for change, renamed in (
            ("group ids times -10**12", batch.group_ids * -(10**12)),
            ("group ids from 0", number),
        ):
            trial.same(
                batch, change, expected, trial.run(replace(batch, group_ids=renamed), change)
            )
        side_by_side = torch.argsort(number, stable=True).tolist()
        for order in (side_by_side, *shuffled(len(layout.lengths), subject.seed)):
            _reorder(trial, batch, order)


def _check_group_of_one(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for layout in loners(subject.seed):
        for change, dtype in DTYPES:
            trial.run(cast(subject.batch(layout), dtype), change)


def _check_no_tokens(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for layout in NO_TOKENS:
        trial.run(subject.batch(layout))


def _check_group_split(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for layout in subject.layouts:
        whole = subject.batch(layout)
        together = trial.run(whole)
        for group in sorted(set(layout.groups)):
            part, index = take(
                whole, [b for b, other in enumerate(layout.groups) if other == group]
            )
            change = f"group {group} in the batch instead of alone"
            trial.same(whole, change, trial.run(part), at(together, index), places=index)
            louder = torch.where(whole.group_ids == group, 1.0, 1e6)
            loud = replace(whole, rewards=louder * whole.rewards)
            if (parts := whole.reward_parts) is not None:
                loud = replace(loud, reward_parts=louder[:, None] * parts)
            loud = cast(loud, torch.float32)
            alone = trial.run(cast(part, torch.float32))
            allowed = {name: 1e-4 * max(1.0, largest(value)) for name, value in alone.items()}
            change = f"group {group} among rewards times 1e6 instead of alone, in float32"
            trial.same(
                loud, change, alone, at(trial.run(loud), index), places=index, allowed=allowed
            )


def _check_constant(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for layout in subject.layouts:
        batch = subject.batch(layout)
        for reward in (0.0, 0.1, -1e4 - 0.1):
            for dtype in (torch.float64, torch.float32):
                equal = replace(batch, rewards=torch.full_like(batch.rewards, reward))
                if (parts := batch.reward_parts) is not None:
                    equal = replace(equal, reward_parts=torch.full_like(parts, reward))
                trial.run(cast(equal, dtype), f"every reward is {reward}, in {dtype}")


def _check_rollout_split(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    """Cut rollouts where tokens earn nothing of their own, so that only the outcome counts."""
    for layout in peers(subject.seed):
        batch = subject.batch(layout)
        silent: dict[str, Any] = {
            name: torch.zeros_like(value)
            for name in ("token_rewards", "kl", "teacher_logprobs", "logprobs")
            if (value := getattr(batch, name)) is not None
        }
        whole = replace(batch, **silent)
        change = "sequences of two tokens or more cut into two segments of one rollout"
        trial.same(whole, change, trial.run(whole), trial.run(cut(whole), change))


_RULES: Mapping[Rule, Callable[[_Subject, Trial[EstimatorInputs]], None]] = {
    DECLARED: shared.check_declared,
    OUTPUTS: _check_outputs,
    READ_ONLY: _check_outputs,  # any call may find a write; these two look for nothing else
    RETURNS: _check_returns,
    DETERMINISTIC: shared.check_deterministic,
    shared.OPTIONAL: shared.check_optional,
    PERMUTATION: _check_permutation,
    GROUP_IDS: _check_group_ids,
    GROUP_OF_ONE: _check_group_of_one,
    EMPTY: shared.check_empty,
    NO_TOKENS_RULE: _check_no_tokens,
    GROUP_SPLIT: _check_group_split,
    CONSTANT: _check_constant,
    FLOAT32: shared.check_float32,
    EXTREMES: shared.check_extremes,
    shared.STORAGE: shared.check_storage,
    ROLLOUT_SPLIT: _check_rollout_split,
}
_ONE_CALL = (OUTPUTS, READ_ONLY, RETURNS, shared.OPTIONAL, GROUP_OF_ONE, NO_TOKENS_RULE, CONSTANT)
