"""The groups of a layout beside those of a dry run's collectives, and NCCL's bytes by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from backends.megatron.convert.read import read_policy
from rlcore.config.load import load_config
from rlcore.launch.commands.dryrun import dry_run
from rlcore.launch.commands.plan import configured_layout
from rlcore.planning.fit import (
    SLEEPING_ENGINE,
    TRAINING_GROUP,
    needs,
    outside_bytes,
    publication_groups,
    stage_needs,
    training_groups,
)
from rlcore.planning.job import Job, Trained
from rlcore.planning.memory import Layout
from rlcore.planning.publication import Publication
from rlcore.planning.shape import ModelShape

MODELS = Path(__file__).parents[3] / "examples/models"
DENSE = ModelShape(layers=8, hidden=64, heads=4, groups=4, head_dim=16, ffn=96, vocab=256)
WHOLE = "policy.optimizer.distributed=false"
# Megatron's name of each group
NAMES = {
    "tensor": "tensor_model_parallel_group",
    "pipeline": "pipeline_model_parallel_group",
    "context": "context_parallel_group",
    "data and context": "data_parallel_group_with_cp",
    "embeddings": "embedding_group",
    "expert": "expert_model_parallel_group",
    "expert tensor": "expert_tensor_parallel_group",
    "expert and its tensor": "expert_tensor_and_model_parallel_group",
    "expert data": "expert_data_parallel_group",
    "whole optimizer": "intra_distributed_optimizer_instance_group",
    "model": "model_parallel_group",
    "model with experts": "expert_tensor_model_pipeline_parallel_group",
}


@pytest.mark.parametrize(
    ("model", "given", "world"),
    [
        ("Qwen2.5-0.5B", ("{tensor: 2, pipeline: 2}", WHOLE), 8),
        ("Qwen3-30B-A3B", ("{tensor: 2, expert: 4, expert_tensor: 2}", WHOLE), 16),
        (
            "Qwen3-30B-A3B",
            ("{tensor: 2, pipeline: 2, context: 2, expert: 4, expert_tensor: 1, sequence: true}",),
            16,
        ),
        # The last stage gets the first one's embedding, which is not its head.
        (
            "GLM-4.5-Air",
            ("{pipeline: 2, tensor: 1, expert: 2, sequence: false}", "policy.mtp_coef=0.1"),
            4,
        ),
    ],
    ids=["dense", "expert_tensor", "all", "prediction"],
)
def test_the_groups_are_those_that_a_step_uses(
    model: str, given: tuple[str, ...], world: int, tmp_path: Path
) -> None:
    small = json.loads((MODELS / model / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(small))
    parallel, *more = given
    overrides = [f"model.path={tmp_path}", f"policy.parallel={parallel}", *more]
    config = load_config([MODELS / "grpo.yaml"], overrides).config
    said = "\n".join(dry_run(config, world=world, ranks=[world - 1], gpu_memory=1 << 44))
    used = {
        (name, int(size))
        for name, size in re.findall(r" in (\S+_group\S*) of (\d+): ", said)
        if int(size) > 1
    }
    arch = read_policy(config, weights=False)
    layout = configured_layout(config, arch, world)
    groups = training_groups(
        layout, moe=arch.shape.experts > 0, linked=arch.shape.tied or arch.shape.mtp
    )
    assert {(NAMES[name], size) for name, size in groups.items()} == used


def job_of(published: Publication | None, shape: ModelShape = DENSE) -> Job:
    return Job(
        trained=(Trained("policy", shape),), frozen=(), sequences=64, length=8, trainable=2,
        scoring_passes=0, pack_tokens=16, dtype_bytes=2, vocab_multiple=1, chunk_elements=1,
        publication=published,
    )  # fmt: skip


def test_groups_of_a_publication() -> None:
    """One for parts of buckets, one for whole buckets, and one for each engine of a sender."""
    layout = Layout(tensor=2, pipeline=2, data=2)
    assert publication_groups(layout, job_of(None)) == 0
    published = Publication((8,), 8, engines=6, transport="distributed", senders=2)
    assert publication_groups(layout, job_of(published)) == 2 + 3
    by_handle = Publication((8,), 8, engines=6, transport="tensor", senders=6)
    assert publication_groups(layout, job_of(by_handle)) == 2
    assert publication_groups(Layout(), job_of(by_handle)) == 0


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_the_fullest_stage_is_that_of_the_whole_step(transport: str) -> None:
    """A publication may be the peak of a stage whose passes need less than another's."""
    published = Publication((1 << 30,), 1 << 30, 1, transport, 1, colocated=True)
    job = job_of(published, replace(DENSE, layers=9))
    for stages in ((2, 7), (7, 2), (4, 5)):
        layout = Layout(tensor=2, pipeline=2, stages=stages)
        alone = [stage_needs(layout, job.load(layout), job, stage) for stage in (0, 1)]
        buffers = published.buffers(layout)
        during = published.engine_bytes
        if transport == "tensor":
            during += buffers + published.two_buckets
            buffers = 0
        peaks = [
            sum(one.resident.values()) + buffers + max(*one.phases.values(), during)
            for one in alone
        ]
        assert needs(layout, job).peak == max(peaks) + sum(outside_bytes(layout, job).values())


def test_bytes_are_those_that_were_measured() -> None:
    """7 GB a rank under TP 2 x PP 2 x DP 2, and 9.5 GB with experts."""
    layout = Layout(tensor=2, pipeline=2, data=2, distributed=True)
    dense = outside_bytes(layout, job_of(None))
    assert sum(dense.values()) == pytest.approx(7e9, rel=0.3)
    moe = replace(DENSE, experts=16, topk=2, expert_ffn=32, expert_layers=(True,) * 8)
    expert = replace(layout, expert=2, expert_tensor=2)
    assert sum(outside_bytes(expert, job_of(None, moe)).values()) == pytest.approx(9.5e9, rel=0.3)
    assert outside_bytes(Layout(), job_of(None)) == {}


def test_the_first_and_the_last_stage_alone_exchange_embeddings() -> None:
    layout = Layout(pipeline=4)
    for shape in (replace(DENSE, tied=True), replace(DENSE, mtp=True)):
        ends, *middle, last = (
            sum(outside_bytes(layout, job_of(None, shape), stage).values()) for stage in range(4)
        )
        assert ends == last
        assert middle == [ends - TRAINING_GROUP] * 2


def test_a_colocated_engine_keeps_something_while_it_sleeps() -> None:
    published = Publication((8,), 8, engines=6, transport="tensor", senders=6)
    colocated = replace(published, colocated=True)
    held = [outside_bytes(Layout(), job_of(one)) for one in (published, colocated)]
    assert held == [{}, {"a sleeping engine": SLEEPING_ENGINE}]
