from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlcore.data.sample import Sample, VersionSpan


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    """Samples of a 2-token prompt and a 3-token response, made by versions 4 and 5."""

    def make(draw: int = 0, **fields: object) -> Sample:
        values: dict[str, object] = {
            "draw": draw,
            "index": 0,
            "prompt_id": "train.jsonl:1",
            "group_id": draw,
            "rollout_id": draw,
            "tokens": np.array([7, 8, 9, 10, 2], dtype=np.int32),
            "loss_mask": np.array([0, 0, 1, 1, 1], dtype=np.uint8),
            "rollout_logprobs": np.array([-0.1, -1e-7, -3.3], dtype=np.float32),
            "versions": (VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)),
            "finish_reason": "stop",
            "reward": 1.0,
            "reward_parts": {"exact_match": 1.0},
            "prompt_text": "12+34=",
            "response_text": "46",
            "label": "46",
        }
        return Sample(**{**values, **fields})  # type: ignore[arg-type]

    return make
