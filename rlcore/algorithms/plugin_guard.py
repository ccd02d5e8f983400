"""The guard between the framework and an algorithm, built in or a plugin.

An algorithm works only on copies of the fields it declared, so no write of any kind (`x.mul_`,
`x.data.mul_`, `x.numpy()[:] = `) can reach the batch: a logged KL is always the raw KL. Version
counters, and for estimators a comparison of the bits as well, then turn such a write into an error
that names the field.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from rlcore.algorithms.errors import (
    EstimatorMutationError,
    MissingInputError,
    OutputError,
    UndeclaredInputError,
)
from rlcore.algorithms.ragged import without_gradient
from rlcore.algorithms.types import Advantages, EstimatorInputs, PolicyLoss, PolicyLossInputs
from rlcore.import_paths import location_of

if TYPE_CHECKING:
    from torch import Tensor

ESTIMATOR_ALWAYS = ("cu_seqlens", "rewards", "group_ids")
# Undeclared fields that estimators get where the batch has them: each estimator must respect them.
ESTIMATOR_WHERE_GIVEN = ("rollout_ids",)
ESTIMATOR_OPTIONAL = tuple(
    f.name
    for f in fields(EstimatorInputs)
    if f.name not in (*ESTIMATOR_ALWAYS, *ESTIMATOR_WHERE_GIVEN)
)
POLICY_LOSS_ALWAYS = ("cu_seqlens", "logprobs", "old_logprobs", "advantages")
POLICY_LOSS_OPTIONAL = tuple(
    f.name for f in fields(PolicyLossInputs) if f.name not in (*POLICY_LOSS_ALWAYS, "batch_stats")
)

_REFERENCE = (
    "set algorithm.kl.reward_coef (or algorithm.kl.monitor: true), which loads the reference"
)
SOURCES: Mapping[str, str] = {
    "token_rewards": "rollout.workflow must set Sample.token_rewards",
    "logprobs": "set algorithm.old_logprobs: recompute",
    "ref_logprobs": _REFERENCE,
    "rollout_logprobs": "rollout.engine must return the log-probs of its samples",
    "kl": _REFERENCE,
    "values": "set critic.path",
    "baseline_rewards": "the rollouts must hold the reward of a greedy response to each prompt",
    "teacher_logprobs": "set teacher.path",
    "versions": "rollout.engine must report the policy version of each token",
    "rollout_ids": "rollout.workflow must number its rollouts",
    "turn_ids": "rollout.workflow must set Sample.turn_spans",
    "reward_parts": "the samples must hold the scores of reward.parts"
    " (RolloutBatch.from_samples(samples, reward_parts=[...]) takes them)",
    "entropy": "set algorithm.entropy_coef, or let the backend compute the entropy",
    "weights": "set algorithm.loss.aggregation",
    "sequence_ids": "the batch must say who its sequences are",
}


class Guarded:
    """An algorithm under its name, with the fields of the batch that it takes."""

    kind: str  # "estimator" or "policy loss", for messages
    always: tuple[str, ...]  # the fields that every batch has

    def __init__(self, name: str, needs: Collection[str], optional: Collection[str] = ()) -> None:
        self.name = name
        self.needs = frozenset(needs)
        self.optional = frozenset(optional)
        self.takes = self.needs | self.optional | {*self.always}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, needs={sorted(self.needs)})"

    def check_available(self, available: Collection[str]) -> None:
        """Raise `MissingInputError` unless all needed fields exist; call before rollouts."""
        missing = sorted(self.needs - {*available, *self.always})
        if missing:
            needs = ", ".join(map(repr, sorted(self.needs)))
            wanted = "; ".join(f"{field!r} is missing: {SOURCES[field]}" for field in missing)
            raise MissingInputError(f"{self.kind} {self.name!r} needs {needs}; {wanted}")

    @contextmanager
    def _naming_failures(
        self, called: object, inputs: EstimatorInputs | PolicyLossInputs
    ) -> Iterator[None]:
        """Name the field of `inputs.rewards -= x`, which assigns it, and those that are None.

        Another exception is a bug of the algorithm, and comes with its traceback.
        """
        try:
            yield
        except FrozenInstanceError as error:
            for field in fields(inputs):
                if str(error).endswith(f"field {field.name!r}"):
                    raise self._written(field.name) from error
            raise
        except (AttributeError, TypeError) as error:
            absent = ", ".join(f.name for f in fields(inputs) if getattr(inputs, f.name) is None)
            if "NoneType" not in str(error) or not absent:
                raise
            raise UndeclaredInputError(
                f"{self.kind} {self.name!r} raised {type(error).__name__}: {error}"
                f"{location_of(called, error)}; these fields of its inputs are None: {absent}."
                ' Declare what it reads, as in needs = {"values"}'
            ) from error

    def _written(self, field: str) -> EstimatorMutationError:
        return EstimatorMutationError(
            f"{self.kind} {self.name!r} wrote into its input {field!r}; inputs are read-only: "
            "use x = x * y instead of x.mul_(y) or inputs.x *= y, or write into x.clone()"
        )


class GuardedEstimator(Guarded):
    """An estimator behind its guard: `EstimatorInputs` to checked `Advantages`, no gradients."""

    kind = "estimator"
    always = ESTIMATOR_ALWAYS

    def __init__(
        self,
        name: str,
        estimator: Callable[[EstimatorInputs], Advantages],
        needs: Collection[str],
        optional: Collection[str] = (),
    ) -> None:
        super().__init__(name, needs, optional)
        self.takes |= {*ESTIMATOR_WHERE_GIVEN}
        self.estimator = estimator

    @without_gradient
    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        present = [name for name, value in vars(inputs).items() if value is not None]
        self.check_available(present)
        given: dict[str, Tensor] = {
            name: getattr(inputs, name) for name in present if name in self.takes
        }
        # Out of the graph, and out of inference mode, whose tensors have no version counter.
        with torch.inference_mode(False):
            copies = {
                name: value.detach().clone(memory_format=torch.contiguous_format)
                for name, value in given.items()
            }
        versions = {name: value._version for name, value in copies.items()}

        # Copies of checked fields need no check.
        record = copy.copy(inputs)
        vars(record).update({f.name: copies.get(f.name) for f in fields(inputs)})
        with self._naming_failures(self.estimator, record):
            result = self.estimator(record)

        for name, version in versions.items():
            if copies[name]._version != version or not _same_bits(copies[name], given[name]):
                raise self._written(name)
        return self._checked(result, inputs)

    def _checked(self, result: Advantages, inputs: EstimatorInputs) -> Advantages:
        if not isinstance(result, Advantages):
            raise OutputError(
                f"estimator {self.name!r}: expected Advantages, got {type(result).__name__}"
            )
        for name in ("advantages", "returns"):
            value = getattr(result, name)
            if value is None:
                continue
            at = f"estimator {self.name!r}: {name}"
            _check_per_token(at, value, inputs.num_tokens)
            if value.requires_grad:
                raise OutputError(
                    f"{at}: expected no gradient, got a tensor that requires one; detach it"
                )
            # One pass suffices for finite sums. Other sums are searched for the bad numbers.
            if math.isfinite(float(value.sum())):
                continue
            bad = (~torch.isfinite(value)).nonzero()
            if bad.numel():
                token = int(bad[0])
                sequence = int(torch.searchsorted(inputs.cu_seqlens, token, right=True)) - 1
                raise OutputError(
                    f"{at}: expected finite numbers, got {float(value[token])} first in sequence"
                    f" {sequence} at its token {token - int(inputs.cu_seqlens[sequence])}"
                    f" ({bad.numel()} of {value.numel()} tokens)"
                )
        for name, value in result.metrics.items():
            if not isinstance(value, torch.Tensor) or not value.numel() or value.requires_grad:
                raise OutputError(
                    f"estimator {self.name!r}: metrics[{name!r}]: expected a tensor with one number"
                    f" or more and no gradient, got {value!r}"
                )
        return result


class GuardedPolicyLoss(Guarded):
    """A policy loss behind its guard: `PolicyLossInputs` to a checked `PolicyLoss`.

    It hands over every field, declared or not, and does not look for NaN, since that would make the
    host wait for the device once a micro-batch. Where the inputs carry an entropy,
    `metrics["entropy"]` reports it for every loss.
    """

    kind = "policy loss"
    always = POLICY_LOSS_ALWAYS

    def __init__(
        self,
        name: str,
        loss: Callable[[PolicyLossInputs], PolicyLoss],
        needs: Collection[str],
        optional: Collection[str] = (),
    ) -> None:
        super().__init__(name, needs, optional)
        self.loss = loss

    @property
    def has_batch_stats(self) -> bool:
        """Return whether the loss wants to see the whole optimizer step before it is split."""
        return callable(getattr(self.loss, "batch_stats", None))

    @without_gradient
    def batch_stats(self, inputs: PolicyLossInputs) -> dict[str, Tensor]:
        """Compute `inputs.batch_stats` from the whole optimizer step; {} if the loss needs none."""
        if not self.has_batch_stats:
            return {}
        self._check_inputs(inputs)
        of_loss = self.loss.batch_stats  # type: ignore[attr-defined]
        with self._naming_failures(of_loss, inputs):
            stats: Mapping[str, Any] = of_loss(inputs)
        for name, value in stats.items():
            if not isinstance(value, torch.Tensor):
                raise OutputError(
                    f"policy loss {self.name!r}: batch_stats[{name!r}]: expected a tensor, got"
                    f" {type(value).__name__}"
                )
        return {name: value.detach() for name, value in stats.items()}

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        self._check_inputs(inputs)
        if self.has_batch_stats and inputs.batch_stats is None:
            raise MissingInputError(
                f"policy loss {self.name!r} needs 'batch_stats': call its batch_stats(inputs) on"
                " the whole optimizer step and pass the result in every micro-batch"
            )
        tensors = [(f.name, getattr(inputs, f.name)) for f in fields(inputs)]
        versions = {
            n: t._version
            for n, t in tensors
            if isinstance(t, torch.Tensor) and not t.is_inference()
        }
        with self._naming_failures(self.loss, inputs):
            result = self.loss(inputs)
        for name, version in versions.items():
            if getattr(inputs, name)._version != version:
                raise self._written(name)
        return self._checked(result, inputs)

    def _check_inputs(self, inputs: PolicyLossInputs) -> None:
        self.check_available(
            [f.name for f in fields(inputs) if getattr(inputs, f.name) is not None]
        )

    def _checked(self, result: PolicyLoss, inputs: PolicyLossInputs) -> PolicyLoss:
        if not isinstance(result, PolicyLoss):
            raise OutputError(
                f"policy loss {self.name!r}: expected PolicyLoss, got {type(result).__name__}"
            )
        _check_per_token(
            f"policy loss {self.name!r}: per_token", result.per_token, inputs.num_tokens
        )
        sizes = ((inputs.num_tokens,), (inputs.num_sequences,))
        for name, value in result.metrics.items():
            if not isinstance(value, torch.Tensor) or tuple(value.shape) not in sizes:
                got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise OutputError(
                    f"policy loss {self.name!r}: metrics[{name!r}]: expected [M] ="
                    f" [{inputs.num_tokens}] or [B] = [{inputs.num_sequences}], not reduced, got"
                    f" {got}"
                )
        metrics = {name: value.detach() for name, value in result.metrics.items()}
        if inputs.entropy is not None:
            metrics.setdefault("entropy", inputs.entropy.detach())
        return replace(result, metrics=metrics)


def _check_per_token(at: str, value: Tensor, num_tokens: int) -> None:
    if tuple(value.shape) != (num_tokens,):
        raise OutputError(f"{at}: expected shape [M] = [{num_tokens}], got {list(value.shape)}")
    if not value.is_floating_point():
        raise OutputError(f"{at}: expected a floating dtype, got {value.dtype}")


def _same_bits(value: Tensor, original: Tensor) -> bool:
    """Compare as integers, so that NaN equals NaN."""
    if value.shape != original.shape or value.dtype != original.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return torch.equal(value.contiguous().view(bits), original.contiguous().view(bits))
