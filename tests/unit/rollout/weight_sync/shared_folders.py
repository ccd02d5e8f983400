"""Weights in buckets, a model folder for them, and an engine that reads folders of weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.weight_sync.base import Failures, Transport
from rollout.weight_sync.delta import DeltaSender, DeltaTransport
from rollout.weight_sync.disk import DiskTransport, FolderSender, WeightFolders

Weights = dict[str, torch.Tensor]


def make_weights(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "embed": normal(31, 16).bfloat16(),
        "norm": normal(16).bfloat16(),
        "down": normal(16, 24).bfloat16(),
        "router.bias": normal(4),
    }


def nudge(weights: Weights, names: Sequence[str], seed: int = 1) -> Weights:
    """A few elements of the named tensors differ."""
    generator = torch.Generator().manual_seed(seed)
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    for name in names:
        flat = changed[name].view(-1)
        where = torch.randperm(len(flat), generator=generator)[: max(1, len(flat) // 20)]
        flat[where] += 1
    return changed


def layout(weights: Weights, bucket_bytes: int = 800) -> tuple[Bucket, ...]:
    specs = [
        TensorSpec(name, tuple(w.shape), str(w.dtype).removeprefix("torch."))
        for name, w in weights.items()
    ]
    return cut_buckets(specs, bucket_bytes)


def flatten(bucket: Bucket, weights: Weights) -> torch.Tensor:
    return torch.cat([weights[spec.name].reshape(-1).view(torch.uint8) for spec in bucket.tensors])


def read(folder: Path) -> Weights:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a
    )


class Reader:
    """An engine that keeps what it read last."""

    def __init__(
        self, name: str = "engine-0", *, managed: bool = True, url: str = "http://127.0.0.1:1"
    ) -> None:
        self.name = name
        self.managed = managed
        self.url = url
        self.weights: Weights = {}
        self.folder: Path | None = None
        self.broken = False

    async def load_folder(self, folder: Path) -> None:
        if self.broken:
            raise RuntimeError("out of memory")
        self.folder = folder
        self.weights = {name: tensor.clone() for name, tensor in read(folder).items()}


class Publication:
    """Both halves of a transport by folders."""

    def __init__(self, transport: Transport, sender: FolderSender) -> None:
        self.transport = transport
        self.sender = sender

    async def open(self, engines: Sequence[Reader], buckets: Sequence[Bucket]) -> Failures:
        failed = await self.transport.open(engines, buckets)
        self.sender.open(None, buckets)
        return failed

    async def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        await asyncio.to_thread(self.sender.send, bucket, flat, lambda: None)

    async def complete(self) -> Failures:
        return await self.transport.complete(await asyncio.to_thread(self.sender.finish))

    async def close(self) -> None:
        self.sender.close()
        await self.transport.close()


def by_disk(folders: WeightFolders) -> Publication:
    return Publication(DiskTransport(folders.root, timeout_s=5), FolderSender(folders))


def by_delta(folders: WeightFolders, timeout_s: float = 5) -> Publication:
    return Publication(DeltaTransport(folders.root, timeout_s=timeout_s), DeltaSender(folders))


async def publish(
    transport: Publication, engines: Sequence[Reader], weights: Weights
) -> dict[Reader, str]:
    """One publication; every bucket comes in the same memory, as an exporter's do."""
    buckets = layout(weights)
    buffer = torch.empty(max(bucket.num_bytes for bucket in buckets), dtype=torch.uint8)
    assert await transport.open(engines, buckets) == {}
    for bucket in buckets:
        flat = buffer[: bucket.num_bytes].copy_(flatten(bucket, weights))
        await transport.send(bucket, flat)
    buffer.zero_()
    return await transport.complete()


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    (path / "tokenizer.json").write_text("{}")
    return path
