"""The contract of a policy loss, rule by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms.errors import EstimatorMutationError, OutputError
from rlcore.algorithms.plugin_guard import POLICY_LOSS_OPTIONAL, GuardedPolicyLoss
from rlcore.algorithms.ragged import expand_to_tokens
from rlcore.algorithms.registry import guard_policy_loss
from rlcore.algorithms.testing import case as shared
from rlcore.algorithms.testing.batches import (
    NEIGHBOURS,
    WITHOUT_TOKENS,
    Layout,
    peers,
    take,
    tensors,
)
from rlcore.algorithms.testing.case import Case, Outputs, at, same_numbers
from rlcore.algorithms.testing.contract import ContractReport, Rule
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs


def check_policy_loss(
    loss: str | Callable[..., Any], *, seed: int = 0, **keywords: Any
) -> ContractReport:
    """Try a policy loss against every rule that the framework, and its users, take for granted.

    Args:
        loss: a registered name, an import path `package.module:Name`, a class, an instance,
            a function of the inputs, or what `build_policy_loss` returned.
        seed: of the batches; the same seed gives the same verdict.
        **keywords: of its constructor.

    Returns:
        The rules that were checked.

    Raises:
        ContractError: a rule is broken. The message names it, with the smallest batch found, what
            was expected, what came, and what to do.
        AlgorithmError: the loss cannot be built from these keywords.
    """
    guarded = guard_policy_loss(loss, **keywords)
    skipped = {} if "weights" in guarded.takes else {UNWEIGHTED: "it takes no weights"}
    return _Case(guarded, seed).keep(_RULES, skipped)


@dataclass(frozen=True)
class _Case(Case[PolicyLossInputs]):
    guarded: GuardedPolicyLoss
    record = PolicyLossInputs
    optional = POLICY_LOSS_OPTIONAL

    def extreme(self, batch: PolicyLossInputs) -> dict[str, PolicyLossInputs]:
        found = {"advantages times 1e6": replace(batch, advantages=1e6 * batch.advantages)}
        for name in ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs"):
            value: Tensor | None = getattr(batch, name)
            if value is not None:
                low: dict[str, Any] = {name: value - 1e4}
                found[f"{name} lower by 1e4"] = replace(batch, **low)
        return found

    def call(self, inputs: PolicyLossInputs) -> Outputs:
        """Return the loss and its gradient under some weights of the tokens; both are finite."""
        outputs, _ = self._evaluate(inputs)
        return outputs

    def call_with_metrics(self, inputs: PolicyLossInputs) -> Outputs:
        """Add the metrics, unless tokens and sequences are equal in number and look alike."""
        outputs, result = self._evaluate(inputs)
        if inputs.num_tokens == inputs.num_sequences:
            return outputs
        metrics = {
            f"metrics[{name!r}]": value
            if value.numel() == inputs.num_tokens
            else expand_to_tokens(value, inputs.cu_seqlens)
            for name, value in result.metrics.items()
        }
        return {**outputs, **metrics}

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

    def step(self, layout: Layout) -> PolicyLossInputs:
        """Return a whole optimizer step, with its `batch_stats`: its parts are micro-batches."""
        return self._with_stats(self.batch(layout))


# --- rules, the simplest first: it explains the failure of others ---------------------------------

OUTPUTS = Rule(
    "outputs",
    "the result is a PolicyLoss of finite floats [M] with a finite gradient to logprobs; metrics"
    " are [M] or [B]",
    "return one number a token, neither reduced nor detached: the framework weighs and sums",
)
MICRO_BATCHES = Rule(
    "micro-batches",
    "splitting the step into micro-batches of whole sequences changes no number",
    "reduce nothing over the batch, and let nothing depend on where a sequence is; what the loss"
    " must know of the whole step it computes in batch_stats(inputs)",
)
UNWEIGHTED = Rule(
    "unweighted",
    "loss weights may be read, not applied: scaling them changes nothing",
    "the framework multiplies by them",
)


def _check_outputs(case: _Case) -> None:
    for layout in (*peers(case.seed), NEIGHBOURS):
        case.run_both(case.batch(layout))


def _check_micro_batches(case: _Case) -> None:
    for layout in case.layouts:
        step = case.step(layout)
        count = len(layout.lengths)
        expected = case.run(step, call=case.call_with_metrics)
        for size in sorted({1, (count + 1) // 2}):
            for first in range(0, count, size):
                rows = list(range(first, min(first + size, count)))
                part, index = take(step, rows)
                change = f"sequences {rows} in a micro-batch of their own"
                got = case.run(part, change, case.call_with_metrics)
                both = {name: value for name, value in at(expected, index).items() if name in got}
                case.same(step, change, both, got, tokens=index)


def _check_no_tokens(case: _Case) -> None:
    stats = case.step(NEIGHBOURS).batch_stats
    for layout in WITHOUT_TOKENS:
        case.run(replace(case.batch(layout), batch_stats=stats))
        case.run(case.batch(layout), "the whole step has no tokens")


def _check_unweighted(case: _Case) -> None:
    for layout in peers(case.seed):
        batch = case.batch(layout)
        assert batch.weights is not None
        change = "loss weights times 3"
        scaled = replace(batch, weights=3 * batch.weights)
        case.same(batch, change, case.run(batch), case.run(scaled, change))


_RULES: Mapping[Rule, Callable[[_Case], None]] = {
    OUTPUTS: _check_outputs,
    shared.READ_ONLY: shared.check_read_only,
    shared.DETERMINISTIC: shared.check_deterministic,
    shared.DECLARED: shared.check_declared,
    shared.OPTIONAL: shared.check_optional,
    MICRO_BATCHES: _check_micro_batches,
    shared.EMPTY: shared.check_empty,
    shared.NO_TOKENS: _check_no_tokens,
    UNWEIGHTED: _check_unweighted,
    shared.FLOAT32: shared.check_float32,
}
