"""What `rollout.engine.colocated` and `rollout.engine.gpus` go with."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from rlcore.config.checks.all_checks import warnings_of
from rlcore.config.checks.engine import colocated
from rlcore.config.load import Loaded

SGLANG = "rollout.engine.kind=sglang"
COLOCATED = (SGLANG, "rollout.engine.colocated=true")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*COLOCATED, "rollout.engine.urls=[http://x:1]"], "rollout.engine.colocated.*stopped "
         "and started elsewhere"),
        ([*COLOCATED, "cluster.nodes=2", "cluster.launcher=torchrun"],
         "cluster.nodes.*got 2, but .*launcher torchrun .*colocated.*set cluster.launcher to ray"),
        ([*COLOCATED, "rollout.engine.transport=distributed"], "rollout.engine.transport.*got "
         "'distributed', but NCCL"),
        ([*COLOCATED, "rollout.engine.server={--enable-memory-saver: false}"],
         "rollout.engine.server.enable_memory_saver.*got false"),
        ([SGLANG, "rollout.engine.gpus=[1]", "rollout.engine.device=cpu"],
         "rollout.engine.gpus.*device is 'cpu'"),
        ([SGLANG, "rollout.engine.gpus=[1,2,1]", "rollout.engine.count=3"],
         "rollout.engine.gpus.*1 is named twice"),
        ([SGLANG, "rollout.engine.gpus=[1,2,3]", "rollout.engine.count=2",
         "rollout.engine.tensor_parallel=2"], "rollout.engine.gpus.*got 3, but count 2 x "
         "tensor_parallel 2 need 4"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    refusal: Callable[..., list[str]], overrides: list[str], message: str
) -> None:
    lines = refusal(*overrides)
    assert len(lines) == 1
    assert re.search(message, lines[0])


def test_generation_and_training_at_once_is_no_taking_turns(load: Callable[..., Loaded]) -> None:
    config = load(*COLOCATED).config
    config.rollout.max_staleness = 2
    ((path, message),) = colocated(config)
    assert path == "rollout.max_staleness"
    assert "got 2" in message


@pytest.mark.parametrize(
    "overrides",
    [
        [*COLOCATED, "rollout.engine.gpus=[1,0]", "rollout.engine.count=2",
         "rollout.engine.transport=tensor"],
        # the embedded engine takes turns too
        ["rollout.engine.colocated=true"],
        # no engine
        [*COLOCATED, "rollout.engine.urls=[http://x:1]", "algorithm.loss.name=sft",
         "data.label_key=label"],
        # neither here
        [*COLOCATED, "rollout.engine.urls=[http://x:1]", "training.debug=train_only",
         "training.replay=x"],
    ],
)  # fmt: skip
def test_what_goes_together(load: Callable[..., Loaded], overrides: list[str]) -> None:
    load(*overrides)


def test_an_engine_that_takes_nearly_all_memory_is_remarked_on(load: Callable[..., Loaded]) -> None:
    for share, remarks in ((0.9, 1), (0.8, 0)):
        config = load(*COLOCATED, f"rollout.engine.server={{mem-fraction-static: {share}}}").config
        notes = [note for note in warnings_of(config) if note.path.endswith("mem_fraction_static")]
        assert len(notes) == remarks
