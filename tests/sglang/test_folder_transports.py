"""Weights through folders, whole and as changes, into a real server, which then holds and generates
what was published.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from publication_kit import Client, Weights, check_generation, publish, random_weights
from server_kit import Served

from rlcore.errors import EngineFailed
from rollout.engines.sglang.engine import SGLangEngine
from rollout.weight_sync.choose import shared_folder
from rollout.weight_sync.delta_follower import Manifest, keep_following
from rollout.weight_sync.disk import published
from tests.one_rank import OneRank

# and the folder that the trainer shares with the engine
Publication = tuple[SGLangEngine, OneRank, Path]


@pytest.fixture
def publication(client: Callable[..., Client]) -> Callable[[str], Publication]:
    """Make a client of the session's server, a publication, and the folder."""

    def make(transport: str) -> Publication:
        made = client(transport=transport)
        return made.engine, made.sink, shared_folder(made.config)

    return make


def nudged(weights: Weights, seed: int) -> Weights:
    """Change a hundredth of the elements of every other tensor."""
    generator = torch.Generator().manual_seed(seed)
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in list(changed.values())[::2]:
        tensor.view(-1)[
            torch.randint(tensor.numel(), (1 + tensor.numel() // 100,), generator=generator)
        ] *= 1.5
    return changed


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_the_server_generates_with_what_was_published(
    served: Served, publication: Callable[[str], Publication], transport: str
) -> None:
    engine, sink, folder = publication(transport)
    engine.managed = True  # on this machine: it reads the folder of our own follower
    weights = random_weights(served.model, 1)  # of a tied model: without `lm_head.weight`
    assert "lm_head.weight" not in weights
    for version in (5, 6, 7):
        publish(sink, weights, version)
        check_generation(served, engine, weights, version)
        weights = nudged(weights, version)
    if transport == "disk":
        assert [path.name for path in published(folder)] == ["update_000003"]
    else:
        manifests = [Manifest.read(path) for path in published(folder)]
        assert [manifest.base for manifest in manifests] == [None, 1, 2]
        assert all(manifest.num_bytes < manifests[0].num_bytes / 10 for manifest in manifests[1:])


def test_a_server_elsewhere_reads_the_folder_of_its_own_follower(
    served: Served, publication: Callable[[str], Publication]
) -> None:
    engine, sink, folder = publication("delta")
    following = served.call(begin_following(folder, engine.url))
    weights = random_weights(served.model, 2)
    for version in (8, 9):
        publish(sink, weights, version)
        check_generation(served, engine, weights, version)
        weights = nudged(weights, version)
    served.call(end(following))


async def begin_following(folder: Path, url: str) -> asyncio.Task[None]:
    return asyncio.create_task(keep_following(folder, [url]))


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def test_bf16_from_the_trainer_into_a_server_of_fp32(
    served: Served, publication: Callable[[str], Publication]
) -> None:
    engine, sink, _ = publication("disk")
    weights = {name: tensor.bfloat16() for name, tensor in random_weights(served.model, 3).items()}
    publish(sink, weights, 10)
    check_generation(served, engine, {name: tensor.float() for name, tensor in weights.items()}, 10)


def load_from(served: Served, engine: SGLangEngine, folder: Path, *, version: int) -> None:
    """Load `folder`, whatever is in it."""

    async def run() -> None:
        await engine.pause("retract")
        await engine.begin_update(())
        await engine.load_folder(folder)
        await engine.end_update()
        await engine.set_version(version)
        await engine.resume()

    served.call(run())


def test_a_folder_without_weights_is_refused(
    served: Served, publication: Callable[[str], Publication], tmp_path: Path
) -> None:
    engine, _, _ = publication("disk")
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copyfile(served.model / "config.json", empty / "config.json")
    with pytest.raises(EngineFailed, match="Cannot find any model weights"):
        load_from(served, engine, empty, version=13)
