"""Floating-point tensors without memory, and integers with values.

Floating-point tensors are torch's meta tensors, which have sizes but no values. An operation on
integers alone runs for real, so that packs, positions, token counts and split sizes have values,
and code that reads them works. An operation with a meta tensor returns meta tensors. Collectives
use torch's fake group, whose gather copies the rank's own part to every slot, as if all ranks were
like this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from backends.megatron.dryrun.usage import Usage

META = torch.device("meta")
aten = torch.ops.aten
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_FACTORIES = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "zeros", "ones", "full", "arange", "empty_strided", "scalar_tensor", "randint",
        "randperm", "tril_indices",
    )
)  # fmt: skip
_COUNTING = frozenset({"aten::arange", "aten::randint", "aten::randperm"})
_LIKE = (torch.empty_like, torch.Tensor.new_zeros, torch.Tensor.new_empty)
# uint8 tensors from this size on are bytes of weights, which have no memory either.
_REAL_BYTES = 1 << 16


class MetaFloats(TorchDispatchMode):
    """Makes floating-point tensors meta tensors, keeps integers, and counts both in `usage`."""

    def __init__(self, usage: Usage) -> None:
        super().__init__()
        self.usage = usage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled: torch's guard against compilation would cost more than this mode.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # In a backward pass the function modes would otherwise see every attribute access.
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.usage.operations += 1
        tensors = list(_tensors((*args, *kwargs.values())))
        metas = [t for t in tensors if t.is_meta]
        name = func._schema.name
        if name.startswith("c10d::"):
            self._count_collective(name, args, kwargs, tensors)
            if metas:
                work = torch._C._distributed_c10d.FakeWork().boxed()
                return work if len(func._schema.returns) == 1 else (args[0], work)
        if not metas:
            is_real = bool(tensors) or _makes_integers(name, args, kwargs)
            if is_real and "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            return self._run(func, args, kwargs) if is_real else self._meta(func, args, kwargs)
        if name == "aten::_local_scalar_dense" or name == "aten::is_nonzero":
            self.usage.add_read()
            return 1 if metas[0].dtype in _INTEGERS else 1.0
        if name == "aten::equal":
            return True
        if name == "aten::masked_select" and not args[1].is_meta:
            mask = args[1].expand(torch.broadcast_shapes(args[0].shape, args[1].shape))
            return self._run(aten.new_empty.default, (args[0], [int(mask.sum())]), {})
        if len(metas) < len(tensors):
            written = _real_written(func, args, kwargs)
            if written is not None:
                # The number has no value: the tensor stays as it was.
                return written
            args, kwargs = (_as_meta(part) for part in (args, kwargs))
        return self._meta(func, args, kwargs)

    def _meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _takes_device(func):
            kwargs = {**kwargs, "device": META}
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        for tensor in _tensors((out,)):
            self.usage.add(tensor, func._schema.name)
        return out

    def _count_collective(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                group = dist.ProcessGroup.unbox(value)
                label = f"{(group.group_desc or group.group_name).lower()} of {group.size()}"
                size = max((t.numel() * t.element_size() for t in tensors), default=0)
                self.usage.add_collective(label, name.removeprefix("c10d::").strip("_"), size)
                return


class FunctionsOfCuda(TorchFunctionMode):
    """Makes functions take the path of CUDA where fake tensors would take that of the CPU."""

    def __init__(self, usage: Usage) -> None:
        super().__init__()
        self.usage = usage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.rms_norm or func is torch.nn.functional.rms_norm:
            return _FusedNorm.apply(args[0], args[2] if len(args) > 2 else kwargs["weight"])
        if func is torch.Tensor.type and args[0].is_meta and len(args) == 1 and not kwargs:
            return str(func(args[0])).replace("torch.meta.", "torch.cuda.")
        if func is torch.tensor and _holds_metas(args[0]):
            # Megatron's gradient norm makes a tensor of a list of numbers.
            return _stacked(args[0])
        if self._is_host(func, args, kwargs):
            with self.usage.on_host():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _is_host(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a new tensor is in host memory.

        Only calls for host memory set `pin_memory`, and only Megatron passes "cpu" by name.
        """
        named = isinstance(kwargs.get("device"), str) and kwargs["device"] == "cpu"
        like = func in _LIKE and self.usage.is_host(args[0])
        return named or like or "pin_memory" in kwargs or func is torch.Tensor.cpu


class _FusedNorm(torch.autograd.Function):
    """The tensors that CUDA's kernel of an RMSNorm saves: the input, the weight and 1 / rms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@cache
def _takes_device(func: Any) -> bool:
    """Whether an operation has an argument for the device of its result."""
    return any(argument.name == "device" for argument in func._schema.arguments)


def _makes_integers(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation without tensor arguments makes integers with values."""
    if name not in _FACTORIES:
        return False
    dtype = kwargs.get("dtype")
    if dtype is None and name in _COUNTING:
        dtype = None if any(isinstance(value, float) for value in args) else torch.int64
    if dtype is None and name == "aten::full" and isinstance(args[1], (bool, int)):
        dtype = torch.int64
    if dtype is torch.uint8 and args and isinstance(args[0], (list, tuple)):
        return torch.Size(args[0]).numel() < _REAL_BYTES
    return dtype in _INTEGERS


def _as_meta(value: Any) -> Any:
    """A nest of arguments with meta tensors in place of real tensors."""
    if isinstance(value, Tensor):
        if value.is_meta:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, dict):
        return {key: _as_meta(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_as_meta(part) for part in value)
    return value


def _real_written(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The first real tensor that an operation writes into."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor) and not value.is_meta:
                return value
    return None


def _holds_metas(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    return isinstance(value, (list, tuple)) and any(_holds_metas(part) for part in value)


def _stacked(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.stack([_stacked(part) for part in value])
