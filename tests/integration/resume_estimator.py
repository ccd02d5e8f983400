"""An estimator for test_resume.py, by import path."""

from __future__ import annotations

import random

import numpy as np
import torch

from rlcore.algorithms import Advantages, EstimatorInputs
from rlcore.algorithms.estimators.grpo import GRPO


class NoisyGRPO:
    """GRPO with noise from every global generator: a resume has to restore their state."""

    def __init__(self) -> None:
        self.exact = GRPO()

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        result = self.exact(inputs)
        noise = (
            torch.randn_like(result.advantages)
            + random.gauss(0, 1)
            + float(np.random.standard_normal())
        )
        return Advantages(result.advantages + 0.1 * noise, returns=result.returns)
