"""Recorded expert choices of an engine: int16 [t, layers with experts, experts a token].

-1 means not recorded. Row i belongs to token i of a sequence, prompt included. A record may end
before the sequence does: the last token of a response is never fed to the engine.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[np.int16]


def join_experts(records: Sequence[Experts]) -> Experts:
    """Join the records of the completions of a sample with several turns.

    A token's first record counts, with which it was made. A completion that was aborted before its
    first token has an empty record, which knows neither layers nor experts.
    """
    joined = records[0]
    for record in records[1:]:
        if len(record) > len(joined):
            joined = np.concatenate([joined, record[len(joined) :]]) if len(joined) else record
    return joined


def pad_experts(record: Experts | None, num_tokens: int, shape: tuple[int, ...]) -> Experts:
    """Pad a record to [num_tokens, *shape], with -1 behind its end."""
    padded = np.full((num_tokens, *shape), -1, dtype=np.int16)
    if record is not None and len(record):
        padded[: len(record)] = record
    return padded


def encode_experts(record: Experts) -> dict[str, Any]:
    """Encode a record as JSON-able values: base64 of little-endian bytes."""
    return {
        "shape": list(record.shape),
        "data": base64.b64encode(record.astype("<i2").tobytes()).decode(),
    }


def decode_experts(value: dict[str, Any]) -> Experts:
    """Decode what `encode_experts` made."""
    flat = np.frombuffer(base64.b64decode(value["data"]), dtype="<i2")
    return flat.astype(np.int16).reshape(value["shape"])
