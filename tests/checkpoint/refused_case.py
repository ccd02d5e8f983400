"""A rank of one case: load a damaged checkpoint or save to a full disk, and record the error."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checkpoint_case import Trained
from megatron.core.dist_checkpointing.strategies import filesystem_async

from backends.megatron.checkpoint.save_load import (
    MANIFEST,
    Saved,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    start_checkpoint,
)
from backends.megatron.checkpoint.shards import HostCopies
from backends.megatron.cpu.shim import replaced
from backends.megatron.parallel.state import ParallelState
from rlcore import hf_folder
from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import RlcoreError


def _shard(folder: Path) -> Path:
    return sorted((folder / "policy").glob("*.distcp"))[0]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _overwrite(path: Path) -> None:
    path.write_bytes(b"\1" * path.stat().st_size)


def _drop_critic(folder: Path) -> None:
    manifest = json.loads((folder / "checkpoint.json").read_text())
    del manifest["models"]["critic"]
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "none": lambda folder: None,
    "shard_missing": lambda folder: _shard(folder).unlink(),
    "shard_truncated": lambda folder: _cut(_shard(folder)),
    "shard_overwritten": lambda folder: _overwrite(_shard(folder)),
    "metadata_overwritten": lambda folder: _overwrite(folder / "policy" / ".metadata"),
    "common_overwritten": lambda folder: _overwrite(folder / "policy" / "common.pt"),
    "common_missing": lambda folder: (folder / "policy" / "common.pt").unlink(),
    "manifest_missing": lambda folder: (folder / "checkpoint.json").unlink(),
    "manifest_truncated": lambda folder: _cut(folder / "checkpoint.json"),
    "critic_missing": _drop_critic,
}


@contextmanager
def recording(result: str, parallel: ParallelState, done: str) -> Iterator[None]:
    """Write what became of the work inside: `done`, or the error's class and message."""
    outcome = done
    try:
        yield
    except RlcoreError as error:
        outcome = f"{type(error).__name__}: {error}"
    Path(f"{result}.rank{parallel.rank}").write_text(outcome)


def try_refused(case: dict[str, Any], layout: ParallelConfig, parallel: ParallelState) -> None:
    """Write `result` once a rank: the error's class and message, or "loaded"."""
    folder = Path(case["copy"])
    if parallel.rank == 0:
        shutil.copytree(case["load"], folder)
        DAMAGES[case["damage"]](folder)
    dist.barrier()
    models = [
        Trained(name, Path(path), case["variant"], layout, parallel)
        for name, path in case["sources"].items()
    ]
    with recording(case["result"], parallel, "loaded"):
        if "weights_of" in case:
            for model in models:
                saved: Saved = model.saved
                load_weights(folder, case["weights_of"], saved.arch, saved.chunks, parallel)
        else:
            load_checkpoint(folder, [model.saved for model in models], parallel)
    if "export" in case:
        for model in models:
            model.export(Path(case["export"]))


def try_full_disk(case: dict[str, Any], layout: ParallelConfig, parallel: ParallelState) -> None:
    """The disk of the last rank is full after some tensors.

    Write `result` once a rank: the error's class and message.
    """
    (source,) = case["sources"].values()
    model = Trained("policy", Path(source), case["variant"], layout, parallel)
    model.step(0)
    real = filesystem_async._write_item
    written = 0

    @functools.wraps(real)  # Megatron looks at its signature
    def until_full(*args: Any, **options: Any) -> Any:
        nonlocal written
        written += 1
        if written > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **options)

    is_last = parallel.rank == parallel.world_size - 1
    disk = replaced(filesystem_async, "_write_item", until_full) if is_last else nullcontext()
    with recording(case["result"], parallel, "saved"), disk:
        save_checkpoint(Path(case["save"]), [model.saved], parallel)
    assert not (Path(case["save"]) / MANIFEST).exists()
    model.step(1)  # training is unharmed
    exports = Path(case["save"]).with_name("exports")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = replaced(hf_folder, "_write", full) if is_last else nullcontext()
    with recording(f"{case['result']}.export", parallel, "exported"), disk:
        model.export(exports, max_shard_bytes=1 << 14)
    dist.barrier()
    assert not list(exports.iterdir()), "nothing is left of it"


def try_file_of_rank_0(
    case: dict[str, Any], layout: ParallelConfig, parallel: ParallelState
) -> None:
    """Rank 0 cannot write the file that it alone writes, `case["file"]`: a folder is in its place.

    Write `result` once a rank: the error's class and message.
    """
    (source,) = case["sources"].values()
    model = Trained("policy", Path(source), case["variant"], layout, parallel)
    model.step(0)
    folder = Path(case["save"])
    if parallel.rank == 0:
        (folder / "policy" / case["file"] / "something").mkdir(parents=True)
    dist.barrier()
    with recording(case["result"], parallel, "saved"):
        if case["in_thread"]:
            pending = start_checkpoint(folder, [model.saved], parallel, HostCopies())
            while pending.written() is None:
                time.sleep(0.01)
            pending.finish()
        else:
            save_checkpoint(folder, [model.saved], parallel)
    assert not (folder / MANIFEST).exists()
    model.step(1)  # no rank is in another collective
