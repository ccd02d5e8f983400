"""Filters, estimators and losses that go wrong, for the tests of bad input and of failures."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from rlcore.algorithms import Advantages, EstimatorInputs, PolicyLoss, PolicyLossInputs
from rlcore.data.sample import Sample

# --- filters --------------------------------------------------------------------------------------


def drops_all(group: Sequence[Sample]) -> bool:
    return False


# --- estimators and losses ------------------------------------------------------------------------


class Zero:
    """Advantages of 0, and a keyword."""

    needs: frozenset[str] = frozenset()

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        return Advantages(torch.zeros(int(inputs.cu_seqlens[-1])))


class RaisesInStep2(Zero):
    calls = 0

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        self.calls += 1
        if self.calls == 2:
            raise ZeroDivisionError("no samples of this kind")
        return super().__call__(inputs)


class OtherMetricsOnRank1:
    """A loss that reports one metric on rank 0 and others on rank 1, as it may by its tokens."""

    needs: frozenset[str] = frozenset()

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        zeros = torch.zeros_like(inputs.advantages)
        metrics = {"zero": zeros}
        if os.environ.get("RANK") == "1":
            metrics = {"one": zeros + 1, "two": zeros + 2}
        return PolicyLoss(-inputs.advantages * inputs.logprobs, metrics)


class _Rank1FailsAtUpdate3:
    """A loss like any other, but for what `fail` does on rank 1."""

    needs: frozenset[str] = frozenset()
    updates = 0

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        self.updates += 1
        if os.environ.get("RANK") == "1" and self.updates >= 3:
            self.fail()
        return PolicyLoss(-inputs.advantages * inputs.logprobs, {})

    def fail(self) -> None:
        raise NotImplementedError


class Rank1Raises(_Rank1FailsAtUpdate3):
    def fail(self) -> None:
        raise ArithmeticError("only rank 1 sees this")


class Rank1Hangs(_Rank1FailsAtUpdate3):
    def fail(self) -> None:
        time.sleep(1000)
