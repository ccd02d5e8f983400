"""Hands buckets to engines on the trainer's own GPUs: by handles, each from the rank on that GPU.

An engine can read only the memory of GPUs that it sees. So each rank copies the bucket into memory
on its own GPU and makes a handle of that, and rank 0 posts the handles to the engines. The ranks do
not wait for rank 0, and may be a bucket ahead of it.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping

from torch import Tensor

from rlcore.interfaces import BucketHandles
from rlcore.trainer.rank_sync import RankSync
from rlcore.weights import Bucket


class HandleExchange:
    """Brings the handles of all ranks to rank 0.

    Every rank makes one, and then the same calls.
    """

    def __init__(self, sync: RankSync, maker: BucketHandles) -> None:
        self._sync = sync
        self._maker = maker
        self._owners: Mapping[str, int] = {}
        self._opened = 0
        # On rank 0, the GPU of each rank. Engines that share them are on rank 0's machine.
        words = sync.gather("the GPUs of the ranks", f"{socket.gethostname()} {maker.gpu}")
        told = [word.split(" ") for word in words]
        self.trainer_gpus = [gpu if host == told[0][0] else "" for host, gpu in told]

    def owners(self, gpus: Collection[str]) -> dict[str, int]:
        """The first rank on each of these GPUs (rank 0)."""
        return {gpu: self.trainer_gpus.index(gpu) for gpu in gpus}

    def open(self, owners: Mapping[str, int]) -> None:
        """Begin a publication.

        Args:
            owners: from the GPUs of its engines to the ranks that make the handles there.
        """
        self._owners = owners
        self._opened += 1

    def collect(self, bucket: Bucket, flat: Tensor | None) -> dict[str, str]:
        """Return the handle of each GPU on rank 0, {} elsewhere.

        Args:
            flat: the bucket, on every rank.
        """
        own = ""
        owner = self._owners.get(self._maker.gpu)
        if flat is not None and owner == self._sync.rank and not self._is_given_up():
            own = self._maker.make(bucket, flat)
        words = self._sync.gather(f"the handles of bucket {bucket.index}", own)
        if not words:
            return {}
        return {gpu: words[rank] for gpu, rank in self._owners.items() if words[rank]}

    def give_up(self) -> None:
        """Let no rank make a handle that would not be read (rank 0)."""
        self._sync.store.set(self._key, "")

    def release(self, handles: Mapping[str, str], *, read_on: Collection[str] = ()) -> None:
        """Give back the memory of handles that nobody will read, except those of `read_on`."""
        for gpu, handle in handles.items():
            if gpu not in read_on:
                self._maker.release(handle)

    def close(self) -> None:
        """Free the memory that has been read."""
        if self._owners:
            self._maker.collect()
        self._owners = {}

    @property
    def _key(self) -> str:
        return f"handles/{self._opened}/given up"

    def _is_given_up(self) -> bool:
        return bool(self._sync.store.check([self._key]))
