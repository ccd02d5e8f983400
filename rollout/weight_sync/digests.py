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


class Digest:
    """The digest of one bucket, of which only `read` waits for a device.

    Make it before the bucket is received: what a GPU needs for it is copied there first, and a
    copy waits for what its stream has been given.

    Args:
        order: from `new_order`.

    Raises ValueError for an order that is none.
    """

    def __init__(self, order: str, device: torch.device) -> None:
        self._kind, _, text = order.partition(":")
        self._key = bytes.fromhex(text)
        if self._kind not in KINDS or len(self._key) != KEY_BYTES:
            raise ValueError(
                f"expected KIND:KEY with one of {', '.join(KINDS)}, got kind {self._kind!r}"
            )
        self._whole = hashlib.sha256(self._key)
        self._digits = _digits(self._key, device) if self._kind == "linear" else None
        self._sums: Tensor | None = None  # on the host, once `_ready`
        self._ready: torch.cuda.Event | None = None

    def take(self, flat: Tensor) -> None:
        """Give it the bucket: uint8 [n] on the device. The caller's stream computes the sums."""
        if self._digits is not None:
            self._whole.update(flat.numel().to_bytes(8, "little"))
            sums = _sums(flat, self._digits)
            self._digits = None
            if not sums.is_cuda:
                self._sums = sums
                return
            self._sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            self._sums.copy_(sums, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(sums.device))
        elif self._kind == "xxh3":
            self._whole.update(_xxh3(self._key, flat.cpu().numpy().data))
        else:
            self._whole.update(flat.cpu().numpy().data)

    def read(self) -> str:
        """Return the digest in hexadecimal, once."""
        if self._ready is not None:
            self._ready.synchronize()
        if self._sums is not None:
            self._whole.update(self._sums.numpy().data)
            self._sums = None
        return self._whole.hexdigest()


def digest(order: str, flat: Tensor) -> str:
    """Return the digest of uint8 [n] on any device. Raises ValueError as `Digest` does."""
    one = Digest(order, flat.device)
    one.take(flat)
    return one.read()


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


def _digits(key: bytes, device: torch.device) -> Tensor:
    """The digits of two keys for each byte of a row, on the device: int8 [ROW, 16]."""
    drawn = bytearray(hashlib.shake_256(key).digest(ROW * 2 * DIGITS))
    digits = torch.frombuffer(drawn, dtype=torch.int8).view(ROW, 2 * DIGITS)
    if device.type == "cuda":  # from pinned memory, else the host would wait for the stream
        return digits.pin_memory().to(device, non_blocking=True)
    return digits.to(device)


def _sums(flat: Tensor, digits: Tensor) -> Tensor:
    """The sums of all rows, int64 [rows, 2]; bytes that fill no row are followed by zeros."""
    missing = -flat.numel() % ROW
    whole = flat[: flat.numel() - (ROW - missing if missing else 0)]
    sums = [_products(whole.view(torch.int8).view(-1, ROW), digits)] if len(whole) else []
    if missing:
        last = torch.zeros(ROW, dtype=torch.int8, device=flat.device)
        rest = flat[whole.numel() :].view(torch.int8)
        last[: rest.numel()] = rest
        sums.append(_products(last.view(1, ROW), digits))
    if not sums:
        return torch.empty(0, 2, dtype=torch.int64)
    products = torch.cat(sums).view(-1, 2, DIGITS)
    places = 1 << (8 * torch.arange(DIGITS, device=flat.device))
    return (products * places).sum(-1)


def _products(rows: Tensor, digits: Tensor) -> Tensor:
    """The exact product of int8 [n, ROW] and int8 [ROW, 16]: int64 [n, 16]."""
    if rows.is_cuda and rows.size(0) > 16 and rows.data_ptr() % 16 == 0:
        return torch._int_mm(rows, digits).long()  # its kernels ask for that many rows
    exact = digits.double()  # every sum is below 2**53
    return torch.cat([(block.double() @ exact).long() for block in rows.split(ROWS)])
