"""Weights in FP8 by blocks, for engines with `rollout.engine.quantization: fp8`.

A projection `x.weight` [n, k] travels as float8_e4m3fn, with `x.weight_scale_inv` in fp32, one
number for each block of 128 x 128: weight = float8 * scale. This is the form in which DeepSeek-V3
was published (DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3), and which SGLang
loads. Embeddings, the head, norms, routers and biases stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlcore.errors import ModelError
from rlcore.planning import publication as planning
from rlcore.planning.publication import BLOCK, scale_shape
from rlcore.weights import Bucket, TensorSpec

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0  # largest float8_e4m3fn
SCALE = "_scale_inv"
# The entry of a model's `config.json` that declares this format.
QUANTIZATION_CONFIG: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
_SMALLEST = 1e-12  # smallest maximum of a block, so that the scale of a block of zeros is not 0
_AT_ONCE = 1 << 24  # elements that are in fp32 at a time
_FP8_NAME = str(FP8).removeprefix("torch.")


def is_projection(spec: TensorSpec) -> bool:
    """Whether a weight is quantised: a matrix of attention, of an MLP or of an expert."""
    return planning.is_projection(spec.name, spec.shape)


def quantised_bucket(bucket: Bucket) -> Bucket:
    """Return the layout of a quantised bucket: scales, unquantised tensors, then FP8 matrices.

    This order aligns every view, whatever the sizes are.
    """
    projections = [spec for spec in bucket.tensors if is_projection(spec)]
    scales = (
        TensorSpec(spec.name + SCALE, scale_shape(spec.shape), "float32") for spec in projections
    )
    others = [spec for spec in bucket.tensors if not is_projection(spec)]
    small = (TensorSpec(spec.name, spec.shape, _FP8_NAME) for spec in projections)
    return Bucket(bucket.index, (*scales, *others, *small))


@torch.no_grad()
def quantise_bucket(bucket: Bucket, flat: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the bytes of `quantised_bucket(bucket)`, on the device of `flat`.

    Args:
        flat: the bytes of `bucket`, uint8 [num_bytes].
        out: memory for the result; default: new memory.

    Raises ModelError for a matrix with an infinity or NaN: its whole block would become NaN.
    """
    layout = quantised_bucket(bucket)
    if out is None:
        out = torch.empty(layout.num_bytes, dtype=torch.uint8, device=flat.device)
    views = dict(layout.views(out))
    for spec, (name, weight) in zip(bucket.tensors, bucket.views(flat), strict=True):
        if is_projection(spec):
            quantise(weight, views[name], views[name + SCALE])
        else:
            views[name].copy_(weight)
    scales = {name: views[name] for name in views if _is_scale(name, views)}
    # One wait for the device per bucket.
    if scales and not torch.cat([scale.flatten() for scale in scales.values()]).isfinite().all():
        name, scale = next(item for item in scales.items() if not item[1].isfinite().all())
        row, column = (~scale.isfinite()).nonzero()[0].tolist()
        raise ModelError(
            f"{name.removesuffix(SCALE)}: got an infinity or NaN in its block of {BLOCK} x {BLOCK}"
            f" from [{row * BLOCK}, {column * BLOCK}], expected finite weights: FP8 makes the whole"
            " block NaN. The training diverged: resume from an earlier checkpoint with a lower"
            " learning rate"
        )
    return out


def quantise(weight: Tensor, small: Tensor, scale: Tensor) -> None:
    """Round a matrix [n, k] to FP8, with the largest element of each block at 448.

    Args:
        small: output for the matrix, float8_e4m3fn [n, k].
        scale: output for the scales, fp32 [ceil(n / 128), ceil(k / 128)].
    """
    # Rows of blocks that are rounded at a time.
    high = max(1, _AT_ONCE // (BLOCK * max(1, weight.size(1))))
    for first in range(0, scale.size(0), high):
        rows = slice(first * BLOCK, (first + high) * BLOCK)
        here = weight[rows]
        blocks = _blocks(here)
        largest = torch.maximum(blocks.amax(dim=(1, 3)), -blocks.amin(dim=(1, 3))).float()
        # Divide by a tensor: for a Python number CUDA multiplies by the reciprocal, which rounds
        # differently.
        largest = largest.clamp(min=_SMALLEST) / largest.new_full((), MAX_FP8)
        scale[first : first + high] = largest
        # The quotient is fp32 for every weight type. It exceeds 448 by at most a rounding error, so
        # no element becomes NaN.
        whole = blocks / largest[:, None, :, None]
        small[rows] = whole.flatten(2).flatten(0, 1)[: here.size(0), : here.size(1)]


def _blocks(matrix: Tensor) -> Tensor:
    """Return a matrix as blocks, [high, 128, wide, 128], padded with zeros to whole blocks."""
    rows, columns = matrix.shape
    high, wide = scale_shape(matrix.shape)
    if (rows, columns) != (high * BLOCK, wide * BLOCK):
        matrix = pad(matrix, (0, wide * BLOCK - columns, 0, high * BLOCK - rows))
    return matrix.reshape(high, BLOCK, wide, BLOCK)


def dequantise(small: Tensor, scale: Tensor) -> Tensor:
    """Return the fp32 matrix [n, k] of a quantised one."""
    rows, columns = small.shape
    whole = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return small.float() * whole


def dequantised(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket under the model's own names, quantised ones as fp32."""
    found = dict(tensors)
    for name, tensor in found.items():
        if tensor.dtype == FP8:
            yield name, dequantise(tensor, found[name + SCALE])
        elif not _is_scale(name, found):
            yield name, tensor


def unquantised(bucket: Bucket) -> list[TensorSpec]:
    """Return the specs of a bucket without the scales of quantised matrices.

    Raises ModelError for a quantised matrix without its scales.
    """
    specs = {spec.name: spec for spec in bucket.tensors}
    for name, spec in specs.items():
        if spec.dtype != _FP8_NAME:
            continue
        scale = specs.get(name + SCALE)
        if scale is None or (scale.shape, scale.dtype) != (scale_shape(spec.shape), "float32"):
            raise ModelError(
                f"{name} is quantised: expected {name + SCALE} in the same bucket, float32"
                f" {scale_shape(spec.shape)}, got {scale}"
            )
    return [spec for name, spec in specs.items() if not _is_scale(name, specs)]


def _is_scale(name: str, names: Mapping[str, Any]) -> bool:
    return name.endswith(SCALE) and name.removesuffix(SCALE) in names
