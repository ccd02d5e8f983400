"""Metrics that a configuration holds at one number are not logged; no other is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlcore.algorithms import (
    METRICS,
    Moments,
    PolicyLoss,
    PolicyLossInputs,
    metric_spec,
    policy_loss_names,
    value_clipped,
)
from rlcore.config import Config
from rlcore.trainer.objective import Objective
from rlcore.trainer.step_metrics import constant_metrics

LENGTHS = (4, 3, 5)
SIZE = sum(LENGTHS)
CU = torch.tensor([0, *LENGTHS]).cumsum(0)


class OwnLoss:
    """A loss of a plugin that clips against the engine."""

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        return PolicyLoss(-inputs.logprobs, {"clipfrac": torch.full((SIZE,), 0.5)})


def config(**algorithm: Any) -> Config:
    return Config.model_validate({
        "run": {"name": "constant"}, "model": {"path": "unused"}, "data": {"paths": ["unused"]},
        "training": {"steps": 1}, "algorithm": algorithm,
    })  # fmt: skip


def noise(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def measured(given: Config, *, moved: float, seed: int) -> dict[str, float]:
    """The metrics of an update whose policy and critic have `moved` since the old ones."""
    objective = Objective(given.algorithm)
    old = -noise(seed).abs() - 0.1
    logprobs = (old + moved * noise(seed + 1)).requires_grad_()
    inputs = PolicyLossInputs(
        cu_seqlens=CU, logprobs=logprobs, old_logprobs=old, advantages=noise(seed + 2),
        entropy=noise(seed + 3).abs(), weights=torch.full((SIZE,), 1 / SIZE),
        rollout_logprobs=old + 0.1 * noise(seed + 4), sequence_ids=torch.arange(len(LENGTHS)),
    )  # fmt: skip
    if objective.loss.has_batch_stats:
        inputs = replace(inputs, batch_stats=objective.loss.batch_stats(inputs))
    moments = Moments()
    assert inputs.weights is not None
    moments.add_objective(objective(inputs), inputs.weights)
    values = noise(seed + 5)
    clipped = value_clipped(values + moved * noise(seed + 6), values, noise(seed + 7), 0.01)
    assert clipped is not None
    moments.add("value_clipfrac", clipped)
    return moments.reduce()


@pytest.mark.parametrize("name", [name for name in policy_loss_names() if name != "sft"])
def test_exactly_what_cannot_vary_is_left_out(name: str) -> None:
    """What has the same value at every policy, on any data, where it has not moved."""
    given = config(loss={"name": name})
    still = [measured(given, moved=0.0, seed=seed) for seed in (0, 100, 200)]
    assert constant_metrics(given) <= METRICS.keys() | {"policy/sequence_ratio_avg"}
    constant = {key for key in still[0] if len({one[key] for one in still}) == 1}
    assert constant & constant_metrics(given) == constant_metrics(given) & still[0].keys()
    moving = [measured(given, moved=2.0, seed=seed) for seed in (0, 100, 200)]
    varying = {key for key in moving[0] if len({one[key] for one in moving}) > 1}
    assert constant & varying == constant_metrics(given) & varying
    assert all(metric_spec(key) for key in constant_metrics(given))


@pytest.mark.parametrize(
    "algorithm",
    [
        {"minibatches": 2},
        {"epochs": 2},
        {"old_logprobs": "rollout"},
        {"loss": {"name": f"{__name__}:OwnLoss"}},
    ],
)
def test_where_the_policy_is_compared_with_another_nothing_of_it_is_left_out(
    algorithm: dict[str, Any],
) -> None:
    several = {"minibatches", "epochs"} & algorithm.keys()
    assert constant_metrics(config(**algorithm)) == (set() if several else {"val/clipfrac_avg"})


def test_the_distance_of_a_step_is_never_left_out() -> None:
    assert "policy/step_kl" in METRICS
    assert "policy/step_kl" not in constant_metrics(config())
