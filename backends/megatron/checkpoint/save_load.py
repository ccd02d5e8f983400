"""Training checkpoints: models, optimizers and schedules, loadable under any layout.

    <folder>/checkpoint.json    the manifest, written last: architectures, dtype, optimizers, and
                                the size of every file
             policy/            one torch_dist checkpoint per model
             critic/

A folder without checkpoint.json is not a checkpoint. The run renames the folder of a checkpoint
before it uses the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from backends.megatron.checkpoint import shards
from backends.megatron.checkpoint.adapters import described, sharded_factors
from backends.megatron.checkpoint.optimizer_state import optimizer_tensors
from backends.megatron.checkpoint.shards import HostCopies, PendingCheckpoint, PlannedShards, Plans
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.layout import unwrap
from backends.megatron.convert.table import VALUE_HEAD
from backends.megatron.model.gpt import ValueModel
from backends.megatron.model.lora import named_factors
from backends.megatron.parallel.agreement import raise_on_all_ranks
from backends.megatron.parallel.state import ParallelState
from backends.megatron.training.optimizer import ScheduledOptimizer
from rlcore.config.sections.policy import LoraConfig
from rlcore.errors import ModelError
from rlcore.runs.files import files_in, sync_tree, write_atomic

MANIFEST = "checkpoint.json"
_FORMAT = 1
_AXES = ("tp", "pp", "dp", "cp", "ep", "etp")


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model, and the folder or checkpoint with the weights below them."""

    config: LoraConfig
    base: Path

    @cached_property
    def described(self) -> dict[str, Any]:
        """What the manifest says of them; the files of the base are read once."""
        return described(self.config, self.base)


@dataclass(frozen=True)
class Saved:
    """One model of a checkpoint. `optimizer` is None if only weights are saved."""

    name: str  # "policy" | "critic", also its folder
    arch: Architecture
    chunks: Sequence[nn.Module]  # wrapped or not
    optimizer: ScheduledOptimizer | None = None
    # Only the adapters are saved, beside the name of the weights that they belong to.
    adapters: Adapters | None = None

    @property
    def head(self) -> str:
        """The kind of head: "value" or "lm"."""
        return "value" if isinstance(unwrap(self.chunks[0]), ValueModel) else "lm"


def save_checkpoint(
    folder: Path, models: Sequence[Saved], parallel: ParallelState, plans: Plans | None = None
) -> None:
    """Write the models side by side into `folder`, on a file system that all ranks share.

    The checkpoint is complete and on the disk when this returns. Collective; call inside
    `megatron_device`. Raises RunFailed naming the folder and the reason, on every rank.

    Args:
        plans: those of the run, which its next checkpoints reuse.
    """
    planned = _plan(folder, models, parallel, None, plans)
    with _writing(folder, parallel):
        for part in planned:
            part.write()
    _complete(folder, planned, _descriptions(models), parallel)


def start_checkpoint(
    folder: Path,
    models: Sequence[Saved],
    parallel: ParallelState,
    host: HostCopies,
    plans: Plans | None = None,
) -> PendingCheckpoint:
    """Like `save_checkpoint`, but copy to host memory and return; a thread writes the copy.

    Collective; call inside `megatron_device`. `host` is in use until `finish` of the returned
    checkpoint, so only one checkpoint may be pending.
    """
    planned = _plan(folder, models, parallel, host, plans)
    # Describe the models now: the optimizers may take further steps while the thread writes.
    described = _descriptions(models)
    complete = partial(_complete, folder, planned, described, parallel)
    return PendingCheckpoint(folder, planned, complete)


def _plan(
    folder: Path,
    models: Sequence[Saved],
    parallel: ParallelState,
    host: HostCopies | None,
    plans: Plans | None,
) -> list[PlannedShards]:
    planned = []
    for model in models:
        target = folder / model.name
        with _writing(folder, parallel):
            target.mkdir(parents=True, exist_ok=True)
        with _writing(folder, parallel):
            # AdamW has no state before its first step.
            stepped = model.optimizer is not None and model.optimizer.steps_taken > 0
            state = _sharded_state(model, parallel, optimizer=stepped, assign=True)
            planned.append(shards.plan_sharded(state, target, host, plans))
    return planned


def _complete(
    folder: Path,
    planned: Sequence[PlannedShards],
    described: Mapping[str, Any],
    parallel: ParallelState,
) -> None:
    """Write the metadata, flush everything to the disk and write the manifest.

    Call after every rank has written its share.
    """
    for part in planned:
        with _writing(folder, parallel):
            part.finish()
    with _writing(folder, parallel):
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


@contextmanager
def _writing(folder: Path, parallel: ParallelState) -> Iterator[None]:
    """Inside, an error on one rank raises RunFailed naming the folder on every rank."""
    with (
        raise_on_all_ranks(parallel, f"writing the checkpoint {folder}"),
        shards.write_errors(folder),
    ):
        yield


def load_checkpoint(folder: Path, models: Sequence[Saved], parallel: ParallelState) -> None:
    """Load weights, optimizers and schedules of `models`, in place, under the current layout.

    Collective; call inside `megatron_device`. Raises ModelError naming the checkpoint and the
    problem: not a checkpoint, a missing or truncated file, another architecture or dtype.
    """
    # Every rank checks, so that every rank reports the reason.
    with raise_on_all_ranks(parallel, f"reading the checkpoint {folder}"):
        manifest = read_manifest(folder, [model.name for model in models])
    for model in models:
        entry = manifest["models"][model.name]
        _check_same(folder, model, entry, parallel)
        _load(folder, model, parallel, steps_taken=entry["steps_taken"])


def load_weights(
    folder: Path,
    name: str,
    arch: Architecture,
    chunks: Sequence[nn.Module],
    parallel: ParallelState,
    adapters: Adapters | None = None,
) -> None:
    """Load only the weights of model `name`, or its adapters, in place; the dtype may differ.

    Collective.

    A critic may be loaded from a policy; its value head then keeps its values. Raises the errors of
    `load_checkpoint`.
    """
    with raise_on_all_ranks(parallel, f"reading the checkpoint {folder}"):
        manifest = read_manifest(folder, [name])
    model = Saved(name, arch, chunks, adapters=adapters)
    entry = manifest["models"][name]
    _check_same(folder, model, entry, parallel)
    skip = (VALUE_HEAD,) if entry["head"] == "lm" else ()
    _load(folder, model, parallel, steps_taken=0, skip=skip)


def base_of(folder: Path, name: str) -> Path | None:
    """The weights below the adapters that a checkpoint holds of a model; None for all weights.

    Raises ModelError as `load_checkpoint` does.
    """
    saved = read_manifest(folder, [name])["models"][name].get("adapters")
    return None if saved is None else Path(saved["base"])


def saved_layout(folder: Path) -> str:
    """The layout that a checkpoint was saved under, for display: "TP 2 x PP 1 x DP 1 x CP 1".

    It includes EP and ETP if EP is more than 1.
    """
    layout: dict[str, int] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["layout"]
    # Without expert parallelism experts are split like all other weights.
    if layout.get("ep", 1) == 1:
        layout = {axis: size for axis, size in layout.items() if axis not in ("ep", "etp")}
    return " x ".join(f"{axis.upper()} {size}" for axis, size in layout.items())


# --- state dicts ----------------------------------------------------------------------------------


def _sharded_state(
    model: Saved, parallel: ParallelState, *, optimizer: bool, assign: bool = False
) -> dict[str, Any]:
    """The sharded weights, one entry per chunk, and the optimizer's state if this rank has any."""
    metadata = {"dp_cp_group": parallel.dp_cp_group}
    state: dict[str, Any] = {
        f"model{index}": unwrap(chunk).sharded_state_dict(prefix="", metadata=metadata)  # type: ignore[operator]
        for index, chunk in enumerate(model.chunks)
    }
    if model.adapters is not None:
        for weights in state.values():
            for name in weights.keys() - {VALUE_HEAD}:
                del weights[name]
        lora = model.adapters.config
        state |= {"adapters": sharded_factors(model.chunks, model.arch, lora, parallel)}
    if assign:
        shards.assign_to_replicas(state, parallel)
    if optimizer and model.optimizer is not None:
        state |= {"optimizer": optimizer_tensors(model.optimizer, state)}
    return state


def _load(
    folder: Path,
    model: Saved,
    parallel: ParallelState,
    *,
    steps_taken: int,
    skip: tuple[str, ...] = (),
) -> None:
    """Load one model, and its optimizer if it has one.

    AdamW has no state before the first step, so a checkpoint with `steps_taken` 0 holds none.
    """
    if steps_taken and model.optimizer is not None:
        model.optimizer.prepare_for_load()
    wanted = _sharded_state(model, parallel, optimizer=bool(steps_taken))
    for index in range(len(model.chunks)):
        for key in skip:
            wanted[f"model{index}"].pop(key, None)
    # The optimizer's tensors are read in place.
    with shards.read_errors(folder / model.name):
        state = shards.read_sharded(wanted, folder / model.name)
    whole = not skip and model.adapters is None
    for index, chunk in enumerate(model.chunks):
        unwrap(chunk).load_state_dict(state[f"model{index}"], strict=whole)
    held = {} if model.adapters is None else named_factors(model.chunks)
    for name, factor in held.items():
        factor.data.copy_(state["adapters"][name])
    if model.optimizer is None:
        return
    if not steps_taken:
        model.optimizer.reload_weights()
    model.optimizer.set_steps_taken(steps_taken)


# --- the manifest ---------------------------------------------------------------------------------


def _descriptions(models: Sequence[Saved]) -> dict[str, Any]:
    return {
        model.name: {
            "architecture": _fingerprint(model.arch),
            "head": model.head,
            "dtype": _dtype(model),
            "distributed_optimizer": (
                model.optimizer.config.distributed if model.optimizer else None
            ),
            "steps_taken": model.optimizer.steps_taken if model.optimizer else 0,
            "adapters": (model.adapters.described if model.adapters else None),
        }
        for model in models
    }


def _fingerprint(arch: Architecture) -> dict[str, Any]:
    """The properties in which two models must agree to load each other's weights."""
    return {
        "family": arch.family,
        "vocab_size": arch.vocab_size,
        "tie_word_embeddings": arch.tie_word_embeddings,
        **{key: value for key, value in arch.transformer.items() if "dropout" not in key},
        **({"mtp": True} if arch.mtp else {}),
    }


def _dtype(model: Saved) -> str:
    return str(next(unwrap(model.chunks[0]).parameters()).dtype).removeprefix("torch.")


def read_manifest(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read the manifest, and check the existence and size of every file of models `names`.

    Raises ModelError naming the checkpoint and the problem.
    """
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
            f"checkpoint {folder}: format {manifest.get('format')}, this version reads {_FORMAT}"
        )
    for name in names:
        if name not in models:
            raise ModelError(f"checkpoint {folder}: it holds no {name}, only {', '.join(models)}")
    for name, size in files.items():
        if name.split("/")[0] not in names:
            continue
        path = folder / name
        if not path.is_file():
            raise ModelError(f"checkpoint {folder}: {name} is missing")
        if path.stat().st_size != size:
            raise ModelError(
                f"checkpoint {folder}: {name} has {path.stat().st_size} bytes, {size} were written"
            )
    return manifest


def check_architecture(
    folder: Path, name: str, arch: Architecture, described: Mapping[str, Any]
) -> None:
    """Raise ModelError if `described`, from the manifest, is another architecture than `arch`."""
    was = described["architecture"]
    now = _fingerprint(arch)
    for key in now:
        if was.get(key) != now[key]:
            raise ModelError(
                f"checkpoint {folder}: {name} was saved with {key} {was.get(key)!r}, this model"
                f" has {now[key]!r}"
            )


def _check_same(folder: Path, model: Saved, entry: dict[str, Any], parallel: ParallelState) -> None:
    """Refuse a checkpoint of another model, or of another dtype if the optimizer is loaded."""
    with raise_on_all_ranks(parallel, f"reading the checkpoint {folder}"):
        check_architecture(folder, model.name, model.arch, entry)
        if entry["head"] == "value" and model.head == "lm":
            raise ModelError(
                f"checkpoint {folder}: {model.name} has a value head, this model needs a language"
                " model's"
            )
        _check_adapters(folder, model, entry.get("adapters"))
        if model.optimizer is None:
            return
        if entry["dtype"] != _dtype(model):
            raise ModelError(
                f"checkpoint {folder}: {model.name} was saved in {entry['dtype']}, model.dtype"
                f" makes it {_dtype(model)}"
            )


def _check_adapters(folder: Path, model: Saved, was: Mapping[str, Any] | None) -> None:
    """Refuse adapters of other settings or other weights, and adapters where weights are needed."""
    if model.adapters is None and was is not None:
        raise ModelError(
            f"checkpoint {folder}: {model.name} has adapters alone, for the weights of"
            f" {was['base']}; `rlcore export` writes them as policy.lora.path takes them, with"
            " --merged as a whole model"
        )
    if model.adapters is None:
        return
    if was is None:
        raise ModelError(
            f"checkpoint {folder}: {model.name} has all weights, this run trains adapters"
            " (policy.lora); to train adapters of it, set policy.checkpoint in a new run"
        )
    now = model.adapters.described
    for key in now.keys() - {"base"}:
        if was.get(key) != now[key]:
            weights = f" (the weights of {was['base']}, now {now['base']})"
            raise ModelError(
                f"checkpoint {folder}: the adapters of {model.name} were saved with {key}"
                f" {was.get(key)!r}, this run has {now[key]!r}"
                f"{weights if key == 'base_digest' else ''}"
            )
