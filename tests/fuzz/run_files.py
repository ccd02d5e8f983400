"""Files of a run that are read again: checkpoints' headers and states, journals, rollouts.

A damaged file is an error that names it, or is left out where the product says so.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    from backends.megatron.checkpoint.pickles import METADATA, check_metadata
    from backends.megatron.checkpoint.shards import plan_sharded, read_errors, read_sharded
    from backends.megatron.cpu.shim import megatron_device
from rlcore.errors import RlcoreError, RunFailed, UserError
from rlcore.runs.checkpoints import CheckpointStore, _manifest, latest_checkpoint, read_best
from rlcore.runs.metrics import MetricsFile, read_metrics
from rlcore.runs.rollouts import write_rollouts
from rlcore.runs.versions import VersionJournal, read_versions
from rlcore.trainer.sources import ReplaySource
from rollout.accounting.journal_reader import read_journal
from rollout.accounting.ledger import Ledger
from rollout.accounting.prompt_queue import LedgerJournal
from tests.fuzz.harness import ACCEPTED, Case, Target
from tests.fuzz.mutation import Mutator
from tests.fuzz.oracle import check_sample, need
from tests.fuzz.samples import VOCAB, made_samples

Read = Callable[[Path], None]
CODE = (b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04cposix\nsystem\n", b"cbuiltins\neval\n(S'1'\ntR.")


def state() -> dict[str, Any]:
    """Return what a checkpoint of a tensor and an object holds."""
    tensor = ShardedTensor.from_rank_offsets("weight", torch.arange(4.0))
    return {"weight": tensor, "extra": ShardedObject("extra", io.BytesIO(b"scales"), (1,), (0,))}


@contextmanager
def open_metadata() -> Iterator[Case]:
    """The `.metadata` pickle of a checkpoint's shards, which must run no code."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder, megatron_device(torch.device("cpu")):
        model = Path(folder) / "model"
        model.mkdir()
        planned = plan_sharded(state(), model)
        planned.write()
        planned.finish()
        content = (model / METADATA).read_bytes()

        def case(mutator: Mutator) -> str:
            broken = mutator.bytes(content)
            if mutator.changed and mutator.random.random() < 0.2:
                at = mutator.random.randrange(len(broken) + 1)
                broken = broken[:at] + mutator.random.choice(CODE) + broken[at:]
            (model / METADATA).write_bytes(broken)
            try:
                with ran_nothing(), read_errors(model):
                    check_metadata(model)
                    if mutator.random.random() < 0.2:
                        read_sharded(state(), model)
            except RlcoreError as error:
                need(str(folder) in str(error), f"{error} names no file")
                return type(error).__name__
            return ACCEPTED

        yield case
    dist.destroy_process_group()


@contextmanager
def ran_nothing() -> Iterator[None]:
    """Notice a program that a pickle starts."""
    ran: list[Any] = []
    before = os.system
    os.system = lambda command: ran.append(command) or 0  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        os.system = before
        need(not ran, f"code ran: {ran}")


# --- files of the run -----------------------------------------------------------------------------


def read_checkpoints(folder: Path) -> None:
    """Read the newest checkpoint as --resume does."""
    found = latest_checkpoint(folder)
    need(found is not None and type(found.step) is int, f"{found}")
    assert found is not None
    need(
        found.step == 10 and found.state.get("step", 10) == 10, f"step {found.step}: {found.state}"
    )


def read_best_file(folder: Path) -> None:
    """Read which checkpoint was best."""
    best = read_best(folder)
    need(best is not None, "best.json is there")
    assert best is not None
    need(type(best.step) is int and isinstance(best.metric, str), f"{best}")
    need(best.mode in ("max", "min") and isinstance(best.value, int | float), f"{best}")


def read_version_file(path: Path) -> None:
    """Read the versions, and go on with them."""
    for row in read_versions(path):
        need(all(type(n) is int and 0 <= n < 2**62 for n in vars(row).values()), f"{row}")
    known = read_versions(path)
    journal = VersionJournal(path)
    taken = journal.next(3)
    need(all(taken.version > row.version for row in known), f"{taken} after {known}")
    need(read_versions(path)[-1] == taken, "the second start reads what the first wrote")


def read_ledger(path: Path) -> None:
    """Read the journal, and the ledger at every cut."""
    history = read_journal(path)
    for step in (None, *history.cuts):
        ledger = history.at(step)
        need(ledger is not None, f"no ledger at the cut of step {step}")
        assert ledger is not None
        need(sum(ledger.balance().values()) == len(ledger), f"{ledger.balance()}")
    for draw in range(3):
        history.life(draw)


def read_metric_file(path: Path) -> None:
    """Read the metrics, and rewind them."""
    for row in read_metrics(path):
        need(type(row["step"]) is int, f"{row}")
    MetricsFile(path).rewind(1)


def read_replay(path: Path) -> None:
    """Read recorded samples for a replay."""
    recorded = {"sampling_mask": "policy.logprobs.keep_sets"}
    source = ReplaySource(path, vocab_size=VOCAB, recorded=recorded)
    for sample in source.samples:
        check_sample(sample, vocab_size=VOCAB, versions=range(2**62))


def write_files(folder: Path) -> dict[str, tuple[Path, Path, Read]]:
    """Have the real code write one file of each kind. Return {name: file, what is read, reader}."""
    folder.mkdir()
    store = CheckpointStore(folder / "checkpoints")
    (store.begin(10) / "model" / "shard").write_bytes(b"weights")
    best = {"step": 10, "metric": "eval/reward", "mode": "max", "value": 0.5}
    rng = np.arange(5, dtype=np.uint32)
    store.write_state(10, {"step": 10, "best": best, "rng": rng, "tracker": {"id": "x"}})
    checkpoint = store.commit(10)
    versions = folder / "versions.jsonl"
    journal = VersionJournal(versions)
    for step in range(3):
        journal.next(step)
    ledger = LedgerJournal()
    draws = Ledger(ledger.record)
    ledger.start(folder / "ledger.jsonl", 0, draws.snapshot(), prompts=(4, "abc"), max_staleness=1)
    draws.draw([0, 1, 2, 3], [3, 1, 0, 2])
    for draw in (0, 1, 2):
        draws.finish(draw, "1/2")
    draws.consume(0, 1)
    draws.drop(1, "zero_variance")
    draws.requeue(2, "stale")
    draws.fail(3, "timeout")
    ledger.cut(1)
    draws.draw([2])
    ledger.close()
    again = LedgerJournal()
    again.start(folder / "ledger.jsonl", 1, draws.snapshot(), prompts=(4, "abc"), max_staleness=1)
    again.close()
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step in (1, 2, 3):
        metrics.append(step, {"loss/policy_avg": 0.5, "train/grad_norm": float("nan")})
    table = folder / "step_000001.parquet"
    write_rollouts(table, 1, made_samples(), version=5)
    checkpoints = folder / "checkpoints"
    return {
        "manifest": (checkpoint / "manifest.json", checkpoints, read_checkpoints),
        "state": (checkpoint / "state.json", checkpoints, read_checkpoints),
        "best": (checkpoints / "best.json", checkpoints, read_best_file),
        "versions": (versions, versions, read_version_file),
        "ledger": (folder / "ledger.jsonl", folder / "ledger.jsonl", read_ledger),
        "metrics": (metrics.path, metrics.path, read_metric_file),
        "replay": (table, table, read_replay),
    }


def broken_file(mutator: Mutator, name: str, content: bytes) -> bytes:
    """Return the content of a file with a value, a line or bytes of it changed."""
    if name == "replay":
        return mutator.bytes(content)
    if name in ("manifest", "state", "best"):
        return mutator.document(json.loads(content))
    return mutator.lines(content)


@contextmanager
def open_files() -> Iterator[Case]:
    """Every file of a run that a resume, `rlcore ledger` or a replay reads."""
    with tempfile.TemporaryDirectory() as root:
        files = write_files(Path(root) / "run")
        contents = {name: path.read_bytes() for name, (path, _, _) in files.items()}
        manifest = files["manifest"][0]

        def case(mutator: Mutator) -> str:
            name = mutator.random.choice([*files])
            path, given, read = files[name]
            path.write_bytes(broken_file(mutator, name, contents[name]))
            if name == "state":  # a file that was damaged before its checksum was taken
                listed = json.loads(contents["manifest"])
                listed["files"]["state.json"] = _manifest(path.parent)["state.json"]
                manifest.write_bytes(json.dumps(listed).encode())
            try:
                read(given)
            except (UserError, RunFailed) as error:
                need(str(root) in str(error), f"{error} names no file")
                return f"{name}: {type(error).__name__}"
            finally:
                path.write_bytes(contents[name])
                manifest.write_bytes(contents["manifest"])
            return ACCEPTED

        yield case


TARGETS = (Target("checkpoint-headers", open_metadata), Target("run-files", open_files))
