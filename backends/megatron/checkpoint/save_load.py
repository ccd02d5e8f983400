"""Training checkpoints: models, optimizers and schedules, loadable under every other layout.

    <folder>/checkpoint.json        what is in it: architectures, dtype, optimizers, the size of every file; written last
             policy/                one torch_dist checkpoint a model
             critic/

A folder without checkpoint.json is not a checkpoint. Whether the run uses it is decided by the
run's own rename.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from backends.megatron.checkpoint.background import PendingCheckpoint
from backends.megatron.checkpoint.errors import read_errors, write_errors
from backends.megatron.checkpoint.megatron_fixes import mended_state
from backends.megatron.checkpoint.optimizer_state import METADATA, completed, tensors_as_saved
from backends.megatron.checkpoint.shards import (
    HostCopies,
    plan_sharded,
    read_sharded,
    saved_names,
    write_sharded,
)
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.names import unwrap
from backends.megatron.convert.table import VALUE_HEAD
from backends.megatron.model.gpt import ValueModel
from backends.megatron.parallel.rank_errors import raise_on_all_ranks
from backends.megatron.parallel.state import ParallelState
from backends.megatron.training.optimizer import ScheduledOptimizer
from rlcore.errors import ModelError
from rlcore.runs.files import files_in, sync_tree, write_atomic

MANIFEST = "checkpoint.json"
_FORMAT = 1
_AXES = ("tp", "pp", "dp", "cp", "ep", "etp")


@dataclass(frozen=True)
class Saved:
    """One model of a checkpoint: its name is its folder. `optimizer` is None for weights alone."""

    name: str  # "policy" | "critic"
    arch: Architecture
    chunks: Sequence[nn.Module]  # wrapped or not
    optimizer: ScheduledOptimizer | None = None

    @property
    def head(self) -> str:
        return "value" if isinstance(unwrap(self.chunks[0]), ValueModel) else "lm"


def save_checkpoint(folder: Path, models: Sequence[Saved], parallel: ParallelState) -> None:
    """Write the models side by side into `folder`; complete and on the disk when it returns.

    Collective; on a shared file system. Call inside `megatron_device`.
    Raises RunFailed naming the folder and the reason, on every rank.
    """
    for model in models:
        target = _open_folder(folder, model, parallel)
        with write_errors(folder):
            write_sharded(_sharded_state(model, parallel, is_loading=False), target)
    _seal(folder, _descriptions(models), parallel)


def start_checkpoint(
    folder: Path, models: Sequence[Saved], parallel: ParallelState, host: HostCopies
) -> PendingCheckpoint:
    """As `save_checkpoint`, but only the copy to host memory is made when it returns; a thread
    writes that.

    Collective; call inside `megatron_device`. All that the ranks must agree on is done here, the
    distributed optimizer's gathering too. `host` is given back by the `finish` of what is returned:
    at most one at a time.
    """
    planned = []
    for model in models:
        target = _open_folder(folder, model, parallel)
        with write_errors(folder):
            planned.append(
                plan_sharded(_sharded_state(model, parallel, is_loading=False), target, host)
            )
    described = _descriptions(models)  # now: the optimizers go on
    return PendingCheckpoint(folder, planned, lambda: _seal(folder, described, parallel))


def _open_folder(folder: Path, model: Saved, parallel: ParallelState) -> Path:
    target = folder / model.name
    with raise_on_all_ranks(parallel, f"writing the checkpoint {folder}"), write_errors(folder):
        target.mkdir(parents=True, exist_ok=True)
    return target


def _seal(folder: Path, described: Mapping[str, Any], parallel: ParallelState) -> None:
    """Everything is written: flush it, and say so in the manifest."""
    with raise_on_all_ranks(parallel, f"writing the checkpoint {folder}"), write_errors(folder):
        if parallel.rank == 0:
            sync_tree(folder)
            manifest = {
                "format": _FORMAT,
                "layout": {axis: getattr(parallel, f"{axis}_size") for axis in _AXES},
                "models": described,
                "files": {
                    path.relative_to(folder).as_posix(): path.stat().st_size
                    for path in files_in(folder)
                },
            }
            write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def load_checkpoint(folder: Path, models: Sequence[Saved], parallel: ParallelState) -> None:
    """Load weights, optimizers and schedules of `models`, in place, under the layout of today.

    Collective; call inside `megatron_device`.
    Raises ModelError naming the checkpoint and what is wrong: not a checkpoint, a missing or
        truncated file, another
    architecture or dtype.
    """
    manifest = _read_manifest(folder, [model.name for model in models], parallel)
    for model in models:
        described = manifest["models"][model.name]
        _check_same(folder, model, described, parallel)
        _load(folder, model, parallel, taken=described["steps_taken"])


def load_weights(
    folder: Path,
    name: str,
    arch: Architecture,
    chunks: Sequence[nn.Module],
    parallel: ParallelState,
) -> None:
    """Load the weights of model `name` alone, in place; the dtype may differ. Errors as
    `load_checkpoint`. Collective.

    A critic may be loaded from a policy: its value head keeps its values.
    """
    manifest = _read_manifest(folder, [name], parallel)
    model = Saved(name, arch, chunks)
    described = manifest["models"][name]
    _check_same(folder, model, described, parallel)
    _load(folder, model, parallel, taken=0, skip=(VALUE_HEAD,) if described["head"] == "lm" else ())


def saved_layout(folder: Path) -> str:
    """The layout that a checkpoint was saved under, for people: "TP 2 x PP 1 x DP 1 x CP 1"; above
    EP 1 with EP and ETP.
    """
    layout: dict[str, int] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["layout"]
    if layout.get("ep", 1) == 1:  # then an expert is cut like everything else
        layout = {axis: size for axis, size in layout.items() if axis not in ("ep", "etp")}
    return " x ".join(f"{axis.upper()} {size}" for axis, size in layout.items())


# --- state dicts ----------------------------------------------------------------------------------


def _sharded_state(
    model: Saved, parallel: ParallelState, *, is_loading: bool, optimizer: bool = True
) -> dict[str, Any]:
    """The sharded weights, one entry a chunk, and the optimizer's state where it has any."""
    metadata = {"dp_cp_group": parallel.dp_cp_group, **METADATA}
    state: dict[str, Any] = {
        f"model{index}": unwrap(chunk).sharded_state_dict(prefix="", metadata=metadata)  # type: ignore[operator]
        for index, chunk in enumerate(model.chunks)
    }
    if optimizer and model.optimizer is not None and (is_loading or model.optimizer.steps_taken):
        with mended_state(model.optimizer):
            state["optimizer"] = model.optimizer.megatron.sharded_state_dict(
                dict(state), is_loading=is_loading, metadata=metadata
            )
    return state


def _load(
    folder: Path, model: Saved, parallel: ParallelState, *, taken: int, skip: tuple[str, ...] = ()
) -> None:
    """Before the first step AdamW has no state, so a checkpoint of then (`taken` 0) holds none."""
    if taken and model.optimizer is not None:
        model.optimizer.prepare_for_load()
    wanted = _sharded_state(model, parallel, is_loading=True, optimizer=bool(taken))
    for index in range(len(model.chunks)):
        for key in skip:
            wanted[f"model{index}"].pop(key, None)
    optimizer = wanted.pop("optimizer", None)
    if optimizer is not None:
        with (
            raise_on_all_ranks(parallel, f"reading the checkpoint {folder}"),
            read_errors(folder / model.name),
        ):
            names = saved_names(folder / model.name)
        wanted["tensors"] = tensors_as_saved(optimizer, names, fp32=_dtype(model) == "float32")
    with read_errors(folder / model.name):
        state = read_sharded(wanted, folder / model.name)
    for index, chunk in enumerate(model.chunks):
        unwrap(chunk).load_state_dict(state[f"model{index}"], strict=not skip)
    if model.optimizer is None:
        return
    if taken:
        in_groups = model.optimizer.counts_in_groups
        model.optimizer.load_megatron_state(
            completed(optimizer, state["tensors"], taken=taken, counts_in_groups=in_groups)
        )
    else:
        model.optimizer.megatron.reload_model_params()
    model.optimizer.steps_taken = taken


# --- the manifest ---------------------------------------------------------------------------------


def _descriptions(models: Sequence[Saved]) -> dict[str, Any]:
    return {model.name: _description(model) for model in models}


def _description(model: Saved) -> dict[str, Any]:
    return {
        "architecture": _fingerprint(model),
        "head": model.head,
        "dtype": _dtype(model),
        "distributed_optimizer": model.optimizer.config.distributed if model.optimizer else None,
        "steps_taken": model.optimizer.steps_taken if model.optimizer else 0,
    }


def _fingerprint(model: Saved) -> dict[str, Any]:
    """What two models must share for the weights of one to be those of the other."""
    arch = model.arch
    return {
        "family": arch.family,
        "vocab_size": arch.vocab_size,
        "tie_word_embeddings": arch.tie_word_embeddings,
        **{key: value for key, value in arch.transformer.items() if "dropout" not in key},
    }


def _dtype(model: Saved) -> str:
    return str(next(unwrap(model.chunks[0]).parameters()).dtype).removeprefix("torch.")


def _read_manifest(folder: Path, names: Sequence[str], parallel: ParallelState) -> dict[str, Any]:
    """The manifest, after every file that it lists was found with its size. Every rank looks, so
    all give the reason.
    """
    with raise_on_all_ranks(parallel, f"reading the checkpoint {folder}"):
        path = folder / MANIFEST
        if not path.is_file():
            raise ModelError(
                f"{folder}: not a complete checkpoint: no {MANIFEST}; expected what a run saved as"
                " its model"
            )
        try:
            manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            files = dict(manifest["files"])
            models = dict(manifest["models"])
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ModelError(f"checkpoint {folder}: {MANIFEST} is damaged: {error}") from error
        if manifest.get("format") != _FORMAT:
            raise ModelError(
                f"checkpoint {folder}: format {manifest.get('format')}, this version reads"
                f" {_FORMAT}"
            )
        for name in names:
            if name not in models:
                raise ModelError(
                    f"checkpoint {folder}: it holds no {name}, only {', '.join(models)}"
                )
        for name, size in files.items():
            if name.split("/")[0] in names:
                _check_file(folder, name, size)
    return manifest


def _check_file(folder: Path, name: str, size: int) -> None:
    path = folder / name
    if not path.is_file():
        raise ModelError(f"checkpoint {folder}: {name} is missing")
    if path.stat().st_size != size:
        raise ModelError(
            f"checkpoint {folder}: {name} has {path.stat().st_size} bytes, {size} were written"
        )


def _check_same(
    folder: Path, model: Saved, described: dict[str, Any], parallel: ParallelState
) -> None:
    """Refuse a checkpoint of another model or, where the optimizer is loaded too, of another dtype."""
    with raise_on_all_ranks(parallel, f"reading the checkpoint {folder}"):
        was = described["architecture"]
        now = _fingerprint(model)
        for key in now:
            if was.get(key) != now[key]:
                raise ModelError(
                    f"checkpoint {folder}: {model.name} was saved with {key} {was.get(key)!r}, this"
                    f" model has {now[key]!r}"
                )
        if described["head"] == "value" and model.head == "lm":
            raise ModelError(
                f"checkpoint {folder}: {model.name} has a value head, this model needs a language"
                " model's"
            )
        if model.optimizer is None:
            return
        if described["dtype"] != _dtype(model):
            raise ModelError(
                f"checkpoint {folder}: {model.name} was saved in {described['dtype']}, model.dtype"
                f" makes it {_dtype(model)}"
            )
