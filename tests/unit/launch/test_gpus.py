"""Which GPUs engines get, for every mode; too few are refused with the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import ConfigError
from rlcore.launch.engines import assign_gpus, visible_names


def assign(visible: int, ranks: int, **engine: Any) -> list[tuple[int, ...]]:
    return assign_gpus(EngineConfig(kind="sglang", **engine), visible=visible, ranks=ranks)


@pytest.mark.parametrize(
    ("visible", "ranks", "engine", "expected"),
    [
        (0, 1, {"count": 2}, [(), ()]),  # a CPU
        (8, 4, {"count": 2, "device": "cpu"}, [(), ()]),
        # the next free one
        (2, 1, {}, [(1,)]),
        (8, 4, {"count": 2, "tensor_parallel": 2}, [(4, 5), (6, 7)]),
        # one is left over
        (8, 5, {"count": 2}, [(5,), (6,)]),
        (8, 4, {"count": 2, "tensor_parallel": 2, "gpus": [7, 6, 5, 4]}, [(7, 6), (5, 4)]),
        # shared in space, if the user says so
        (2, 1, {"gpus": [0]}, [(0,)]),
        (1, 1, {"colocated": True}, [(0,)]),
        (
            8,
            8,
            {"colocated": True, "count": 4, "tensor_parallel": 2},
            [(0, 1), (2, 3), (4, 5), (6, 7)],
        ),
        (8, 4, {"colocated": True, "count": 2}, [(0,), (1,)]),
        (4, 4, {"colocated": True, "count": 2, "gpus": [3, 1]}, [(3,), (1,)]),
    ],
)
def test_each_engine_gets_its_own(
    visible: int, ranks: int, engine: dict[str, Any], expected: list[tuple[int, ...]]
) -> None:
    assert assign(visible, ranks, **engine) == expected


@pytest.mark.parametrize(
    ("visible", "ranks", "engine", "expected"),
    [
        (0, 1, {"count": 2}, [(), ()]),
        (8, 4, {"count": 2}, [(4,), (5,)]),
        (4, 3, {"count": 2}, [(3,), (3,)]),
        # no GPU is free: the trainer's, one after the other
        (2, 2, {"count": 3}, [(0,), (1,), (0,)]),
        (8, 2, {"count": 3, "colocated": True}, [(0,), (1,), (0,)]),
        (8, 2, {"count": 1, "device": "cpu"}, [()]),
    ],
)
def test_embedded_engines_are_dealt_over_the_gpus(
    visible: int, ranks: int, engine: dict[str, Any], expected: list[tuple[int, ...]]
) -> None:
    assert assign_gpus(EngineConfig(**engine), visible=visible, ranks=ranks) == expected


@pytest.mark.parametrize(
    ("visible", "ranks", "engine", "message"),
    [
        (
            1,
            1,
            {},
            r"rollout.engine.count: 1 x rollout.engine.tensor_parallel 1 need 1 GPUs, but of"
            r" the 1 of this machine the trainer has 1: .*colocated",
        ),
        (
            8,
            6,
            {"count": 2, "tensor_parallel": 2},
            r"need 4 GPUs, but of the 8 of this machine the trainer has 6",
        ),
        (
            8,
            2,
            {"colocated": True, "count": 2, "tensor_parallel": 2},
            r"need 4 GPUs, but the trainer, .* has 2 on",
        ),
        (
            8,
            4,
            {"count": 2, "gpus": [5]},
            r"rollout.engine.gpus: got 1, but rollout.engine.count 2 x .* 1 need 2",
        ),
        (4, 2, {"gpus": [4]}, r"rollout.engine.gpus: got 4, but this machine has GPUs 0 to 3"),
        (
            0,
            1,
            {"gpus": [0]},
            r"rollout.engine.gpus: got \[0\], but torch sees no GPU here: leave it out",
        ),
        (
            8,
            4,
            {"gpus": [5], "device": "cpu"},
            r"rollout.engine.gpus: got \[5\], but engines are on the CPU",
        ),
        (
            8,
            4,
            {"colocated": True, "gpus": [4]},
            r"rollout.engine.gpus: got 4, which no trainer process is on \(.* 0 to 3",
        ),
    ],
)
def test_too_few_gpus_are_refused_with_the_numbers(
    visible: int, ranks: int, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        assign(visible, ranks, **engine)


def test_a_machine_of_an_engine_on_several_needs_gpus_for_its_own_ranks() -> None:
    config = EngineConfig(kind="sglang", tensor_parallel=16)
    assert assign_gpus(config, visible=8, ranks=0, nodes=2) == [tuple(range(8))]
    message = r"1 x rollout.engine.tensor_parallel 16 over 2 machines need 8 GPUs, but of the 4 of"
    with pytest.raises(ConfigError, match=message):
        assign_gpus(config, visible=4, ranks=0, nodes=2)


def test_a_child_is_told_the_names_that_this_process_was_told() -> None:
    assert visible_names((1, 0), {}) == ["1", "0"]
    assert visible_names((1, 0), {"CUDA_VISIBLE_DEVICES": "4, 6"}) == ["6", "4"]
    assert visible_names((1,), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}) == ["GPU-b"]
