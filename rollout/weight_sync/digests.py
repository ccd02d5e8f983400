"""Keyed digests of the bytes of a bucket, which both ends of a transport compute and compare.

A bucket goes over a channel without authentication, a process group. Its `order`, "KIND:KEY" with a
new random key, goes over the control channel of the engine, which takes the admin key, and the
engine's digest comes back the same way. So whoever changes bytes on their way does not know how
they are judged. The kinds:

    xxh3     XXH3 of 128 bits, for bytes in host memory: as fast as they are read. Each piece of
             `PIECE` bytes has a seed of its own, and the key chooses where the first piece ends. It
             is no cryptographic function: what it is good for stands on its key being unknown.
    linear   two sums of 32-bit words times keys of 64 bits, modulo 2**64, for every row of
             `ROW` words. Other bytes have the same sums with a probability of at most 2**-66 for
             one who does not know the keys. Made of torch's operations, so it runs where the bytes
             are; only the sums go to the host.
    sha256   SHA-256 of key and bytes, on the host.

The engines' environment does not have rlcore: SGLang's processes load this file by its path. It
imports nothing of ours.
"""

from __future__ import annotations

import hashlib
import secrets

import torch
import xxhash
from torch import Tensor

KINDS = ("xxh3", "linear", "sha256")
PIECE = 1 << 20  # bytes
ROW = 4096  # words
ROWS = 2048  # that are computed at once: the temporary tensors have 16 times the bytes of a word
SEED_BYTES = 8
KEY_BYTES = 32


def new_order(kind: str) -> str:
    """Make an order for one bucket."""
    return f"{kind}:{secrets.token_hex(KEY_BYTES)}"


def digest(order: str, flat: Tensor) -> str:
    """Return the digest of uint8 [n] on any device, in hexadecimal.

    Raises ValueError for an order that is none.
    """
    kind, _, text = order.partition(":")
    key = bytes.fromhex(text)
    if kind not in KINDS or len(key) != KEY_BYTES:
        raise ValueError(f"expected KIND:KEY with one of {', '.join(KINDS)}, got kind {kind!r}")
    whole = hashlib.sha256(key)
    if kind == "linear":
        whole.update(flat.numel().to_bytes(8, "little"))
        whole.update(_linear(key, flat))
    elif kind == "xxh3":
        whole.update(_xxh3(key, flat.cpu().numpy().data))
    else:
        whole.update(flat.cpu().numpy().data)
    return whole.hexdigest()


def _xxh3(key: bytes, data: memoryview) -> bytes:
    """The hashes of the pieces, one after the other."""
    count = 2 + len(data) // PIECE
    seeds = memoryview(hashlib.shake_256(key).digest((1 + count) * SEED_BYTES)).cast("Q")
    ends = range(1 + seeds[0] % PIECE, len(data) + PIECE, PIECE)
    starts = [0, *ends]
    return b"".join(
        xxhash.xxh3_128_digest(data[start:end], seed)
        for start, end, seed in zip(starts, ends, seeds[1:])
    )


def _linear(key: bytes, flat: Tensor) -> bytes:
    """The sums of all rows; bytes that fill no row are followed by zeros."""
    row_bytes = 4 * ROW
    missing = -flat.numel() % row_bytes
    whole = flat[: flat.numel() - (row_bytes - missing if missing else 0)]
    rows = whole.view(torch.int32).view(-1, ROW)
    sums = [_sums(key, block) for block in rows.split(ROWS)] if len(rows) else []
    if missing:
        last = flat.new_zeros(row_bytes)
        rest = flat[whole.numel() :]
        last[: rest.numel()] = rest
        sums.append(_sums(key, last.view(torch.int32).view(1, ROW)))
    return torch.cat(sums).cpu().numpy().tobytes() if sums else b""


def _sums(key: bytes, rows: Tensor) -> Tensor:
    """Two sums a row: int64 [n, 2] of int32 [n, ROW]."""
    words = rows.to(torch.int64)
    drawn = bytearray(hashlib.shake_256(key).digest(2 * ROW * SEED_BYTES))
    keys = torch.frombuffer(drawn, dtype=torch.int64).view(2, ROW).to(rows.device)
    return torch.stack([(words * one).sum(1) for one in keys], 1)
