"""An estimator for test_colocated.py that kills the engine while the trainer has the GPU."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from rlcore.algorithms import Advantages, EstimatorInputs
from rlcore.algorithms.estimators.grpo import GRPO


class EngineKiller:
    """GRPO that kills the engines below this process at its second call, once for each `marker`."""

    def __init__(self, marker: str) -> None:
        self.exact = GRPO()
        self.marker = Path(marker)
        self.calls = 0

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        self.calls += 1
        if self.calls == 2 and not self.marker.exists():
            self.marker.touch()
            engines = [
                p
                for p in psutil.Process(os.getpid()).children(recursive=True)
                if "rollout.engines.embedded.server" in p.cmdline()
            ]
            assert engines
            for engine in engines:
                engine.kill()
        return self.exact(inputs)
