"""A keyed digest of all that a rank receives in a publication, which both ends compute and compare.

Weights go over a channel without authentication, a process group. The `order` of their digest,
"KIND:KEY" with a new random key, goes over the control channel of the engine, which takes the admin
key, and the engine's digest comes back the same way. So whoever changes bytes on their way does not
know how they are judged. The kinds:

    xxh3     XXH3 of 128 bits, for bytes in host memory: as fast as they are read. Each piece of
             `PIECE` bytes has a seed of its own, and the key chooses where the first piece ends. It
             is no cryptographic function: what it is good for stands on its key being unknown.
    linear   two sums of signed bytes times keys of 64 bits, modulo 2**64, for every row of `ROW`
             bytes. Other bytes have the same sums with a probability of at most 2**-114 for one who
             does not know the keys. Made of torch's operations, so it runs where the bytes are;
             only the sums go to the host.

The engines' environment does not have rlcore: SGLang's processes load this file by its path. It
imports nothing of ours.
"""

from __future__ import annotations

import hashlib
import secrets

import torch
import xxhash
from torch import Tensor

KINDS = ("xxh3", "linear")
PIECE = 1 << 20  # bytes
ROW = 8192  # bytes; times 2**14, the largest product, their sum fits into 32 bits
ROWS = 2048  # that are computed at once in float64
DIGITS = 8  # a key is a number of so many signed digits of 8 bits, each of them random
SEED_BYTES = 8
KEY_BYTES = 32


def new_order(kind: str) -> str:
    """Make an order for the digest of one publication."""
    return f"{kind}:{secrets.token_hex(KEY_BYTES)}"


class Digest:
    """The digest of the buckets of one publication, in their order.

    Args:
        order: from `new_order`.

    Raises ValueError for anything else.
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
        self._digits: Tensor | None = None  # where the buckets are, from the first one on
        # of the newest buckets: bytes, and sums on the host, which are there after the event
        self._unread: list[tuple[int, Tensor, torch.cuda.Event | None]] = []

    def add(self, flat: Tensor) -> None:
        """Add a bucket: uint8 [n], all on one device. The caller's stream computes the sums.

        Waits for the device until the sums of all buckets but the last one and this are there.
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
    """Copy sums to the host without waiting. Returns the copy, and when it is filled."""
    if not sums.is_cuda:
        return sums, None
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    host.copy_(sums, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(sums.device))
    return host, ready


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
