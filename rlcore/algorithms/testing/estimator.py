"""The contract of an advantage estimator, rule by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms.guard import ESTIMATOR_ALWAYS, ESTIMATOR_OPTIONAL, GuardedEstimator
from rlcore.algorithms.registry import build_estimator, guard_estimator
from rlcore.algorithms.testing.batches import (
    NEIGHBOURS,
    NO_TOKENS,
    Layout,
    cast,
    estimator_batch,
    loners,
    only,
    peers,
    shuffled,
    strided,
    take,
)
from rlcore.algorithms.testing.contract import ContractError, ContractReport, Rule, builds
from rlcore.algorithms.testing.trial import READ_ONLY, Outputs, Trial, at, largest, same_outputs
from rlcore.algorithms.types import Advantages, EstimatorInputs


def check_estimator(
    estimator: str | Callable[..., Any],
    *,
    seed: int = 0,
    uses_batch: bool = False,
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
    subject = _Subject(_guarded(estimator, keywords), seed)
    kept: list[Rule] = []
    skipped: dict[Rule, str] = {}
    for rule, check in _RULES.items():
        if random and rule not in _ONE_CALL:
            skipped[rule] = "random=True"
        elif uses_batch and rule is GROUP_SPLIT:
            skipped[rule] = "uses_batch=True"
        else:
            check(subject, subject.trial(rule))
            kept.append(rule)
    return ContractReport(f"estimator {subject.guarded.name!r}", tuple(kept), skipped)


def _guarded(estimator: str | Callable[..., Any], keywords: dict[str, Any]) -> GuardedEstimator:
    if isinstance(estimator, str | type):
        return build_estimator(estimator, **keywords)
    if not isinstance(estimator, GuardedEstimator) and builds(estimator, keywords):
        instance = estimator(**keywords)
        return instance if isinstance(instance, GuardedEstimator) else guard_estimator(instance)
    if keywords:
        raise TypeError(
            f"{', '.join(keywords)}: the estimator is built already; pass its class or name with"
            " keywords"
        )
    return estimator if isinstance(estimator, GuardedEstimator) else guard_estimator(estimator)


@dataclass(frozen=True)
class _Subject:
    guarded: GuardedEstimator
    seed: int

    @property
    def takes(self) -> frozenset[str]:
        return self.guarded.needs | self.guarded.optional | {*ESTIMATOR_ALWAYS}

    def trial(self, rule: Rule) -> Trial[EstimatorInputs]:
        return Trial(
            f"estimator {self.guarded.name!r}", self._declared, self.takes, self.seed, rule
        )

    def batch(self, layout: Layout) -> EstimatorInputs:
        return only(estimator_batch(layout, self.seed), self.takes)

    def with_fields(self, names: frozenset[str]) -> Callable[[EstimatorInputs], Outputs]:
        """The estimator as if it had declared these fields."""
        other = GuardedEstimator(self.guarded.name, self.guarded.estimator, names)
        return lambda inputs: _outputs(other(inputs))

    def bare(self, inputs: EstimatorInputs) -> Outputs:
        """The estimator without the copies that its guard makes."""
        with torch.no_grad():
            return _outputs(self.guarded.estimator(inputs))

    def _declared(self, inputs: EstimatorInputs) -> Outputs:
        return _outputs(self.guarded(inputs))


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
    "repeat a number of the sequence on its tokens with expand_to_tokens(x, inputs.cu_seqlens)",
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
OPTIONAL = Rule(
    "optional-fields",
    "a field in optional may be absent",
    "test it with `is not None` before you read it",
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
STORAGE = Rule(
    "storage",
    "numbers count, not how they lie in memory",
    "use reshape instead of view, and no data_ptr or as_strided",
)


def _check_declared(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    full = estimator_batch(NEIGHBOURS, subject.seed)
    everything = subject.with_fields(frozenset(ESTIMATOR_OPTIONAL))
    try:
        expected = everything(full)
        again = everything(full)
    except Exception:  # noqa: BLE001  (it fails with everything there: the rule `outputs` will say how)
        return
    if not same_outputs(expected, again):  # the rule `deterministic` will say so
        return
    for field in sorted(set(ESTIMATOR_OPTIONAL) - subject.takes):
        change = f"without {field!r}, which is not declared"
        less = subject.with_fields(frozenset(ESTIMATOR_OPTIONAL) - {field})
        trial.same(full, change, expected, trial.run(full, change, less))


def _check_outputs(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for dtype in (torch.float64, torch.float32):
        trial.run(cast(subject.batch(NEIGHBOURS), dtype), f"in {dtype}")


def _check_returns(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    batch = subject.batch(NEIGHBOURS)
    if "values" in subject.guarded.needs and "returns" not in trial.run(batch):
        trial.fail(batch, "", "returns: expected a tensor [M], got None")


def _check_deterministic(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    batch = subject.batch(NEIGHBOURS)
    expected = trial.run(batch)
    exactly = dict.fromkeys(expected, 0.0)
    trial.same(batch, "the same call again", expected, trial.run(batch), allowed=exactly)
    trial.run(only(estimator_batch(NEIGHBOURS, subject.seed + 1), subject.takes))
    trial.same(
        batch,
        "the same call after one on another batch",
        expected,
        trial.run(batch),
        allowed=exactly,
    )


def _check_optional(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for field in sorted(subject.guarded.optional):
        trial.run(only(subject.batch(NEIGHBOURS), subject.takes - {field}), f"without {field!r}")
    trial.run(
        only(subject.batch(NEIGHBOURS), subject.takes - subject.guarded.optional),
        "without any optional field",
    )


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
        for dtype in (torch.float64, torch.float32):
            trial.run(cast(subject.batch(layout), dtype), f"in {dtype}")


def _check_empty(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for layout in (*loners(subject.seed), *peers(subject.seed)):
        count = len(layout.lengths)
        stranger = max(layout.groups) + 1
        for position, group in (
            (0, layout.groups[0]),
            (count // 2, layout.groups[-1]),
            (count, stranger),
        ):
            lengths = (*layout.lengths[:position], 0, *layout.lengths[position:])
            groups = (*layout.groups[:position], group, *layout.groups[position:])
            batch = subject.batch(Layout(lengths, groups))
            without, _ = take(batch, [b for b in range(count + 1) if b != position])
            change = f"with the empty sequence {position}"
            trial.same(batch, change, trial.run(without), trial.run(batch, change))


def _check_no_tokens(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for layout in NO_TOKENS:
        trial.run(subject.batch(layout))


def _check_group_split(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for layout in (*loners(subject.seed), *peers(subject.seed)):
        whole = subject.batch(layout)
        together = trial.run(whole)
        for group in sorted(set(layout.groups)):
            part, index = take(
                whole, [b for b, other in enumerate(layout.groups) if other == group]
            )
            change = f"group {group} in the batch instead of alone"
            trial.same(whole, change, trial.run(part), at(together, index), places=index)
            loud = cast(
                replace(
                    whole, rewards=torch.where(whole.group_ids == group, 1.0, 1e6) * whole.rewards
                ),
                torch.float32,
            )
            alone = trial.run(cast(part, torch.float32))
            allowed = {name: 1e-4 * max(1.0, largest(value)) for name, value in alone.items()}
            change = f"group {group} among rewards times 1e6 instead of alone, in float32"
            trial.same(
                loud, change, alone, at(trial.run(loud), index), places=index, allowed=allowed
            )


def _check_constant(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for layout in (*loners(subject.seed), *peers(subject.seed)):
        batch = subject.batch(layout)
        for reward in (0.0, 0.1, -1e4 - 0.1):
            for dtype in (torch.float64, torch.float32):
                equal = replace(batch, rewards=torch.full_like(batch.rewards, reward))
                trial.run(cast(equal, dtype), f"every reward is {reward}, in {dtype}")


def _check_float32(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for layout in (*loners(subject.seed), *peers(subject.seed), Layout((4000, 1, 3000), (0, 0, 0))):
        trial.as_good_as_rounding(subject.batch(layout))


def _check_extremes(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for layout in (*loners(subject.seed), *peers(subject.seed)):
        for change, batch in _extreme(subject.batch(layout)).items():
            trial.as_good_as_rounding(batch, change)


def _extreme(batch: EstimatorInputs) -> dict[str, EstimatorInputs]:
    found = {
        "rewards 100 +- 0.1": replace(batch, rewards=100 + 0.1 * batch.rewards),
        "rewards 1e4 +- 1e-2": replace(batch, rewards=1e4 + 1e-2 * batch.rewards),
        "rewards +-1e6": replace(batch, rewards=1e6 * batch.rewards.sign()),
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


def _check_storage(subject: _Subject, trial: Trial[EstimatorInputs]) -> None:
    for layout in peers(subject.seed):
        batch = subject.batch(layout)
        change = "tensors that are not contiguous"
        trial.same(batch, change, trial.run(batch), trial.run(strided(batch), change, subject.bare))


_RULES: Mapping[Rule, Callable[[_Subject, Trial[EstimatorInputs]], None]] = {
    DECLARED: _check_declared,
    OUTPUTS: _check_outputs,
    READ_ONLY: _check_outputs,  # any call may find a write; these two look for nothing else
    RETURNS: _check_returns,
    DETERMINISTIC: _check_deterministic,
    OPTIONAL: _check_optional,
    PERMUTATION: _check_permutation,
    GROUP_IDS: _check_group_ids,
    GROUP_OF_ONE: _check_group_of_one,
    EMPTY: _check_empty,
    NO_TOKENS_RULE: _check_no_tokens,
    GROUP_SPLIT: _check_group_split,
    CONSTANT: _check_constant,
    FLOAT32: _check_float32,
    EXTREMES: _check_extremes,
    STORAGE: _check_storage,
}
_ONE_CALL = (OUTPUTS, READ_ONLY, RETURNS, OPTIONAL, GROUP_OF_ONE, NO_TOKENS_RULE, CONSTANT)
