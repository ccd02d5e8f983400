"""A stub of `megatron.core.mpu` in a unit test: its functions, and how it replaces the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from backends.megatron import ParallelState
from backends.megatron.testing import stub_megatron, stub_mpu

ALONE = ParallelState.from_mpu(stub_mpu())
SIZES_AND_RANKS = {
    "tensor_model": (2, 1),
    "pipeline_model": (2, 1),
    "data": (3, 2),
    "context": (1, 0),
}
ASKED = {
    f"get_{axis}_parallel_{what}": answer
    for axis, answers in SIZES_AND_RANKS.items()
    for what, answer in zip(("world_size", "rank"), answers)
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# --- what a stub must answer ----------------------------------------------------------------------


def by_hand() -> Any:
    return type(
        "Mpu", (), {name: lambda _, answer=answer: answer for name, answer in ASKED.items()}
    )()


def namespace() -> Any:
    mpu = by_hand()
    return SimpleNamespace(**{name: getattr(mpu, name) for name in ASKED})


def mock() -> Any:
    mpu = MagicMock()
    for name in ASKED:
        getattr(mpu, name).return_value = getattr(by_hand(), name)()
    return mpu


def module() -> Any:
    made = ModuleType("megatron.core.parallel_state")
    vars(made).update(vars(namespace()))
    return made


@pytest.mark.parametrize("kind", [by_hand, namespace, mock, module])
def test_any_object_that_answers_will_do(kind: Any) -> None:
    made = ParallelState.from_mpu(kind())
    assert made == ParallelState.from_mpu(stub_mpu(tensor=2, pipeline=2, data=3, rank=11))
    assert (made.rank, made.world_size, made.ep_size, made.vpp_size) == (11, 12, 1, 1)
    assert (made.tp_rank, made.pp_rank, made.dp_rank, made.cp_rank, made.is_last_stage) == (
        1,
        1,
        2,
        0,
        True,
    )


@pytest.mark.parametrize("missing", sorted(ASKED))
def test_a_function_that_the_stub_lacks_is_named(missing: str) -> None:
    mpu = namespace()
    delattr(mpu, missing)
    with pytest.raises(AttributeError, match=rf"^mpu has no function {missing};"):
        ParallelState.from_mpu(mpu)


@pytest.mark.parametrize("unset", sorted(ASKED))
def test_an_answer_that_is_no_int_is_named(unset: str) -> None:
    mpu = mock()
    setattr(mpu, unset, MagicMock())
    with pytest.raises(
        TypeError, match=rf"^mpu\.{unset}\(\) returned <MagicMock .*, expected an int"
    ):
        ParallelState.from_mpu(mpu)


def test_a_rank_outside_its_size_is_named() -> None:
    mpu = namespace()
    mpu.get_data_parallel_rank = lambda: 3
    with pytest.raises(
        ValueError,
        match=r"^mpu.get_data_parallel_rank\(\) is 3, expected 0 to 2, as get_data_parallel_world",
    ):
        ParallelState.from_mpu(mpu)


@pytest.mark.parametrize("group", ["dp_group", "dp_cp_group", "control_group", "replica_group"])
def test_without_torch_distributed_there_are_no_groups(group: str) -> None:
    assert not ALONE.is_distributed
    with pytest.raises(
        RuntimeError,
        match=rf"^this ParallelState has no {group}: torch.distributed was not initialised",
    ):
        getattr(ALONE, group)


LAYOUTS = [
    {"tensor": 1, "pipeline": 1, "data": 1, "context": 1, "expert": 1},
    {"tensor": 2, "pipeline": 3, "data": 4, "context": 1, "expert": 2},
    {"tensor": 2, "pipeline": 2, "data": 2, "context": 3, "expert": 6},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stub_counts_ranks_as_megatron_does(layout: dict[str, int]) -> None:
    from backends.megatron.cpu.shim import importing_megatron

    with importing_megatron():
        from megatron.core.parallel_state import RankGenerator

    tp, pp, dp, cp, ep = (
        layout[name] for name in ("tensor", "pipeline", "data", "context", "expert")
    )
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    experts = RankGenerator(tp=tp, ep=ep, dp=dp * cp // ep, pp=pp, cp=1, order="tp-cp-ep-dp-pp")

    def coordinate(generator: Any, axis: str, rank: int) -> int:
        return next(ranks.index(rank) for ranks in generator.get_ranks(axis) if rank in ranks)

    replicas: dict[int, list[int]] = {}
    for rank in range(tp * pp * dp * cp):
        stub = stub_mpu(**layout, rank=rank)
        state = ParallelState.from_mpu(stub)
        assert (state.rank, state.world_size) == (rank, tp * pp * dp * cp)
        assert state.tp_rank == coordinate(dense, "tp", rank)
        assert state.cp_rank == coordinate(dense, "cp", rank)
        assert state.dp_rank == coordinate(dense, "dp", rank)
        assert state.pp_rank == coordinate(dense, "pp", rank)
        assert state.ep_rank == coordinate(experts, "ep", rank)
        assert stub.get_data_parallel_rank(with_context_parallel=True) == coordinate(
            dense, "dp-cp", rank
        )
        replicas.setdefault(state.dp_rank, []).append(rank)
    assert state.replica_leaders == tuple(ranks[0] for _, ranks in sorted(replicas.items()))
    assert all(
        ParallelState.from_mpu(stub_mpu(**layout, rank=rank)).is_last_stage
        for rank in state.score_sources
    )
    assert all(source in replicas[d] for d, source in enumerate(state.score_sources))


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"tensor": 0}, "tensor: got 0"),
        ({"tensor": 2, "rank": 2}, "rank: got 2, expected 0 to 1"),
        ({"data": 3, "expert": 2}, "expert: 2 does not divide data 3 x context 1"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(layout: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        stub_mpu(**layout)


# --- the stub in the place of Megatron ------------------------------------------------------------


def megatron_modules() -> dict[str, Any]:
    return {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron"
    }


def test_code_that_imports_mpu_gets_the_stub_and_then_what_was_there() -> None:
    before = megatron_modules()
    with stub_megatron(stub_mpu(tensor=4, rank=3), replace=True) as stub:
        from megatron.core import mpu, parallel_state
        from megatron.core.parallel_state import get_tensor_model_parallel_rank

        assert mpu is stub
        assert parallel_state is stub
        assert get_tensor_model_parallel_rank() == 3
        with pytest.raises(ModuleNotFoundError):
            import megatron.core.tensor_parallel  # noqa: F401
    assert megatron_modules() == before


def test_a_megatron_that_is_there_is_not_replaced_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("megatron.core")
    monkeypatch.setitem(sys.modules, "megatron.core", real)
    with (
        pytest.raises(RuntimeError, match=r"megatron.core is imported already.*replace=True"),
        stub_megatron(stub_mpu()),
    ):
        pass
    with pytest.raises(KeyError), stub_megatron(stub_mpu(), replace=True):
        raise KeyError
    assert sys.modules["megatron.core"] is real
