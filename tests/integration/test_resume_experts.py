"""A model with experts, resumed under other layouts: expert ranks, stages, one process."""

from __future__ import annotations

import pytest

from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.runs.checkpoints import committed_steps
from tests.integration.resume_runs import UPDATES, Runs, assert_close_run, metrics_of, result_of

# AdamW divides by the square root of the second moment: with a larger eps round-off stays
# round-off.
CALM = ("policy.optimizer.eps=1e-2", "critic.optimizer.eps=1e-2")
RANKS = ("cluster.launcher=torchrun",)
EP2 = ("policy.parallel.expert=2",)
EP2_DISTRIBUTED = (*EP2, "policy.optimizer.distributed=true", "critic.optimizer.distributed=true")
PP2 = ("policy.parallel.pipeline=2",)


@pytest.mark.full
def test_from_shared_out_experts_over_pipeline_stages_and_a_full_disk_to_one_process(
    runs: Runs,
) -> None:
    """Losses as those of the undisturbed run, whose routers have both of their losses."""
    init_model(
        runs.path("with_experts"),
        ModelSpec(
            family="qwen3_moe", hidden=32, layers=2, heads=4, kv_heads=2, intermediate=32, experts=4
        ),
    )
    options = (
        *CALM,
        f"model.path={runs.path('with_experts')}",
        "policy.megatron={moe_z_loss_coeff: 0.001}",
    )
    runs.finish("calm", *options)
    for layout, updates, steps in ((EP2, UPDATES + 1, 2), (PP2, 1, 3)):
        ask = {"point": "update", "call": updates, "action": "terminate"}
        ended = runs.train("layouts", *options, *RANKS, *layout, ranks=2, resume=True, at=ask)
        assert ended.codes == [130, 130], ended.output
        assert (
            result_of(runs.path("layouts"))["status"],
            result_of(runs.path("layouts"))["steps"],
        ) == ("interrupted", steps)

    full = {"point": "write shard", "call": 20, "rank": 1, "action": "disk full"}
    ended = runs.train("layouts", *options, *RANKS, *EP2_DISTRIBUTED, ranks=2, resume=True, at=full)
    assert set(ended.codes) == {1}, ended.output
    assert "No space left on device" in ended.output
    # beside what the other rank logs
    assert "the checkpoint of step 3 is intact" in ended.output
    assert committed_steps(runs.path("layouts") / "checkpoints") == [3]

    runs.finish("layouts", *options)
    # one process takes its fuller micro-batch of two, two replicas the only one of each
    sampled = ("policy/step_kl",)
    assert_close_run(runs.path("layouts"), runs.path("calm"), tolerance=1e-5, sampled=sampled)
    assert all("train/moe_z_loss" in row for row in metrics_of(runs.path("calm"))[2:])
