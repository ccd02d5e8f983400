"""The contract of a policy loss, rule by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rlcore.algorithms.errors import EstimatorMutationError, OutputError
from rlcore.algorithms.guard import POLICY_LOSS_OPTIONAL, GuardedPolicyLoss
from rlcore.algorithms.ragged import expand_to_tokens
from rlcore.algorithms.registry import build_policy_loss, guard_policy_loss
from rlcore.algorithms.testing import shared
from rlcore.algorithms.testing.batches import (
    NEIGHBOURS,
    NO_TOKENS,
    Layout,
    cast,
    peers,
    policy_loss_batch,
    shuffled,
    take,
    tensors,
)
from rlcore.algorithms.testing.contract import ContractReport, Rule
from rlcore.algorithms.testing.trial import (
    DTYPES,
    READ_ONLY,
    Outputs,
    Subject,
    Trial,
    at,
    same_numbers,
)
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs

if TYPE_CHECKING:
    from torch import Tensor


def check_policy_loss(
    loss: str | Callable[..., Any], *, seed: int = 0, **keywords: Any
) -> ContractReport:
    """Try a policy loss against every rule that the framework, and its users, take for granted.

    Args:
        loss: a registered name, an import path `package.module:Name`, a class, a function that
            builds one, an instance, or what `build_policy_loss` returned.
        seed: of the batches; the same seed gives the same verdict.
        **keywords: of its constructor.

    Returns:
        The rules that were checked.

    Raises:
        ContractError: a rule is broken. The message names it, with the smallest batch found, what
            was expected, what came, and what to do.
        AlgorithmError: the loss cannot be built from these keywords.
    """
    guarded = shared.put_behind_guard(
        loss,
        keywords,
        called="loss",
        guard_type=GuardedPolicyLoss,
        build=build_policy_loss,
        guard=guard_policy_loss,
    )
    skipped = {} if "weights" in guarded.takes else {UNWEIGHTED: "it takes no weights"}
    return shared.check_rules(_Subject(guarded, seed), _RULES, skipped)


@dataclass(frozen=True)
class _Subject(Subject[PolicyLossInputs]):
    guarded: GuardedPolicyLoss
    optional = POLICY_LOSS_OPTIONAL

    def full(self, layout: Layout, seed: int) -> PolicyLossInputs:
        return policy_loss_batch(layout, seed)

    def extreme(self, batch: PolicyLossInputs) -> dict[str, PolicyLossInputs]:
        found: dict[str, PolicyLossInputs] = {}
        for name in ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs"):
            value: Tensor | None = getattr(batch, name)
            if value is not None:
                low: dict[str, Any] = {name: value - 1e4}
                found[f"{name} lower by 1e4"] = replace(batch, **low)
        found["advantages times 1e6"] = replace(batch, advantages=1e6 * batch.advantages)
        return found

    def step(self, layout: Layout) -> PolicyLossInputs:
        """A whole optimizer step, with its `batch_stats`: parts of it are micro-batches."""
        return self._with_stats(self.batch(layout))

    def call(self, inputs: PolicyLossInputs) -> Outputs:
        """Return the loss and its gradient under some weights of the tokens; both are finite."""
        outputs, _ = self._evaluate(inputs)
        return outputs

    def call_with_metrics(self, inputs: PolicyLossInputs) -> Outputs:
        outputs, result = self._evaluate(inputs)
        return {**outputs, **_metrics(result, inputs)}

    def _evaluate(self, inputs: PolicyLossInputs) -> tuple[Outputs, PolicyLoss]:
        leaf = inputs.logprobs.detach().requires_grad_()
        inputs = self._with_stats(replace(inputs, logprobs=leaf))
        before = {name: value.detach().clone() for name, value in tensors(inputs)}
        result = self.guarded(inputs)
        for name, value in tensors(inputs):
            if not same_numbers(value.detach(), before[name]):
                raise EstimatorMutationError(
                    f"it wrote into its input {name!r}, past the version counter"
                )
        loss = result.per_token
        if not loss.requires_grad:
            raise OutputError(
                "per_token: expected a gradient to logprobs, got a tensor without one"
            )
        weights = 2 + inputs.old_logprobs.cos()
        (gradient,) = torch.autograd.grad((weights * loss).sum(), leaf)
        outputs = {"per_token": loss.detach(), "gradient": gradient}
        for name, value in outputs.items():
            if not torch.isfinite(value).all():
                raise OutputError(
                    f"{name}: expected finite numbers, got {value[~torch.isfinite(value)][0]}"
                )
        return outputs, result

    def _with_stats(self, inputs: PolicyLossInputs) -> PolicyLossInputs:
        """Add statistics of the whole step, with the log-probs of the policy before it."""
        if inputs.batch_stats is not None or not self.guarded.has_batch_stats:
            return inputs
        stats = self.guarded.batch_stats(replace(inputs, logprobs=inputs.old_logprobs))
        return replace(inputs, batch_stats=stats)


def _metrics(result: PolicyLoss, inputs: PolicyLossInputs) -> Outputs:
    """Return the metrics as vectors of tokens.

    Returns none where tokens and sequences are equal in number and cannot be told apart.
    """
    if inputs.num_tokens == inputs.num_sequences:
        return {}
    return {
        f"metrics[{name!r}]": (
            value
            if value.numel() == inputs.num_tokens
            else expand_to_tokens(value, inputs.cu_seqlens)
        )
        for name, value in result.metrics.items()
    }


# The rules, in the order in which they are tried: what is simplest, and explains the failure of
# others, comes first.

DECLARED = Rule(
    "declared-fields",
    "a field that is not in needs or optional may be absent, and has no part in the result",
    "declare it: needs for a field that must be there, optional for one that may be",
)
OUTPUTS = Rule(
    "outputs",
    "the result is a PolicyLoss of finite floats [M] with a finite gradient to logprobs; metrics"
    " are [M] or [B]",
    "return one number a token, neither reduced nor detached: the framework weighs and sums",
)
DETERMINISTIC = Rule(
    "deterministic",
    "the same micro-batch gives the same result, whatever was called in between",
    "keep no state between calls; choose tokens by a hash of sequence_ids and position, not by a"
    " generator",
)
PERMUTATION = Rule(
    "permutation",
    "sequences in another order get the same numbers in that order",
    "nothing may depend on where a sequence stands; sequence_ids say who it is",
)
MICRO_BATCHES = Rule(
    "micro-batches",
    "splitting the step into micro-batches of whole sequences changes no number",
    "reduce nothing over the batch; what the loss must know of the whole step it computes in"
    " batch_stats(inputs)",
)
EMPTY = Rule(
    "empty-sequences",
    "a sequence without tokens changes nothing",
    "segment_mean defines the mean of nothing as 0",
)
NO_TOKENS_RULE = Rule(
    "no-tokens",
    "a micro-batch without tokens, or without sequences, gives empty results",
    "max and min of nothing raise",
)
UNWEIGHTED = Rule(
    "unweighted",
    "loss weights may be read, not applied: scaling them changes nothing",
    "the framework multiplies by them",
)
FLOAT32 = Rule(
    "float32",
    "float32 gives what float64 gives, to the rounding of the inputs",
    "accumulate in float64, as segment_mean does, and take differences of log-probs before exp",
)
EXTREMES = Rule(
    "extremes",
    "log-ratios of +-1e4 and advantages of 1e6 keep the loss and its gradient finite and right in"
    " float32",
    "clamp the log-ratio before exp: clamping the ratio is too late, since the gradient of exp is"
    " inf by then",
)


def _check_outputs(subject: _Subject, trial: Trial[PolicyLossInputs]) -> None:
    for layout in (*peers(subject.seed), NEIGHBOURS):
        for change, dtype in DTYPES:
            trial.run(cast(subject.batch(layout), dtype), change)


def _check_permutation(subject: _Subject, trial: Trial[PolicyLossInputs]) -> None:
    for layout in subject.layouts:
        batch = subject.batch(layout)
        expected = trial.run(batch, call=subject.call_with_metrics)
        for order in shuffled(len(layout.lengths), subject.seed):
            moved, index = take(batch, order)
            change = f"sequences in the order {order}"
            got = trial.run(moved, change, subject.call_with_metrics)
            trial.same(batch, change, at(expected, index), got, places=index)


def _check_micro_batches(subject: _Subject, trial: Trial[PolicyLossInputs]) -> None:
    for layout in subject.layouts:
        step = subject.step(layout)
        count = len(layout.lengths)
        expected = trial.run(step, call=subject.call_with_metrics)
        for size in sorted({1, (count + 1) // 2}):
            for first in range(0, count, size):
                rows = list(range(first, min(first + size, count)))
                part, index = take(step, rows)
                change = f"sequences {rows} in a micro-batch of their own"
                got = trial.run(part, change, subject.call_with_metrics)
                shared = {name: value for name, value in at(expected, index).items() if name in got}
                trial.same(step, change, shared, got, places=index)


def _check_no_tokens(subject: _Subject, trial: Trial[PolicyLossInputs]) -> None:
    stats = subject.step(NEIGHBOURS).batch_stats
    for layout in NO_TOKENS:
        trial.run(replace(subject.batch(layout), batch_stats=stats))
        trial.run(subject.batch(layout), "the whole step has no tokens")


def _check_unweighted(subject: _Subject, trial: Trial[PolicyLossInputs]) -> None:
    for layout in peers(subject.seed):
        batch = subject.batch(layout)
        assert batch.weights is not None
        change = "loss weights times 3"
        scaled = replace(batch, weights=3 * batch.weights)
        trial.same(batch, change, trial.run(batch), trial.run(scaled, change))


_RULES: Mapping[Rule, Callable[[_Subject, Trial[PolicyLossInputs]], None]] = {
    DECLARED: shared.check_declared,
    OUTPUTS: _check_outputs,
    READ_ONLY: _check_outputs,  # any call may find a write; these look for nothing else
    DETERMINISTIC: shared.check_deterministic,
    shared.OPTIONAL: shared.check_optional,
    PERMUTATION: _check_permutation,
    MICRO_BATCHES: _check_micro_batches,
    EMPTY: shared.check_empty,
    NO_TOKENS_RULE: _check_no_tokens,
    UNWEIGHTED: _check_unweighted,
    FLOAT32: shared.check_float32,
    EXTREMES: shared.check_extremes,
    shared.STORAGE: shared.check_storage,
}
