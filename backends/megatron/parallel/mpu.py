"""The questions of `ParallelState.from_mpu` to Megatron's `parallel_state`, or to a stub of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed import ProcessGroup

# our name of a group -> the function of mpu that returns it, and the arguments
MPU_GROUPS: Mapping[str, tuple[str, Mapping[str, bool]]] = {
    "tp_group": ("get_tensor_model_parallel_group", {}),
    "pp_group": ("get_pipeline_model_parallel_group", {}),
    "dp_group": ("get_data_parallel_group", {}),
    "cp_group": ("get_context_parallel_group", {}),
    "dp_cp_group": ("get_data_parallel_group", {"with_context_parallel": True}),
    "mp_group": ("get_model_parallel_group", {}),
}


def ask(mpu: Any, function: str, *, otherwise: int | None = None) -> int:
    """Call `function` of `mpu`, which must return an int.

    `otherwise`, where given, is returned if there is no such function or it returns no int; else
    that raises AttributeError or TypeError naming the function.
    """
    asked = getattr(mpu, function, None)
    answer = asked() if callable(asked) else None
    if isinstance(answer, int):
        return answer
    if otherwise is not None:
        return otherwise
    if not callable(asked):
        raise AttributeError(
            f"mpu has no function {function}; a stub of it needs one that returns an int"
        )
    raise TypeError(
        f"mpu.{function}() returned {answer!r}, expected an int: give the stub that answer"
    )


def ask_axis(
    mpu: Any, axis: str, *, otherwise: tuple[int | None, int | None] = (None, None)
) -> tuple[int, int]:
    """Return (size, rank) of this process on one axis of the layout.

    Raises ValueError for a rank outside the size.
    """
    size = ask(mpu, f"get_{axis}_world_size", otherwise=otherwise[0])
    rank = ask(mpu, f"get_{axis}_rank", otherwise=otherwise[1])
    if not 0 <= rank < size:
        raise ValueError(
            f"mpu.get_{axis}_rank() is {rank}, expected 0 to {size - 1}, as get_{axis}_world_size()"
            f" is {size}"
        )
    return size, rank


def ask_groups(mpu: Any) -> dict[str, ProcessGroup]:
    """Return Megatron's process groups by our names; a stub may lack some or all."""
    found: dict[str, ProcessGroup] = {}
    for name, (function, arguments) in MPU_GROUPS.items():
        asked = getattr(mpu, function, None)
        group = asked(**arguments) if callable(asked) else None
        if isinstance(group, ProcessGroup):
            found[name] = group
    return found
