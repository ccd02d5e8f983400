"""Counts of GPUs that `rlcore plan` takes, and the keys that it prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlcore import cli
from rlcore.config.load import load_config
from tests.unit.launch.commands.plan_kit import ALONE, CONFIG, first_line, rendered, validated

# --- whose GPUs are counted -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("kind=sglang", "1 engine of TP 1 on 1 GPU of their own"),
        ("kind=sglang count=4 tensor_parallel=2", "4 engines of TP 2 on 8 GPUs of their own"),
        ("kind=sglang colocated=true count=8", "8 engines of TP 1 on the trainer's GPUs"),
        ("kind=sglang device=cpu", "1 engine of TP 1 on the CPU"),
        ('kind=sglang urls=["http://a:1"]', "1 engine by rollout.engine.urls, whose GPUs are not"),
        ("count=2", "2 engines of TP 1 on 2 GPUs of their own, or on the trainer's where none is"),
        (
            "urls_file=engines kind=sglang",
            "engines by rollout.engine.urls_file, whose GPUs are not",
        ),
    ],
)
def test_the_engines_gpus_are_counted_apart(plan, keys: str, said: str) -> None:
    given = [f"rollout.engine.{key}" for key in keys.split()]
    code, out, _ = plan("--trainer-gpus", "8", *given)
    assert code == 0
    assert out.splitlines()[1].startswith(said)


def test_both_counts_are_as_configured_unless_they_are_given(plan) -> None:
    ray = ("cluster.launcher=ray", "cluster.nodes=2", "cluster.processes_per_node=8")
    sglang = ("rollout.engine.kind=sglang", "rollout.engine.tensor_parallel=2")
    out = plan(*ray, *sglang)[1]
    assert out.startswith("7.62 B parameters; 16 x H100 of 80.0 GiB for the trainer")
    assert out.splitlines()[1] == "1 engine of TP 2 on 2 GPUs of their own"
    out = plan("--trainer-gpus", "8", "--engine-gpus", "24", *ray, *sglang)[1]
    assert out.startswith("7.62 B parameters; 8 x H100 of 80.0 GiB for the trainer")
    assert out.splitlines()[1] == "12 engines of TP 2 on 24 GPUs of their own"
    assert "to 12 engines\n" in out, "a publication reaches them all"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("kind=sglang colocated=true", "but there is 1 engine of TP 1 on the trainer's GPUs"),
        ('kind=sglang urls=["http://a:1"]', "by rollout.engine.urls"),
        ("kind=sglang device=cpu", "on the CPU"),
        ("kind=sglang tensor_parallel=4", "got 6, but each engine takes 4 (rollout.engine.tensor"),
    ],
)
def test_engine_gpus_that_the_engines_cannot_take(plan, keys: str, said: str) -> None:
    given = [f"rollout.engine.{key}" for key in keys.split()]
    code, out, err = plan("--trainer-gpus", "8", "--engine-gpus", "6", *given)
    assert (code, out) == (2, "")
    assert err.startswith("rlcore: --engine-gpus: got 6, but ")
    assert said in err


# --- the keys of its answer -----------------------------------------------------------------------

SGLANG = ("rollout.engine.kind=sglang",)
RAY = ("rollout.engine.kind=sglang", "cluster.launcher=ray", "cluster.processes_per_node=128")
LOCAL = (ALONE, "rollout.engine.kind=sglang", "cluster.launcher=local")
NOT_DISTRIBUTED = "policy.optimizer.distributed=false"
FULL = "{recompute_granularity: full, recompute_method: block, recompute_num_layers: 3}"


@pytest.mark.parametrize(
    ("model", "counts", "given"),
    [
        ("Qwen2.5-7B", (8, None), ()),
        ("Qwen2.5-7B", (2, 6), LOCAL),
        ("Qwen2.5-7B", (8, 4), LOCAL),
        ("Qwen2.5-7B", (16, 8), (*SGLANG, "policy.parallel={pipeline: 4, virtual_pipeline: 7}")),
        ("Qwen2.5-7B", (8, None), (*SGLANG, "rollout.engine.colocated=true")),
        ("Qwen2.5-7B", (16, None), (*SGLANG, "rollout.engine={colocated: true, count: 8}")),
        ("Qwen2.5-7B", (12, 8), (*SGLANG, "rollout.engine={tensor_parallel: 2, gpus: [0, 1]}")),
        ("Qwen2.5-7B", (8, None), (f"policy.megatron={FULL}", NOT_DISTRIBUTED)),
        ("Qwen2.5-7B", (8, 8), (*RAY, "policy.parallel={pipeline: 2, first_stage_layers: 13}")),
        ("Qwen3-30B-A3B", (16, None), (f"policy.megatron={FULL}",)),
        ("Qwen3-30B-A3B", (16, 16), (*RAY, "policy.parallel.expert=4")),
        ("Llama-3.1-70B", (64, 32), (*SGLANG, "rollout.engine.tensor_parallel=4")),
    ],
)  # fmt: skip
def test_the_keys_stand_for_the_fastest_layout(
    plan, capsys, tmp_path: Path, model: str, counts: tuple[int, int | None], given: tuple[str, ...]
) -> None:
    """`validate` takes them, and a plan with them, and without counts, gives the same answer."""
    trainer, engines = counts
    numbers = ["--trainer-gpus", str(trainer)]
    numbers += [] if engines is None else ["--engine-gpus", str(engines)]
    code, out, err = plan(*numbers, *given, model=model)
    assert (code, err) == (0, "")
    keys = tmp_path / "keys.yaml"
    keys.write_text(out[out.index("\n# ") :])
    settings = tmp_path / "given.yaml"
    settings.write_text(rendered([Path(CONFIG)], [*validated(tmp_path, model), *given]))

    assert cli.main(["validate", str(settings), str(keys)]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "The model can be converted, and the layout and policy.megatron fit it" in said

    assert cli.main(["plan", str(settings), str(keys)]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[:2] == out.splitlines()[:2], "the counts are in the keys"
    shown = [line for line in again.splitlines() if re.match(r" [ *] +[\d.]+ s ", line)]
    assert shown[0] == " *" + first_line(out)[2:], "the layout is in the keys"
    more = tmp_path / "more.yaml"
    more.write_text(again[again.index("\n# ") :])
    assert load_config([settings, keys, more]).config == load_config([settings, keys]).config


@pytest.mark.parametrize("given", [LOCAL, (*SGLANG, "cluster.launcher=torchrun")])
def test_engines_that_take_turns_fill_the_nodes_of_the_trainer(plan, given: Sequence[str]) -> None:
    """No engine spans two nodes, and only Ray starts engines on every node."""
    keys = "rollout.engine={colocated: true, tensor_parallel: 2, count: 3}"
    _, out, _ = plan("--trainer-gpus", "16", *given, keys)
    assert out.splitlines()[1] == "8 engines of TP 2 on the trainer's GPUs"
    decided = out[out.index("\n# ") :]
    assert "  launcher: ray\n  nodes: 2\n  processes_per_node: 8\n" in decided
    assert "    count: 8\n" in decided


def test_there_are_no_keys_where_nothing_fits(plan) -> None:
    out = plan("--trainer-gpus", "8", model="Llama-3.1-70B")[1]
    assert "No layout fits." in out
    assert "\n# " not in out
    assert "cluster:" not in out
