"""Folders of publications: manifests, changes, safetensors, and the reports of followers.

A follower's folder holds the weights that were published, or the publication fails by name.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlcore.errors import RunFailed
from rlcore.hf_folder import find_tensors
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.weight_sync.delta import DeltaSender
from rollout.weight_sync.delta_follower import REPORTS, Follower, FollowerReport, read_reports
from rollout.weight_sync.disk import WeightFolders
from tests.fuzz.harness import ACCEPTED, Case, Target
from tests.fuzz.mutation import Mutator
from tests.fuzz.oracle import need

SPECS = (
    TensorSpec("embed", (8, 4), "float32"),
    TensorSpec("layer", (16,), "float32"),
    TensorSpec("head", (4, 8), "bfloat16"),
)
NEWEST = 3


def publish(shared: Path, model: Path) -> dict[str, bytes]:
    """Write a whole publication and two by changes. Return the bytes of each tensor after them."""
    folders = WeightFolders(shared, model=model)
    buckets = cut_buckets(SPECS, 1 << 20)
    generator = torch.Generator().manual_seed(0)
    flats = [
        torch.randint(0, 255, (bucket.num_bytes,), dtype=torch.uint8, generator=generator)
        for bucket in buckets
    ]
    sender = DeltaSender(folders)
    for number in range(NEWEST):
        sender.open(None, buckets)
        for bucket, flat in zip(buckets, flats):
            flat[number : 40 + number : 7] += 1
            sender.send(bucket, flat, lambda: None)
        sender.finish()
    return dict(_bytes_of(buckets, flats))


def _bytes_of(
    buckets: tuple[Bucket, ...], flats: list[torch.Tensor]
) -> Iterator[tuple[str, bytes]]:
    for bucket, flat in zip(buckets, flats):
        at = 0
        for spec in bucket.tensors:
            yield spec.name, flat[at : at + spec.num_bytes].numpy().tobytes()
            at += spec.num_bytes


@contextmanager
def open_deltas() -> Iterator[Case]:
    """A follower of a folder in which one file is broken, at its start or on its way."""
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        shared = Path(root) / "shared"
        wanted = publish(shared, model)
        report = FollowerReport(
            host="node", urls=["http://127.0.0.1:1"], number=NEWEST, folder="/dev/shm/x"
        )
        (shared / REPORTS).mkdir()
        (shared / REPORTS / "node-1.json").write_text(report.model_dump_json())
        files = sorted(path for path in shared.rglob("*") if path.is_file())
        contents = {path: path.read_bytes() for path in files}

        def case(mutator: Mutator) -> str:
            path = mutator.random.choice(files)
            begin = mutator.random.randrange(1, NEWEST + 1)
            follower = Follower(shared, Path(root) / "local")
            try:
                if begin < NEWEST:
                    follower.follow(begin)
                content = contents[path]
                broken = (
                    mutator.document(json.loads(content))
                    if path.suffix == ".json" and mutator.random.random() < 0.8
                    else mutator.bytes(content)
                )
                path.write_bytes(broken)
                for found in read_reports(shared):
                    need(isinstance(found.urls, list), f"{found}")
                    need(found.number is None or type(found.number) is int, f"{found}")
                    need(isinstance(found.folder, str), f"{found}")
                follower.follow(NEWEST)
                for name, place in find_tensors(follower.folder).items():
                    held = place.path.read_bytes()[place.offset :][: place.spec.num_bytes]
                    need(held == wanted[name], f"{name} is not what was published")
                need(find_tensors(follower.folder).keys() == wanted.keys(), "tensors are missing")
            except RunFailed as error:
                need(str(root) in str(error), f"{error} names no file")
                return "RunFailed"
            finally:
                path.write_bytes(contents[path])
                shutil.rmtree(follower.folder, ignore_errors=True)
            return ACCEPTED

        yield case


TARGETS = (Target("deltas", open_deltas),)
