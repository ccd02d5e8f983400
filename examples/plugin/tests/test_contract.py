"""All that the framework and its users take for granted, and one number worked out by hand."""

import pytest
import torch
from pairwise_rl.estimator import Pairwise
from pairwise_rl.loss import Hopeful

from rlcore.algorithms import EstimatorInputs
from rlcore.algorithms.testing import check_estimator, check_policy_loss


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_estimator_keeps_the_contract(scale: float) -> None:
    check_estimator(Pairwise, scale=scale)


def test_the_loss_keeps_the_contract() -> None:
    check_policy_loss(Hopeful)


def test_three_samples_of_a_prompt() -> None:
    inputs = EstimatorInputs(
        cu_seqlens=torch.tensor([0, 1, 3, 4]),
        rewards=torch.tensor([0.2, 0.9, 0.2]),
        group_ids=torch.tensor([7, 7, 7]),
    )
    assert Pairwise()(inputs).advantages.tolist() == [-0.5, 1.0, 1.0, -0.5]
