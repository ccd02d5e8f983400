"""A shim that runs stock Megatron-Core on a machine without CUDA.

Megatron asks for devices by name (`device="cuda"`, `torch.cuda.current_device()`, `tensor.type()`),
synchronises streams and keeps CUDA random states. `megatron_device("cpu")` answers all of that with
the CPU, for the calls inside it; nothing stays installed. With CUDA it is a no-op, so callers have
one code path.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_CUDA_TYPE_NAMES = {
    f"torch.{kind}": f"torch.cuda.{kind}"
    for kind in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "DoubleTensor")
}
_EXPECTED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    r"\s*The 'megatron.core.transformer.custom_layers.transformer_engine'",
    # Caused by a default of TransformerConfig.
    "full scope is deprecated",
)
# Warnings about CUDA_DEVICE_MAX_CONNECTIONS.
_WARNINGS_OF_CUDA = ("When using async grad allreduce", "When using sequence parallelism")


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of a module or class has another value."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _on_cpu(device: Any) -> Any:
    """Replace 'cuda', 'cuda:0' and torch.device('cuda') by the CPU; other values stay."""
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    return _CPU if isinstance(device, torch.device) and device.type == "cuda" else device


class _CudaMeansCpu(TorchFunctionMode):
    """Replaces explicit CUDA devices by the CPU, and answers `.cuda()` and `.type()`.

    Megatron uses these two to check whether a tensor is on the GPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs:
            if "device" in kwargs:
                kwargs["device"] = _on_cpu(kwargs["device"])
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        else:
            kwargs = {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return _CUDA_TYPE_NAMES.get(name, name)
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return func(*args, **kwargs)


class _Nothing:
    """A stream, event or device guard that accepts every call and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Nothing()

    def query(self) -> bool:
        return True


def _replacements() -> list[tuple[Any, str, Any]]:
    """List (owner, attribute, stub) of every CUDA call that Megatron makes."""
    cuda: Any = torch.cuda
    stream = _Nothing()

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    def get_state(device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = "cuda", graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    found: list[tuple[Any, str, Any]] = [
        (cuda, name, nothing) for name in ("synchronize", "set_device", "empty_cache")
    ]
    found += [(cuda, name, _Nothing) for name in ("Stream", "Event", "stream", "device")]
    found += [
        (cuda, name, lambda *args, **kwargs: stream)
        for name in ("current_stream", "default_stream")
    ]
    found += [
        (cuda, "current_device", lambda: _CPU),
        (cuda, "is_current_stream_capturing", lambda: False),
        (cuda.nvtx, "range_push", nothing),
        (cuda.nvtx, "range_pop", nothing),
        # There is one generator: the "CUDA" random state is the CPU's.
        (cuda, "manual_seed", torch.default_generator.manual_seed),
        (cuda, "get_rng_state", get_state),
        (cuda, "set_rng_state", set_state),
        (cuda.random, "get_rng_state", get_state),
        (cuda.random, "set_rng_state", set_state),
        (dist, "scatter", contiguous_scatter(dist.scatter)),
        (dist, "all_gather", uneven_all_gather(dist.all_gather)),
        (dist, "reduce_scatter", uneven_reduce_scatter(dist.reduce_scatter)),
    ]
    random = sys.modules.get("megatron.core.tensor_parallel.random")
    if random is not None:
        found.append((random, "_set_cuda_rng_state", set_state))
    dispatcher = sys.modules.get("megatron.core.transformer.moe.token_dispatcher")
    if dispatcher is not None:
        found.append((dispatcher, "maybe_move_tensor_to_cpu", _on_host))
    return found


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert a tensor to numbers, as all-to-all needs for its split sizes.

    Megatron does this only for tensors on a GPU.
    """
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _Installed:
    """The stubs, which are global attributes.

    The first context to open installs them, and the last to close removes them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._stubs = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._open += 1
            if self._open == 1:
                # torch.optim imports dynamo at first use, and dynamo's tables refuse a function
                # with two names: import it before the stubs are installed.
                importlib.import_module("torch._dynamo")
                for owner, name, stub in _replacements():
                    self._stubs.enter_context(replaced(owner, name, stub))
                # If another library imported Megatron first, its functions are still compiled. The
                # compiler's tables refuse the stubs too, and are rebuilt after a process group
                # ends.
                self._stubs.enter_context(torch.compiler.set_stance("force_eager"))

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._stubs.close()


_installed = _Installed()


@contextlib.contextmanager
def megatron_device(device: torch.device | str) -> Iterator[None]:
    """Inside, calls into Megatron run on `device`.

    The context is re-entrant, and each thread that calls Megatron needs it. On the CPU it adds
    about a microsecond to every torch call, so keep generation and the like outside.
    """
    if torch.device(device).type == "cuda":
        yield
        return
    with _installed, _CudaMeansCpu():
        yield


@contextlib.contextmanager
def importing_megatron() -> Iterator[None]:
    """Put this around imports of megatron.core; the first import must be inside.

    Without CUDA Megatron's `torch.compile` decorators become no-ops: they would import the
    compiler, which takes seconds, and need a C++ compiler at the first call of such a function.
    """
    compiles = "megatron.core.jit" in sys.modules or torch.cuda.is_available()
    compiler = torch.compile if compiles else _uncompiled
    with replaced(torch, "compile", compiler), expected_warnings_off():
        yield


def _uncompiled(model: Any = None, **options: Any) -> Any:
    """The stub of `torch.compile`, with and without arguments."""
    return model if model is not None else (lambda function: function)


@contextlib.contextmanager
def expected_warnings_off() -> Iterator[None]:
    """Inside, Megatron's warnings about missing optional packages are off."""
    with warnings.catch_warnings():
        unneeded = () if torch.cuda.is_available() else _WARNINGS_OF_CUDA
        for message in (*_EXPECTED_WARNINGS, *unneeded):
            warnings.filterwarnings("ignore", message=message)
        yield


# --- collectives of gloo --------------------------------------------------------------------------


def contiguous_scatter(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Make chunks contiguous: gloo's scatter silently sends the raw memory of other chunks."""

    def call(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        chunks = [chunk.contiguous() for chunk in scatter_list] if scatter_list else scatter_list
        return scatter(tensor, chunks, *args, **kwargs)

    return call


def uneven_all_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Gather parts of different sizes by one broadcast each, since gloo refuses them.

    The tokens of an expert that is split over ranks are such parts.
    """

    def call(
        tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or _even(tensor_list):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, part in enumerate(tensor_list):
            if part.numel():
                dist.broadcast(part, group=group, group_src=rank)
        return None

    return call


def uneven_reduce_scatter(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Reduce and scatter parts of different sizes by one reduction each."""

    def call(
        output: Tensor,
        input_list: Sequence[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or _even(input_list):
            return reduce_scatter(output, list(input_list), op=op, group=group, async_op=async_op)
        for rank, part in enumerate(input_list):
            if part.numel():
                total = part.clone()
                dist.reduce(total, op=op, group=group, group_dst=rank)
                if rank == dist.get_rank(group):
                    output.copy_(total)
        return None

    return call


def _even(parts: Sequence[Tensor]) -> bool:
    return len({part.shape for part in parts}) <= 1
