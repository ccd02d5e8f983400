"""Keyed digests of the bytes of a bucket, which both ends of a transport compute and compare.

A bucket goes over a channel without authentication, a process group. Its `order`, "KIND:KEY" with a
new random key, goes over the control channel of the engine, which takes the admin key, and the
engine's digest comes back the same way. So whoever changes bytes on their way does not know how
they are judged. The kinds:

    xxh3     XXH3 of 128 bits, for bytes in host memory: as fast as they are read. Each piece of
             `PIECE` bytes has a seed of its own, and the key chooses where the first piece ends. It
             is no cryptographic function: what it is good for stands on its key being unknown.
    linear   two sums of signed bytes times keys of 64 bits, modulo 2**64, for every row of `ROW`
             bytes. Other bytes have the same sums with a probability of at most 2**-114 for one who
             does not know the keys. Made of torch's operations, so it runs where the bytes are;
             only the sums go to the host.
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
ROW = 8192  # bytes; times 2**14, the largest product, their sum fits into 32 bits
ROWS = 2048  # that are computed at once in float64
DIGITS = 8  # a key is a number of so many signed digits of 8 bits, each of them random
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
    drawn = bytearray(hashlib.shake_256(key).digest(ROW * 2 * DIGITS))
    digits = torch.frombuffer(drawn, dtype=torch.int8).view(ROW, 2 * DIGITS).to(flat.device)
    missing = -flat.numel() % ROW
    whole = flat[: flat.numel() - (ROW - missing if missing else 0)]
    sums = [_products(whole.view(torch.int8).view(-1, ROW), digits)] if len(whole) else []
    if missing:
        last = torch.zeros(ROW, dtype=torch.int8, device=flat.device)
        rest = flat[whole.numel() :].view(torch.int8)
        last[: rest.numel()] = rest
        sums.append(_products(last.view(1, ROW), digits))
    if not sums:
        return b""
    products = torch.cat(sums).view(-1, 2, DIGITS)
    places = torch.tensor([256**place for place in range(DIGITS)], device=flat.device)
    return (products * places).sum(-1).cpu().numpy().tobytes()


def _products(rows: Tensor, digits: Tensor) -> Tensor:
    """The exact product of int8 [n, ROW] and int8 [ROW, 16]: int64 [n, 16]."""
    if rows.is_cuda and rows.size(0) > 16 and rows.data_ptr() % 16 == 0:
        return torch._int_mm(rows, digits).long()  # its kernels ask for that many rows
    exact = digits.double()  # every sum is below 2**53
    return torch.cat([(block.double() @ exact).long() for block in rows.split(ROWS)])
