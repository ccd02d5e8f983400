"""Models with experts: weights and optimizer state from any layout to any other, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from expert_plan import (
    DEFAULT_CASES,
    DEFAULT_WORLDS,
    FULL_CASES,
    FULL_WORLDS,
    LAYOUTS,
    MODEL,
    UNWRITABLE,
    Case,
    Worlds,
    variant_of,
)
from hf_folders import write_model
from optimizer_state import KEYS
from world_outputs import Outputs, read_weights

from backends.megatron.cpu.shim import importing_megatron
from tests.parity.spawn import run_ranks

with importing_megatron():
    from backends.megatron.checkpoint.save_load import saved_layout
from tests import nccl_rules

FILES_OF_RANK_0 = ("common.pt", ".metadata", "metadata.json")
BY_NCCL_RULES: Case = ("bf16_distributed", "ep2", "bf16_distributed", "dp2")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return _run(tmp_path_factory.mktemp("experts"), DEFAULT_WORLDS, DEFAULT_CASES, unwritable=True)


@pytest.fixture(scope="module")
def full_outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return _run(tmp_path_factory.mktemp("experts_full"), FULL_WORLDS, FULL_CASES)


@pytest.mark.parametrize("case", DEFAULT_CASES, ids="-".join)
def test_state_and_next_step_are_bit_equal(outputs: Outputs, case: Case) -> None:
    check(outputs, case)


@pytest.mark.full
@pytest.mark.timeout(900)  # the first of them has all worlds to wait for
@pytest.mark.parametrize("case", FULL_CASES, ids="-".join)
def test_from_every_layout(full_outputs: Outputs, case: Case) -> None:
    check(full_outputs, case)


def test_by_nccl_rules_too(tmp_path: Path) -> None:
    outputs = _run(tmp_path, [(2, ("ep2",), ("dp2",))], [BY_NCCL_RULES], environment=nccl_rules.ON)
    check(outputs, BY_NCCL_RULES)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_layout_by_nccl_rules(tmp_path: Path) -> None:
    outputs = _run(tmp_path, FULL_WORLDS, FULL_CASES, environment=nccl_rules.ON)
    for case in FULL_CASES:
        check(outputs, case)


def test_a_checkpoint_tells_how_experts_lay(outputs: Outputs) -> None:
    told = [
        saved_layout(outputs.checkpoint(variant, source))
        for variant, source, *_ in DEFAULT_CASES[:2]
    ]
    assert told == ["TP 1 x PP 1 x DP 2 x CP 1", "TP 1 x PP 1 x DP 2 x CP 1 x EP 2 x ETP 1"]


def test_a_full_disk_of_one_rank_is_told_by_every_rank(outputs: Outputs) -> None:
    folder = outputs.refused("full_disk")
    of_rank_0, of_rank_1 = ((folder / f"result.rank{rank}").read_text() for rank in (0, 1))
    assert of_rank_1.startswith(f"RunFailed: writing {folder / 'checkpoint'}: ")
    assert of_rank_1.endswith("No space left on device")
    assert of_rank_0 == (
        f"FailedElsewhere: writing the checkpoint {folder / 'checkpoint'} failed on rank 1; its log"
        " has the reason"
    )


def test_a_full_disk_of_a_rank_that_exports_is_told_by_every_rank(outputs: Outputs) -> None:
    folder = outputs.refused("full_disk")
    of_rank_0, of_rank_1 = ((folder / f"result.export.rank{rank}").read_text() for rank in (0, 1))
    target = folder / "exports" / "policy"
    assert of_rank_1.startswith(f"RunFailed: the export to {target} failed: [Errno 28] No space")
    assert of_rank_0 == (
        f"FailedElsewhere: the export to {target} failed on rank 1; its log has the reason"
    )


@pytest.mark.parametrize("file", FILES_OF_RANK_0)
@pytest.mark.parametrize("way", ["at_once", "in_thread"])
def test_a_file_that_rank_0_alone_writes_is_told_by_every_rank(
    outputs: Outputs, file: str, way: str
) -> None:
    folder = outputs.refused(f"{way}{file}")
    of_rank_0, of_rank_1 = ((folder / f"result.rank{rank}").read_text() for rank in (0, 1))
    assert of_rank_0.startswith(f"RunFailed: writing {folder / 'checkpoint'}: ")
    assert file in of_rank_0
    assert of_rank_1 == (
        f"FailedElsewhere: writing the checkpoint {folder / 'checkpoint'} failed on rank 0; its log"
        " has the reason"
    )


def check(outputs: Outputs, case: Case) -> None:
    """Loaded equals saved: weights, masters and moments, before and after one more step."""
    variant, source, into, target = case
    saved, loaded = ({
        when: read_weights(folder(outputs, when, variant, source, *other)) for when in ("before",
            "after")
    } for other in ((), (into, target)))  # fmt: skip
    names = saved["before"].keys()
    assert {name.split("/")[1] for name in names if name.startswith("policy_optimizer/")} == set(
        KEYS
    )
    assert sum("experts" in name for name in names) > 4 * len(KEYS)
    for when in ("before", "after"):
        assert loaded[when].keys() == names
        for name, tensor in saved[when].items():
            assert torch.equal(loaded[when][name], tensor), f"{when}: {name}"
    for name in names:
        assert not torch.equal(saved["before"][name], saved["after"][name]), name


def folder(outputs: Outputs, when: str, variant: str, source: str, *loaded: str) -> Path:
    return outputs.trained(when, variant, source, "_".join(loaded))


def _run(
    root: Path,
    worlds: Worlds,
    cases: Sequence[Case],
    *,
    unwritable: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Outputs:
    outputs = Outputs(root)
    name, overrides = MODEL
    write_model(name, outputs.model(name), **overrides)
    for number, (size, saves, loads) in enumerate(worlds):
        payload = []
        for layout in saves:
            variants = dict.fromkeys(variant for variant, source, *_ in cases if source == layout)
            payload.append(_entry(layout, [_job(outputs, variant, layout) for variant in variants]))
        for layout in loads:
            payload.append(
                _entry(layout, [_job(outputs, *case) for case in cases if case[3] == layout])
            )
        if unwritable:
            payload.append({"layout": LAYOUTS[UNWRITABLE[1]], "cases": _unwritable(outputs)})
        run_ranks(
            Path(__file__).with_name("world_ranks.py"),
            size,
            outputs.root / f"world{number}",
            payload,
            deadline_s=480,
            environment=environment,
        )
    return outputs


def _entry(layout: str, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"layout": LAYOUTS[layout], "cases": [("checkpoint", job) for job in jobs]}


def _job(outputs: Outputs, variant: str, source: str, *loaded: str) -> dict[str, Any]:
    return {
        "variant": variant_of(loaded[0] if loaded else variant),
        "sources": {"policy": str(outputs.model(MODEL[0]))},
        "load" if loaded else "save": str(outputs.checkpoint(variant, source)),
        **{
            when: str(folder(outputs, when, variant, source, *loaded))
            for when in ("before", "after")
        },
    }


def _unwritable(outputs: Outputs) -> list[tuple[str, dict[str, Any]]]:
    common = {
        "variant": variant_of(UNWRITABLE[0]),
        "sources": {"policy": str(outputs.model(MODEL[0]))},
    }
    full = outputs.refused("full_disk")
    alone = [
        ("file_of_rank_0", {
            **common, "save": str(outputs.refused(f"{way}{file}") / "checkpoint"),
            "file": file, "in_thread": way == "in_thread",
            "result": str(outputs.refused(f"{way}{file}") / "result"),
        })
        for way in ("at_once", "in_thread")
        for file in FILES_OF_RANK_0
    ]  # fmt: skip
    return [
        ("full_disk", {**common, "save": str(full / "checkpoint"), "result": str(full / "result")}),
        *alone,
    ]
