"""What stock SGLang needs to run without CUDA, put in place before it is imported. Imports nothing
of ours.

`sgl_kernel` beside this file is found where no real one is installed, since its folder comes last
on the path.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import torch

_library: torch.library.Library | None = None  # its definitions go with it


def install() -> None:
    """Does nothing where there is a GPU."""
    if torch.version.cuda is None:
        _define_torchvision_operators()
    if not torch.cuda.is_available():
        torch.cuda.cudart = NoCudart  # type: ignore[assignment]


def install_fp8() -> None:
    """Have SGLang's FP8 linear layers multiply by what their blocks stand for.

    On the CPU it has kernels for AMX alone, and refuses. Activations are not quantised here.
    """
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    def linear(
        input: torch.Tensor,
        weight: torch.Tensor,
        block_size: list[int],
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        whole = block_quant_dequant(weight, weight_scale, block_size, input.dtype)
        return torch.nn.functional.linear(input, whole, bias)

    fp8._is_cpu = False
    fp8.dispatch_w8a8_block_fp8_linear = lambda **_: linear


def install_data_parallel_attention() -> None:
    """Tell SGLang how long the sequences are with which it pads a data-parallel rank's batch.

    Of its kinds of attention torch's own does not.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


class NoCudart:
    """`cudaHostRegister` and its like succeed: SGLang pins the buffer of routed experts without
    asking for the device.
    """

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_, **__: 0


def _define_torchvision_operators() -> None:
    """PyPI's torchvision has CUDA operators, which cannot be loaded here; its Python part registers
    fakes of these two.
    """
    global _library
    try:
        build = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return
    if _library is None and "+cpu" not in build:  # a build for the CPU defines them itself
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
