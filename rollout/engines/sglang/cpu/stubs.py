"""Stubs that let stock SGLang run without CUDA, installed before it is imported.

This file imports nothing from rlcore. The package `sgl_kernel` next to it is found only if no real
one is installed, since its folder is last on the path.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

_library: torch.library.Library | None = None  # kept, since its definitions end with it


def install() -> None:
    """Install the stubs; does nothing on a machine with a GPU."""
    if torch.version.cuda is None:
        _define_torchvision_operators()
    if not torch.cuda.is_available():
        torch.cuda.cudart = NoCudart  # type: ignore[assignment]
        _ignore_pinning()


def install_fp8() -> None:
    """Make SGLang's FP8 linear layers multiply by their dequantised blocks.

    On the CPU, SGLang has kernels only for AMX and refuses other machines. Activations are not
    quantised here.
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


def install_mamba_cache() -> None:
    """Let SGLang keep the states of linear attention without buffers that a CPU does not have.

    It then also schedules a batch after the last one has ended.
    """
    from sglang.srt.arg_groups import overrides

    overrides.supports_mamba_cache_extra_buffer = lambda *_: False


def install_gated_delta_rule() -> None:
    """Let SGLang's layers with a gated delta rule run on the functions of our `sgl_kernel`."""
    importlib.import_module("sgl_kernel")
    from sglang.kernels.ops.attention.fla import layernorm_gated

    # SGLang takes this norm's operator only with AMX, and Triton's kernel otherwise.
    layernorm_gated._use_cpu = hasattr(torch.ops.sgl_kernel, "fused_rmsnorm_gated_cpu")


def install_shared_expert_gate() -> None:
    """Give SGLang the gate of Qwen's shared experts, of which it has Triton's kernel alone."""
    from sglang.kernels.ops.elementwise import elementwise

    def add_gated(
        hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, total: torch.Tensor
    ) -> None:
        total += torch.sigmoid(hidden @ gate)[:, None] * shared

    elementwise.fused_gate_sigmoid_mul_add = add_gated


def install_norm_over_heads() -> None:
    """Give SGLang MiniMax-M2's norm over all heads, of which it has Triton's kernels alone."""
    from sglang.srt.models import minimax_m2

    def sum_squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """[2 n] of [n, width of a rank's heads], which the ranks then add up."""
        return torch.cat([x.float().square().sum(-1) for x in (query, key)])

    def normalise(
        query: torch.Tensor,
        key: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        sums: torch.Tensor,
        ranks: int = 1,
        eps: float = 1e-5,
    ) -> tuple[torch.Tensor, ...]:
        each = zip((query, key), (query_weight, key_weight), sums.chunk(2))
        return tuple(
            (x.float() * torch.rsqrt(total[:, None] / (x.size(-1) * ranks) + eps) * weight).to(x)
            for x, weight, total in each
        )

    minimax_m2.rms_sumsq_serial = sum_squares
    minimax_m2.rms_apply_serial = normalise


def install_data_parallel_attention() -> None:
    """Give SGLang the length of the sequences that pad a data-parallel rank's batch.

    Only its torch-native attention lacks this length.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def _ignore_pinning() -> None:
    """SGLang's adapters ask for pinned memory on every device, and torch has none here."""

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*given: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return make(*given, **options)

        return call

    for name in ("tensor", "empty", "zeros", "ones", "full"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]


class NoCudart:
    """A stub whose functions, such as `cudaHostRegister`, succeed: SGLang pins the buffer of routed
    experts on every device.
    """

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_, **__: 0


def _define_torchvision_operators() -> None:
    """Define two operators for which the Python part of PyPI's torchvision registers fakes; its own
    CUDA operators cannot be loaded here.
    """
    global _library
    try:
        build = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return
    # A build for the CPU defines the operators itself.
    if _library is None and "+cpu" not in build:
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
