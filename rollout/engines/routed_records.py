"""Records of routed experts in the answers of a server, read in small steps.

A sample of 8,192 tokens of Qwen3-235B-A22B has 33 MB of them. To parse and decode that in one piece
holds Python's lock for half a second, in which the event loop, in whatever thread, stands still:
probes come late, and requests wait. So a record is cut out of the JSON, and decoded in another
thread, piece by piece.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

LARGE = 1 << 20  # bytes of an answer that is searched for records
PIECE = 1 << 18  # bytes of a record that are decoded at once
MARK = b'"routed_experts":"'


def parse(content: bytes) -> Any:
    """Parse the JSON of an answer; a record in a large one becomes a view of its bytes.

    Raises orjson.JSONDecodeError. A text cannot hold the mark: its quotes would be escaped.
    """
    if len(content) < LARGE or MARK not in content:
        return orjson.loads(content)
    view = memoryview(content)
    parts: list[bytes | memoryview] = []
    records: list[memoryview] = []
    at = 0
    while (found := content.find(MARK, at)) >= 0:
        start = found + len(MARK)
        end = content.find(b'"', start)
        if end < 0:
            break
        parts += [view[at:start], str(len(records)).encode()]
        records.append(view[start:end])
        at = end
    value = orjson.loads(b"".join([*parts, view[at:]]))
    for part in value if isinstance(value, list) else [value]:
        meta = part.get("meta_info") if isinstance(part, dict) else None
        if isinstance(meta, dict) and isinstance(meta.get("routed_experts"), str):
            meta["routed_experts"] = records[int(meta["routed_experts"])]
    return value


def decode(
    record: str | memoryview, shape: tuple[int, int, int], piece: int = PIECE
) -> Iterator[NDArray[np.int32]]:
    """Yield int32 [tokens of a piece, layers, topk] of a record in base64.

    Args:
        shape: tokens, layers and topk of the whole record.

    Raises ValueError if it is not such a record.
    """
    tokens, *each = shape
    row = 4 * int(np.prod(each))
    chars = memoryview(record.encode()) if isinstance(record, str) else record
    if len(chars) != -(-tokens * row // 3) * 4:
        raise ValueError(
            f"{len(chars) * 3 // 16} routed experts, expected {tokens} tokens x {each[0]} layers x"
            f" {each[1]}"
        )
    # Three bytes are four characters, so every piece but the last has a multiple of three.
    step = max(1, piece // (3 * row)) * 3
    for first in range(0, tokens, step):
        count = min(step, tokens - first)
        part = chars[first * row // 3 * 4 : -(-(first + count) * row // 3) * 4]
        flat: NDArray[np.int32] = np.frombuffer(
            binascii.a2b_base64(part, strict_mode=True), dtype="<i4"
        )
        yield flat.reshape(count, *each)
