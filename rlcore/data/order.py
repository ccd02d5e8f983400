"""The order in which the rows of a data set are drawn, and its change when a run resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.errors import DataError


@lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of pass `epoch`, int64 [size]: a pure function of the arguments.

    Philox words are sorted instead of calling numpy's `permutation`, whose algorithm may change
    between versions.
    """
    words = np.random.Philox(key=np.array([seed & (2**64 - 1), epoch], dtype=np.uint64)).random_raw(
        size
    )
    return np.argsort(words, kind="stable")


def check_order(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse another order than that of the saved run.

    Raises:
        DataError: names the keys and their values then.
    """
    changed = [key for key in now if key in saved and saved[key] != now[key]]
    if changed:
        before = " and ".join(f"{key}: {json.dumps(saved[key])}" for key in changed)
        raise DataError(
            f"the run was saved with {before}, and the rows of this pass would come in another"
            " order: some twice, others never; resume with the same, or start a new run from its"
            " weights"
        )
