from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.data.sample import FinishReason, Sample
from rollout.rewards import pool


@pytest.fixture(autouse=True)
def users_module_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


@pytest.fixture
def only_what_hangs_is_late(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Called with a response: all other samples have a minute, on a machine that is busy."""
    call = pool.Worker.call

    def keep(response: str) -> None:
        def patient(worker: pool.Worker, part: str, one: Sample, seconds: float) -> Any:
            return call(worker, part, one, seconds if one.response_text == response else 60.0)

        monkeypatch.setattr(pool.Worker, "call", patient)

    return keep


@pytest.fixture
def sample() -> Callable[..., Sample]:
    """A sample with the given response text."""

    def make(
        response: str,
        label: object = "2",
        *,
        index: int = 0,
        finish_reason: FinishReason = "stop",
        **metadata,
    ) -> Sample:
        return Sample(
            draw=4,
            index=index,
            prompt_id="book.jsonl:7",
            group_id=4,
            rollout_id=index,
            tokens=np.array([3, 4], dtype=np.int32),
            loss_mask=np.zeros(2, dtype=np.uint8),
            rollout_logprobs=np.zeros(0, dtype=np.float32),
            versions=(),
            finish_reason=finish_reason,
            prompt_text="1+1=",
            response_text=response,
            label=label,
            metadata=metadata,
        )

    return make
