"""`rlcore dryrun` as a user calls it, on models of real widths with few layers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from rlcore.errors import UserError
from rlcore.launch.commands.dryrun import _ranks
from rlcore.planning.activations import micro_batches_in_flight
from rlcore.planning.memory import Layout

EXAMPLES = Path(__file__).parents[4] / "examples/models"
CONFIG = str(EXAMPLES / "grpo.yaml")
FULL = "policy.megatron={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"  # noqa: E501
EP8 = [
    "policy.parallel.tensor=1",
    "policy.parallel.sequence=false",
    "policy.parallel.expert=8",
]  # fmt: skip


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """Folders with the sizes of the examples, config.json alone, and two layers."""
    for folder in EXAMPLES.iterdir():
        if folder.is_dir():
            given = json.loads((folder / "config.json").read_text())
            (tmp_path / folder.name).mkdir()
            (tmp_path / folder.name / "config.json").write_text(
                json.dumps({**given, "num_hidden_layers": 2})
            )
    return tmp_path


def beside(out: str, name: str) -> tuple[float, float]:
    """The numbers of the dry run and of the plan."""
    found = re.search(rf"^  {name} +([\d.,]+)(?: GiB)? +([\d.,]+)", out, re.MULTILINE)
    assert found, f"{name} is not in\n{out}"
    return float(found[1].replace(",", "")), float(found[2].replace(",", ""))


def check(out: str, *, peaks: float = 0.05) -> None:
    """Parameters and state are those of the plan, and the peak is within `peaks` of it."""
    own, planned = beside(out, "policy parameters")
    assert own == planned
    for kind in ("weights", "gradients", "optimizer"):
        own, planned = beside(out, f"policy {kind}")
        assert own == pytest.approx(planned, rel=0.001)
    for phase in ("policy forward and backward", "policy optimizer step"):
        own, planned = beside(out, f"peak, {phase}")
        assert own == pytest.approx(planned, rel=peaks), phase


def test_both_stages_of_a_dense_model(cut: Path, dry_run) -> None:
    code, out, err = dry_run(cut / "Qwen2.5-7B", "--world", "16", "policy.parallel.pipeline=2")
    assert (code, err) == (0, "")
    first, last = out.split("\n\n")[1:3]
    assert first.startswith("Rank 0, stage 1 of 2: 2 micro-batches of 16384 tokens")
    assert last.startswith("Rank 15, stage 2 of 2: 1 micro-batches")
    check(first)
    check(last)
    assert "head.py" in last, "where the peak is reached"
    assert re.search(r"reduce_scatter_base in tensor_model_parallel_group of 4: \d+ calls", first)
    assert re.search(r"a publication: \d+ buckets", first)
    assert re.search(r"this rank writes \d+ tensors of a checkpoint", first)
    assert "Left out: CUDA's context" in out
    verdict = out.splitlines()[-1]
    assert re.fullmatch(
        r"Verdict: it works: ranks 0, 15 of 16 ran all phases, and the largest peak fits: [\d.]+"
        r" GiB in policy forward and backward of rank 0 and [\d.]+ GiB for NCCL's buffers,"
        r" \d communicators, of 73\.6 GiB that can be used of 80\.0 GiB",
        verdict,
    )
    largest = max(beside(part, "peak, policy forward and backward")[0] for part in (first, last))
    assert float(verdict.split("fits: ")[1].split()[0]) == pytest.approx(largest, abs=0.06)
    assert not dist.is_initialized(), "nothing of it stays"


def test_a_peak_that_does_not_fit_ends_with_what_to_do(cut: Path, dry_run) -> None:
    """The exit code is that of a failed run, and every line on the ranks is printed before."""
    code, out, err = dry_run(cut / "Qwen2.5-7B", "--world", "8", "--gpu-memory", "4G")
    assert code == 1
    assert "Rank 0, stage 1 of 1" in out
    assert "Left out: " in out
    assert "Verdict" not in out
    (line,) = err.splitlines()
    assert line.startswith("rlcore: verdict: rank 0 of 8 ran all phases, but the largest peak does")
    assert ", where 3.7 GiB of 4.0 GiB can be used; `rlcore plan CONFIG --trainer-gpus 8`" in line


def test_experts_recomputed(cut: Path, dry_run) -> None:
    code, out, err = dry_run(cut / "Qwen3-30B-A3B", "--world", "16", *EP8, FULL)
    assert (code, err) == (0, "")
    check(out)
    assert re.search(r"alltoall_base in expert_model_parallel_group of 8: \d+ calls", out)


def test_more_tokens_for_the_experts_of_the_rank(cut: Path, dry_run) -> None:
    model = cut / "Qwen3-30B-A3B"
    _, out, _ = dry_run(model, "--world", "16", "--skew", "3", *EP8, FULL)
    own, planned = beside(out, "peak, policy forward and backward")
    assert own == pytest.approx(planned, rel=0.05)
    even = 12
    assert own > even + 1, "GiB: the rank holds three times the rows"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rank", "16"], "--rank: got 16, expected 0 to 15: the trainer has 16 ranks"),
        (["--skew", "2"], "--skew: got 2, expected 1 (even) to 1"),
        (["policy.parallel.tensor=3"], "policy.parallel: tensor 3"),
        (["policy.parallel.pipeline=4"], "does not divide the model's 2 layers"),
        (["policy.parallel.expert=2"], "policy.parallel.expert: the qwen2 model has no experts"),
        (["policy.routing_replay=logprobs"], "policy.routing_replay: the qwen2 model has no"),
        (["policy.fp8.format=hybrid"], "policy.fp8: a dry run has Megatron's own layers"),
        (["model.path=/nowhere"], "/nowhere: no such folder"),
    ],
)
def test_what_does_not_fit_is_named_with_its_key(
    cut: Path, dry_run, arguments: list[str], said: str
) -> None:
    code, out, err = dry_run(cut / "Qwen2.5-7B", "--world", "16", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("layout", "world", "ranks"),
    [
        (Layout(), 1, [0]),
        (Layout(data=8), 8, [0]),
        (Layout(context=2, data=4), 8, [0, 7]),
        (Layout(pipeline=2, data=4), 8, [0, 7]),
        (Layout(pipeline=4, data=2), 8, [0, 4, 7]),
    ],
)
def test_by_default_a_rank_of_the_first_the_middle_and_the_last_stage(
    layout: Layout, world: int, ranks: list[int]
) -> None:
    assert _ranks(layout, world, None) == ranks


def test_a_rank_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match="--rank: got 8, expected 0 to 7"):
        _ranks(Layout(data=8), 8, [8])


def test_a_stage_shows_its_peak_once_its_schedule_has_run_ahead() -> None:
    plain = Layout(pipeline=4)
    assert [micro_batches_in_flight(plain, 16, stage) for stage in range(4)] == [4, 3, 2, 1]
    # of two stages with two chunks each, the first runs 5 chunks ahead: of 4 micro-batches
    virtual = Layout(pipeline=2, virtual_pipeline=2)
    assert [micro_batches_in_flight(virtual, 16, stage) for stage in range(2)] == [4, 2]
    assert micro_batches_in_flight(plain, 2, 0) == micro_batches_in_flight(virtual, 2, 0) == 2
