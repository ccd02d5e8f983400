"""An estimator for runs to which something is done while they go: they wait until it was done."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from rlcore.algorithms import Advantages, EstimatorInputs
from rlcore.algorithms.estimators.grpo import GRPO

LIMIT_S = 300.0  # for the test to do what the run waits for
POLL_S = 0.01


class HeldGRPO(GRPO):
    """GRPO that waits for files: for each, once the log has so many rows.

    On a busy machine a test may come too late for a run of a few steps; this one waits for it.
    """

    def __init__(self, *, log: str, holds: dict[str, int]) -> None:
        super().__init__()
        self.log = Path(log)
        self.holds = {Path(path): rows for path, rows in holds.items()}

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        rows = self.log.read_bytes().count(b"\n") if self.log.exists() else 0
        deadline = time.monotonic() + LIMIT_S
        for path, after in self.holds.items():
            while rows >= after and not path.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nobody has made {path}")
                time.sleep(POLL_S)
        return super().__call__(inputs)


def held(folder: Path, holds: Mapping[Path, int]) -> str:
    """The setting of a run in `folder` that goes on behind so many rows once a file is there."""
    given = {
        "name": "tests.integration.held_estimator:HeldGRPO",
        "log": str(folder / "metrics.jsonl"),
        "holds": {str(path): rows for path, rows in holds.items()},
    }
    return f"algorithm.estimator={json.dumps(given)}"
