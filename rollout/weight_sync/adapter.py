"""SGLang engines take adapters from the body of a request, as an adapter with a name of its own."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import Tensor
from torch.nn.functional import pad

from rlcore.interfaces import BucketSender, Orders
from rlcore.weights import PEFT_PREFIX, Bucket, raw_bytes
from rollout.weight_sync.base import Failures, Transport, ask
from rollout.weight_sync.tensor import encode


@dataclass(frozen=True)
class PackedAdapter:
    """The adapters of a publication."""

    payload: str  # a pickled dict of tensors, in base64
    rank: int
    checksums: Mapping[str, str]  # SHA-256 by name


class AdapterTransport(Transport):
    """Passes rank 0's adapters to `engine.receive_adapter(index, packed)`."""

    name = "adapter"

    def orders(self) -> Orders:
        """Have rank 0 pack the adapters."""
        return Orders(self.name, {0: None})

    async def send(self, index: int, packed: Mapping[int, str]) -> Failures:
        """Send the engines what `AdapterSender` has packed."""
        found = PackedAdapter(**json.loads(packed[0]))
        answers = await ask(
            self._engines,
            "receive_adapter",
            lambda e: e.receive_adapter(index, found),
            self._timeout_s,
        )
        self._engines = [engine for engine in self._engines if engine not in answers.failed]
        return answers.failed

    async def complete(self, result: object) -> Failures:
        """Do nothing: `send` has waited for the engines."""
        return {}


class AdapterSender(BucketSender):
    """Packs adapters as a pickled dict, which is what SGLang's route takes."""

    def pack(self, bucket: Bucket, flat: Tensor) -> str:
        """Return a `PackedAdapter` as JSON."""
        return json.dumps(asdict(pack(dict(bucket.views(flat.detach().cpu().clone())))))


def pack(factors: Mapping[str, Tensor]) -> PackedAdapter:
    """Pack factors by `<matrix>.lora_A.weight` and `lora_B`."""
    rank = max(rank_of(name, factor) for name, factor in factors.items())
    tensors = in_rank(rank, factors)
    checksums = {
        name: hashlib.sha256(raw_bytes(tensor)).hexdigest() for name, tensor in tensors.items()
    }
    return PackedAdapter(encode(pickle.dumps(tensors)), rank, checksums)


def rank_of(name: str, factor: Tensor) -> int:
    """The rank of an A [rank, in] or a B [out, rank]."""
    return factor.shape[0 if ".lora_A." in name else 1]


def in_rank(rank: int, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Factors under PEFT's names, all of one rank.

    SGLang multiplies every product by alpha / rank. Factors of a smaller rank s are padded with
    zeros, and B is multiplied by rank / s, so that their product is that of alpha / s.
    """
    found = {}
    for name, factor in factors.items():
        own = rank_of(name, factor)
        if own < rank:
            is_a = ".lora_A." in name
            missing = (0, 0, 0, rank - own) if is_a else (0, rank - own)
            factor = pad(factor if is_a else factor * (rank / own), missing)
        # A view would be pickled with the whole of its storage.
        found[PEFT_PREFIX + name] = factor.clone()
    return found
