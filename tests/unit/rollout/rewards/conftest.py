from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlcore.data.sample import FinishReason, Sample


@pytest.fixture(autouse=True)
def users_module_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


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
