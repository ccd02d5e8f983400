"""Predicts the checksums of a server's weights from the tensors that were sent to it.

A server stacks q on k on v, gate on up and the experts on one another, gives each tensor-parallel
rank its part, pads the vocabulary, and reports one hash for each tensor of each rank. This module
does the same with what was sent. A tensor that arrived damaged, in the wrong place, or not at all
has another hash, so its name is known.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import ConfigError
from rlcore.hf_config.read import read_config
from rlcore.weights import raw_bytes
from rollout.weight_sync.version_state import shorten

# model types whose layers SGLang stacks as below
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
VOCAB_PADDING = 64  # rows; times the number of ranks, unless that divides the padded rows

STACKED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip
SIZES = {"qkv_proj": 3, "gate_up_proj": 2}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")

TILE = 8192  # words of 32 bits that make one partial hash
TILES = 64  # hashed at a time, to bound the memory
WORD = (1 << 32) - 1
LONG = (1 << 64) - 1
SEED = 0x243F6A88
SEEDS = (SEED, (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & WORD)
# for each half: the factor and the rotation of an index
PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))


class FusedChecksums:
    """`rlcore.interfaces.WeightVerifier` for one SGLang server.

    Args:
        model: config.json of the model.
        ranks: of tensor parallelism.
        dtype: of the server's weights; None: that of what is sent.
        on_cuda: the server's weights are on a GPU, which hashes otherwise.

    Raises:
        ConfigError: it is not known how SGLang lays out the model's weights.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        *,
        ranks: int,
        dtype: torch.dtype | None,
        on_cuda: bool = False,
    ) -> None:
        family = model.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(
                "rollout.engine.verify_every: it is not known how SGLang lays out a model of type"
                f" {family} (known: {', '.join(FAMILIES)}): set it to 0"
            )
        self._kv_heads = int(model.get("num_key_value_heads") or model["num_attention_heads"])
        self._experts = int(model.get("num_experts") or model.get("num_local_experts") or 0)
        # On CUDA experts may lie in another order, for the kernels that the server chose.
        self.certain = not (on_cuda and self._experts)
        self._ranks = ranks
        self._dtype = dtype
        self._hash = hash_on_cuda if on_cuda else hash_on_cpu
        # the parts of each tensor of the server that is not whole yet: {index: part}
        self._stacks: dict[str, dict[int, Tensor]] = {}
        self._hashes: list[dict[str, str]] = [{} for _ in range(ranks)]

    @classmethod
    def of(cls, folder: str, *, ranks: int, dtype: str, device: str) -> FusedChecksums:
        """Make one for the Hugging Face model in `folder`.

        `dtype` and `device` are those of /server_info.
        """
        return cls(
            read_config(folder),
            ranks=ranks,
            dtype=None if dtype == "auto" else getattr(torch, dtype),
            on_cuda=device == "cuda",
        )

    def add(self, name: str, tensor: Tensor) -> None:
        """Record a tensor that is sent."""
        target, place, size = self._target(name)
        stack = self._stacks.setdefault(target, {})
        # A copy: the bucket's buffer is used again before a stack over two buckets is whole.
        stack[place] = tensor.detach().to(self._dtype or tensor.dtype, copy=True)
        if len(stack) == size:
            del self._stacks[target]
            for rank, hashes in enumerate(self._hashes):
                hashes[target] = self._hash(
                    [self._shard(target, i, stack[i], rank) for i in range(size)]
                )

    def mismatch(self, reported: Any) -> str | None:
        """Compare with `reported`, the `ranks` of the answer of /weights_checker."""
        if not isinstance(reported, list) or len(reported) != self._ranks:
            count = len(reported) if isinstance(reported, list) else "no"
            return f"checksums of {count} ranks, expected {self._ranks}"
        if self._stacks:
            return f"parts were never sent of {shorten(sorted(self._stacks))}"
        wrong = set()
        try:
            ranks = [answer["parallelism_info"][0]["tp_rank"] for answer in reported]
            if sorted(ranks) != list(range(self._ranks)):
                return f"checksums of ranks {ranks}, expected each of {self._ranks} once"
            for rank, answer in zip(ranks, reported):
                expected = self._hashes[rank]
                got = answer["checksums"]
                wrong |= {
                    name
                    for name in expected.keys() | got.keys()
                    if expected.get(name) != got.get(name)
                }
        # recovery: the engine is at fault, not the run
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            return (
                f"its checksums are not told as SGLang tells them ({type(error).__name__}: {error})"
            )
        return f"{len(wrong)} tensors differ: {shorten(sorted(wrong))}" if wrong else None

    def _target(self, name: str) -> tuple[str, int, int]:
        """Find the server's tensor that a published tensor is part of.

        Returns its name, the index of the part, and how many parts there are.
        """
        if match := EXPERT.fullmatch(name):
            experts = match[1]
            expert = int(match[2])
            kind = match[3]
            if kind == "down":
                return f"{experts}.w2_weight", expert, self._experts
            return f"{experts}.w13_weight", 2 * expert + (kind == "up"), 2 * self._experts
        owner, _, kind = name.rpartition(".")
        module = owner.rpartition(".")[2]
        if module in STACKED:
            stacked, place = STACKED[module]
            return f"{owner.removesuffix(module)}{stacked}.{kind}", place, SIZES[stacked]
        return name, 0, 1

    def _shard(self, target: str, place: int, tensor: Tensor, rank: int) -> Tensor:
        """The part of `tensor` that a rank holds."""
        module = target.rpartition(".")[0].rpartition(".")[2]
        if module == "qkv_proj" and place > 0:  # few heads: several ranks have the same
            parts = min(self._ranks, self._kv_heads)
            return tensor.chunk(parts)[rank * parts // self._ranks]
        if module in ("qkv_proj", "gate_up_proj") or target.endswith("w13_weight"):
            return tensor.chunk(self._ranks)[rank]
        if (module in ("o_proj", "down_proj") and tensor.dim() == 2) or target.endswith(
            "w2_weight"
        ):
            return tensor.chunk(self._ranks, dim=1)[rank]
        if module in ("embed_tokens", "lm_head"):
            return self._vocabulary(tensor, rank)
        return tensor

    def _vocabulary(self, tensor: Tensor, rank: int) -> Tensor:
        padded = round_up(len(tensor), VOCAB_PADDING)
        if padded % self._ranks:
            padded = round_up(len(tensor), VOCAB_PADDING * self._ranks)
        rows = padded // self._ranks
        held = tensor[rank * rows : (rank + 1) * rows]
        return torch.cat([held, held.new_zeros(rows - len(held), *held.shape[1:])])


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below `number`."""
    return -(-number // multiple) * multiple


# --- SGLang's hashes of a tensor, over the bytes of its parts -------------------------------------


def hash_on_cpu(parts: Sequence[Tensor]) -> str:
    """The beginning of the SHA-256 of all bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(raw_bytes(part))
    return digest.digest()[:8].hex()


def hash_on_cuda(parts: Sequence[Tensor]) -> str:
    """Hash as sglang.kernels.ops.memory.gpu_tensor_hash does, in torch, on the parts' device."""
    data = torch.cat([part.detach().contiguous().reshape(-1).view(torch.uint8) for part in parts])
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    total = 0
    for start in range(0, len(words), TILE * TILES):
        total += sum(hash_tiles(words[start : start + TILE * TILES], start, len(words)))
    return f"{split_mix(total & LONG) if len(words) else 0:016x}"


def hash_tiles(words: Tensor, start: int, count: int) -> list[int]:
    """Return a hash of 64 bits for each tile of `words`, int32 [w].

    They begin at word `start` of `count`.
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
    """MurmurHash3's finalizer of 32 bits, in int64.

    The products wrap around, but their low halves are right.
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
