"""A keyed digest of all bytes that a rank receives in a publication, computed at both ends.

Weights are sent over a process group, which is a channel without authentication. The `order` of
their digest, "KIND:KEY" with a new random key, is sent over the engine's control channel, which
requires the admin key, and the engine's digest comes back the same way. An attacker who changes
bytes on the way therefore does not know the key. The kinds:

    xxh3     XXH3 of 128 bits, for bytes in host memory: as fast as they are read. Each piece of
             `PIECE` bytes has its own seed, and the key chooses where the first piece ends. XXH3 is
             not a cryptographic function: it protects only while the key is unknown.
    linear   two sums of signed bytes times keys of 64 bits, modulo 2**64, for every row of `ROW`
             bytes. Without the keys, other bytes have the same sums with a probability of at most
             2**-114. Made of torch's operations, so it runs where the bytes are; only the sums are
             copied to the host.

The engines' environment does not have rlcore: SGLang's processes load this file by its path. The
file therefore imports nothing from rlcore.
"""

from __future__ import annotations

import hashlib
import secrets

import torch
import xxhash
from torch import Tensor

KINDS = ("xxh3", "linear")
PIECE = 1 << 20  # bytes
ROW = 8192  # bytes; times 2**14, the largest product, a row's sum fits into 32 bits
ROWS = 2048  # rows computed at once in float64
DIGITS = 8  # random signed digits of 8 bits in a key
SEED_BYTES = 8
KEY_BYTES = 32


def new_order(kind: str) -> str:
    """Make an order for the digest of one publication."""
    return f"{kind}:{secrets.token_hex(KEY_BYTES)}"


class Digest:
    """The digest of the buckets of one publication, in their order.

    Args:
        order: made by `new_order`. Raises ValueError for any other text.
    """

    def __init__(self, order: str) -> None:
        self.order = order
        self._kind, _, text = order.partition(":")
        self._key = bytes.fromhex(text)
        if self._kind not in KINDS or len(self._key) != KEY_BYTES:
            raise ValueError(
                f"expected KIND:KEY with one of {', '.join(KINDS)}, got kind {self._kind!r}"
            )
        self._whole = hashlib.sha256(self._key)
        self._count = 0
        # on the buckets' device; made for the first bucket
        self._digits: Tensor | None = None
        # Size and sums of the newest buckets; the sums are on the host once the event is done.
        self._unread: list[tuple[int, Tensor, torch.cuda.Event | None]] = []

    def add(self, flat: Tensor) -> None:
        """Add a bucket, uint8 [n]; all are on one device. The caller's stream computes the sums.

        Waits for the sums of all buckets except this one and the previous one.
        """
        if self._kind == "xxh3":
            key = self._key + self._count.to_bytes(8, "little")
            self._hash(flat.numel(), _xxh3(key, flat.cpu().numpy().data))
        else:
            if self._digits is None:
                self._digits = _digits(self._key, flat.device)
            self._unread.append((flat.numel(), *_on_host(_sums(flat, self._digits))))
            self._read(keep=1)
        self._count += 1

    def wait(self) -> None:
        """Return when the device has read all buckets."""
        self._read(keep=0)

    def read(self) -> str:
        """Return the digest of all buckets so far in hexadecimal."""
        self.wait()
        return self._whole.hexdigest()

    def _read(self, keep: int) -> None:
        while len(self._unread) > keep:
            size, sums, ready = self._unread.pop(0)
            if ready is not None:
                ready.synchronize()
            self._hash(size, sums.numpy().tobytes())

    def _hash(self, size: int, found: bytes) -> None:
        self._whole.update(size.to_bytes(8, "little") + found)


def _on_host(sums: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Copy sums to the host without waiting. Returns the copy, and the event that completes it."""
    if not sums.is_cuda:
        return sums, None
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    host.copy_(sums, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(sums.device))
    return host, ready


def _xxh3(key: bytes, data: memoryview) -> bytes:
    """The concatenated hashes of the pieces."""
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
    # Copied from pinned memory, so that the host does not wait for the stream.
    if device.type == "cuda":
        return digits.pin_memory().to(device, non_blocking=True)
    return digits.to(device)


def _sums(flat: Tensor, digits: Tensor) -> Tensor:
    """The sums of all rows, int64 [rows, 2]; the last row is padded with zeros."""
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
    weights = 1 << (8 * torch.arange(DIGITS, device=flat.device))
    return (products * weights).sum(-1)


def _products(rows: Tensor, digits: Tensor) -> Tensor:
    """The exact product of int8 [n, ROW] and int8 [ROW, 16]: int64 [n, 16]."""
    if rows.is_cuda and rows.size(0) > 16 and rows.data_ptr() % 16 == 0:
        # The kernels of `_int_mm` need more than 16 rows.
        return torch._int_mm(rows, digits).long()
    # float64 is exact here: every sum is below 2**53.
    exact = digits.double()
    return torch.cat([(block.double() @ exact).long() for block in rows.split(ROWS)])
