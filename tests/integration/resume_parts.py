"""The plugins of the runs in test_resume.py. A module of its own: worker processes import the reward."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import torch

from rlcore.algorithms import Advantages, EstimatorInputs
from rlcore.algorithms.estimators.grpo import GRPO
from rlcore.data.sample import Sample


def share_of_digits(sample: Sample) -> float:
    """How much of the response is digits: differs between the samples of an untrained model."""
    return sum(symbol.isdigit() for symbol in sample.response_text) / max(len(sample.response_text), 1)


def stalling_share_of_digits(sample: Sample) -> float:
    """As above, until the file named by STALL_FILE has STALL_LINES lines; then no answer comes for minutes."""
    watched = Path(os.environ["STALL_FILE"])
    if watched.exists() and watched.read_bytes().count(b"\n") >= int(os.environ["STALL_LINES"]):
        time.sleep(300)
    return share_of_digits(sample)


class NoisyGRPO:
    """GRPO with noise from every global generator: a resumed run has to find them where they were."""

    def __init__(self) -> None:
        self.exact = GRPO()

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        result = self.exact(inputs)
        noise = torch.randn_like(result.advantages) + random.gauss(0, 1) + float(np.random.standard_normal())
        return Advantages(result.advantages + 0.1 * noise, returns=result.returns)
