"""The contract of an advantage estimator, rule by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms.plugin_guard import ESTIMATOR_OPTIONAL, GuardedEstimator
from rlcore.algorithms.registry import guard_estimator
from rlcore.algorithms.testing import case as shared
from rlcore.algorithms.testing.batches import (
    NEIGHBOURS,
    converted,
    cut,
    loners,
    peers,
    shuffled,
    take,
)
from rlcore.algorithms.testing.case import Case, Outputs, at, largest
from rlcore.algorithms.testing.contract import ContractReport, Rule
from rlcore.algorithms.types import Advantages, EstimatorInputs


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
        estimator: a registered name, an import path `package.module:Name`, a class, an instance,
            a function of the inputs, or what `build_estimator` returned.
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
    guarded = guard_estimator(estimator, **keywords)
    skipped = {}
    if random:
        skipped = {rule: "random=True" for rule in _RULES if rule not in _ONE_CALL}
    if uses_batch:
        skipped.setdefault(GROUP_SPLIT, "uses_batch=True")
    if discounts:
        skipped.setdefault(ROLLOUT_SPLIT, "discounts=True")
    elif "values" in guarded.needs:
        skipped.setdefault(ROLLOUT_SPLIT, "needs values: a segment ends what follows a token")
    return _Case(guarded, seed).keep(_RULES, skipped)


@dataclass(frozen=True)
class _Case(Case[EstimatorInputs]):
    guarded: GuardedEstimator
    record = EstimatorInputs
    optional = ESTIMATOR_OPTIONAL

    def extreme(self, batch: EstimatorInputs) -> dict[str, EstimatorInputs]:
        found = {
            "rewards 100 +- 0.1": _rewards(batch, lambda x: 100 + 0.1 * x),
            "rewards 1e4 +- 1e-2": _rewards(batch, lambda x: 1e4 + 1e-2 * x),
            "rewards +-1e6": _rewards(batch, lambda x: 1e6 * x.sign()),
        }
        logprobs = ("logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs")
        for name, huge in (*((name, -1e4) for name in logprobs), ("kl", 1e4), ("kl", -1e4)):
            value: Tensor | None = getattr(batch, name)
            if value is not None:
                changed: dict[str, Any] = {name: torch.full_like(value, huge)}
                found[f"{name} {huge:g}"] = replace(batch, **changed)
        return found

    def call(self, inputs: EstimatorInputs) -> Outputs:
        return _outputs(self.guarded(inputs))

    def call_with_all(self, inputs: EstimatorInputs) -> Outputs:
        bare = self.guarded.estimator
        return _outputs(GuardedEstimator(self.guarded.name, bare, (), ESTIMATOR_OPTIONAL)(inputs))


def _outputs(result: Advantages) -> Outputs:
    both = {"advantages": result.advantages, "returns": result.returns}
    return {name: value for name, value in both.items() if value is not None}


def _rewards(batch: EstimatorInputs, change: Callable[[Tensor], Tensor]) -> EstimatorInputs:
    """Change the rewards of sequences, and those of their parts."""
    parts = batch.reward_parts
    parts = parts if parts is None else change(parts)
    return replace(batch, rewards=change(batch.rewards), reward_parts=parts)


# --- rules, the simplest first: it explains the failure of others ---------------------------------

OUTPUTS = Rule(
    "outputs",
    "the result is Advantages of finite floats [M], one a trainable token, without gradient; an"
    " estimator that needs values also returns the targets of the critic",
    "return Advantages(x) or Advantages(x, returns), with one float for each trainable token in x;"
    " expand_to_tokens(scores, inputs.cu_seqlens) repeats the number of a sequence on its tokens",
)
PERMUTATION = Rule(
    "permutation",
    "sequences in another order, or groups under other ids, get the same numbers in that order",
    "number the groups with group_index(inputs.group_ids), or take group_mean_std(rewards,"
    " group_ids); sums over neighbours stop at the borders in cu_seqlens",
)
FINITE = Rule(
    "finite",
    "equal rewards, and a sequence that is alone in its group, give finite advantages",
    "std(n - 1) and a mean over the others are 0 / 0 there: divide by (n - 1).clamp(min=1), and add"
    " an eps to a std; take variances in two passes, so that none is negative",
)
GROUP_SPLIT = Rule(
    "group-split",
    "what a group gets does not depend on the other groups of the batch",
    "compute inside each group, with sums that stop at its borders (a difference of running sums"
    " loses the small ones), or pass uses_batch=True",
)
ROLLOUT_SPLIT = Rule(
    "rollout-split",
    "a rollout counts once: cut into segments with the same outcome, its tokens get what they got",
    "take each of inputs.rollout_ids once (GroupedReturns does), or pass discounts=True where the"
    " distance to the end is meant to count",
)


def _check_outputs(case: _Case) -> None:
    batch = case.batch(NEIGHBOURS)
    case.run_both(batch)
    if "values" in case.guarded.needs and "returns" not in case.run(batch):
        case.fail(batch, "", "returns: expected a tensor [M], got None")


def _check_permutation(case: _Case) -> None:
    """Rename groups and reorder sequences; in neighbours, groups that are counted off survive."""
    for layout in (*peers(case.seed), NEIGHBOURS):
        batch = case.batch(layout)
        expected = case.run(batch)
        _, number = torch.unique(batch.group_ids, return_inverse=True)
        for change, renamed in (
            ("group ids times -10**12", batch.group_ids * -(10**12)),
            ("group ids from 0", number),
        ):
            got = case.run(replace(batch, group_ids=renamed), change)
            case.same(batch, change, expected, got)
        side_by_side = torch.argsort(number, stable=True).tolist()
        for order in (side_by_side, *shuffled(len(layout.lengths), case.seed)):
            moved, index = take(batch, order)
            change = f"sequences in the order {order}"
            case.same(batch, change, at(expected, index), case.run(moved, change), tokens=index)


def _check_finite(case: _Case) -> None:
    for layout in loners(case.seed):
        case.run_both(case.batch(layout))
    for layout in case.layouts:
        for reward in (0.0, 0.1, -1e4 - 0.1):
            equal = _rewards(case.batch(layout), partial(torch.full_like, fill_value=reward))
            case.run_both(equal, f"every reward is {reward}")


def _check_group_split(case: _Case) -> None:
    for layout in case.layouts:
        whole = case.batch(layout)
        together = case.run(whole)
        for group in sorted(set(layout.groups)):
            rows = [b for b, other in enumerate(layout.groups) if other == group]
            part, index = take(whole, rows)
            change = f"group {group} in the batch instead of alone"
            case.same(whole, change, case.run(part), at(together, index), tokens=index)
            louder = torch.where(whole.group_ids == group, 1.0, 1e6).double()
            loud = _rewards(whole, partial(torch.einsum, "b,b...->b...", louder))
            loud = converted(loud, torch.float32)
            alone = case.run(converted(part, torch.float32))
            allowed = {name: 1e-4 * max(1.0, largest(value)) for name, value in alone.items()}
            change = f"group {group} among rewards times 1e6 instead of alone, in float32"
            got = at(case.run(loud), index)
            case.same(loud, change, alone, got, tokens=index, allowed=allowed)


def _check_rollout_split(case: _Case) -> None:
    """Cut rollouts where tokens earn nothing of their own, so that only the outcome counts."""
    for layout in peers(case.seed):
        batch = case.batch(layout)
        silent: dict[str, Any] = {
            name: torch.zeros_like(value)
            for name in ("token_rewards", "kl", "teacher_logprobs", "logprobs")
            if (value := getattr(batch, name)) is not None
        }
        whole = replace(batch, **silent)
        change = "sequences of two tokens or more cut into two segments of one rollout"
        case.same(whole, change, case.run(whole), case.run(cut(whole), change))


_RULES: Mapping[Rule, Callable[[_Case], None]] = {
    OUTPUTS: _check_outputs,
    shared.READ_ONLY: shared.check_read_only,
    shared.DETERMINISTIC: shared.check_deterministic,
    shared.DECLARED: shared.check_declared,
    shared.OPTIONAL: shared.check_optional,
    PERMUTATION: _check_permutation,
    FINITE: _check_finite,
    shared.EMPTY: shared.check_empty,
    shared.NO_TOKENS: shared.check_no_tokens,
    GROUP_SPLIT: _check_group_split,
    shared.FLOAT32: shared.check_float32,
    ROLLOUT_SPLIT: _check_rollout_split,
}
_ONE_CALL = (OUTPUTS, FINITE, shared.READ_ONLY, shared.OPTIONAL, shared.NO_TOKENS)
