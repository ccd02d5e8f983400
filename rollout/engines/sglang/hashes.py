"""SGLang's hashes of a tensor, of the bytes of its parts one after the other: SHA-256 on the CPU,
arithmetic on CUDA.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

TILE = 8192  # words of 32 bits that make one partial hash
TILES = 64  # taken at a time, for the sake of memory
WORD = (1 << 32) - 1
LONG = (1 << 64) - 1
SEED = 0x243F6A88
SEEDS = (SEED, (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & WORD)
# of each half: what an index is multiplied with, and rotated by
PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))


def hash_on_cpu(parts: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(as_bytes(part).cpu().numpy().data)
    return digest.digest()[:8].hex()


def hash_on_cuda(parts: Sequence[Tensor]) -> str:
    """As sglang.kernels.ops.memory.gpu_tensor_hash, in torch and on whatever device the parts are."""
    data = torch.cat([as_bytes(part) for part in parts])
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    total = 0
    for start in range(0, len(words), TILE * TILES):
        total += sum(hash_tiles(words[start : start + TILE * TILES], start, len(words)))
    return f"{split_mix(total & LONG) if len(words) else 0:016x}"


def hash_tiles(words: Tensor, start: int, count: int) -> list[int]:
    """Of each tile of `words`, int32 [w], which begin at word `start` of `count`: a hash of 64
    bits.
    """
    tiles = -(-len(words) // TILE)
    index = torch.arange(start, start + len(words), device=words.device)
    halves = []
    for (factor, turn), seed in zip(PLACES, SEEDS):
        low = index & WORD
        place = (low * factor + seed & WORD) ^ (low << turn | low >> 32 - turn) & WORD
        mixed = mix(words.long() & WORD ^ place)
        sums = (
            torch.nn.functional.pad(mixed, (0, tiles * TILE - len(mixed))).view(tiles, TILE).sum(1)
            & WORD
        )
        halves.append(mix(sums ^ (count * 4 & WORD)).tolist())
    return [high << 32 | low for high, low in zip(*halves)]


def mix(x: Tensor) -> Tensor:
    """MurmurHash3's finalizer of 32 bits, in int64: its products wrap around, and their low halves
    are right.
    """
    x = x ^ x >> 16
    x = x * 0x85EBCA6B & WORD
    x = x ^ x >> 13
    x = x * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def split_mix(x: int) -> int:
    """SplitMix64's finalizer."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & LONG
    x = (x ^ x >> 27) * 0x94D049BB133111EB & LONG
    return x ^ x >> 31


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
