"""What `rlcore plan` advises where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlcore.planning.devices import GPUS
from rlcore.planning.fit import gib, judge, needs
from rlcore.planning.job import Frozen, Job, Trained
from rlcore.planning.memory import Layout
from rlcore.planning.report import nearest
from rlcore.planning.shape import ModelShape

SHAPE = ModelShape(layers=32, hidden=4096, heads=32, groups=8, head_dim=128, ffn=12288, vocab=32000)
JOB = Job(
    trained=(Trained("policy", SHAPE), Trained("critic", SHAPE, value_head=True)),
    frozen=(Frozen("reference", SHAPE),), sequences=64, length=4096, trainable=1024,
    scoring_passes=1, pack_tokens=4096, dtype_bytes=2, vocab_multiple=1, chunk_elements=1 << 22,
)  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(data=2, distributed=True),
        # Pieces of the state come back, and at the start there are two copies of the weights: more
        # than the part of the state that a rank has.
        Layout(data=16, distributed=True),
    ],
)
def test_an_offload_promises_what_the_plan_with_it_needs_less(layout: Layout) -> None:
    policy, critic = JOB.trained
    changes = {
        "policy.optimizer.offload=true": replace(
            JOB, trained=(replace(policy, offload_optimizer=True), critic)
        ),
        "critic.optimizer.offload=true": replace(
            JOB, trained=(policy, replace(critic, offload_optimizer=True))
        ),
        "critic.offload=true": replace(JOB, trained=(policy, replace(critic, offload=True))),
        "reference.offload=true": replace(JOB, frozen=(Frozen("reference", SHAPE, offload=True),)),
    }
    option = judge(layout, JOB, GPUS["H100"])
    saved = {key: option.needs.peak - needs(layout, job).peak for key, job in changes.items()}
    lines = [line.strip() for line in nearest(JOB, [option], 1 << 30)]
    promised = {line for line in lines if "lowers the peak" in line}
    assert promised == {
        f"{key} lowers the peak by {gib(size)}" for key, size in saved.items() if size > 0
    }
    assert "reference.offload=true" in {line.split()[0] for line in promised}
