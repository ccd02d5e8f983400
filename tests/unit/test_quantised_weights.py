"""FP8 by blocks: bit-equal to a slow quantiser, and back; the rest of a bucket stays as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore import quantised_weights
from rlcore.errors import ModelError
from rlcore.planning.publication import fp8_bytes
from rlcore.quantised_weights import (
    BLOCK,
    FP8,
    dequantise,
    dequantised,
    is_projection,
    quantise,
    quantise_bucket,
    quantised_bucket,
    scale_shape,
    unquantised,
)
from rlcore.weights import Bucket, TensorSpec


def value(exponent: int, mantissa: int) -> float:
    """A number of the type: 4 bits of exponent, bias 7, 3 of mantissa."""
    if exponent == 0:
        return mantissa / 8 * 2.0**-6
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7)


FINITE = [value(e, m) for e in range(16) for m in range(8) if (e, m) != (15, 7)]
GRID = np.array(sorted({sign * one for sign in (-1.0, 1.0) for one in FINITE}))


def nearest(x: float) -> float:
    """The nearest number of the grid; of two the one with an even mantissa."""
    above = int(np.searchsorted(GRID, x))
    pair = GRID[max(above - 1, 0) : above + 1]
    distances = np.abs(pair - x)
    if len(pair) == 2 and distances[0] == distances[1]:
        # the spacing of the numbers here tells the last bit of the mantissa
        spacing = pair[1] - pair[0]
        return float(next(one for one in pair if (one / spacing) % 2 == 0))
    return float(pair[distances.argmin()])


def slow(weight: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Element by element; the divisions are those of fp32, as in the published kernels."""
    given = weight.float().numpy()
    high, wide = scale_shape(weight.shape)
    scale = np.zeros((high, wide), dtype=np.float32)
    small = np.zeros(given.shape, dtype=np.float64)
    for i in range(high):
        for j in range(wide):
            rows = slice(i * BLOCK, (i + 1) * BLOCK)
            columns = slice(j * BLOCK, (j + 1) * BLOCK)
            block = given[rows, columns]
            scale[i, j] = np.float32(max(np.abs(block).max(), np.float32(1e-12))) / np.float32(448)
            ratios = (block / scale[i, j]).clip(-448, 448)
            small[rows, columns] = np.vectorize(nearest)(ratios.astype(np.float64))
    return small, scale


def both(weight: Tensor) -> tuple[Tensor, Tensor]:
    small = torch.empty(weight.shape, dtype=FP8)
    scale = torch.empty(scale_shape(weight.shape))
    quantise(weight, small, scale)
    return small, scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (200, 130), (1, 1), (129, 257)])
@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_a_matrix_is_what_a_slow_quantiser_makes_of_it(
    shape: tuple[int, int], dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_weights, "_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator) * torch.logspace(-6, 3, shape[1])
    small, scale = both(weight.to(dtype))
    expected, scales = slow(weight.to(dtype))
    assert np.array_equal(scale.numpy(), scales)
    assert np.array_equal(small.double().numpy(), expected)


def test_a_block_of_zeros_stays_zero() -> None:
    small, scale = both(torch.zeros(130, 128))
    assert torch.equal(dequantise(small, scale), torch.zeros(130, 128))
    assert scale.gt(0).all()


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_a_number_comes_back_within_half_a_step_of_its_block(
    rows: int, columns: int, seed: int
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    small, scale = both(weight)
    whole = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    error = (dequantise(small, scale) - weight).abs()
    # three bits of mantissa, and below 2^-6 steps of 2^-9
    assert (error <= torch.maximum(weight.abs() / 16, whole * 2**-10) * 1.001).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.mlp.down_proj.weight", True),
        ("model.layers.3.mlp.experts.7.up_proj.weight", True),
        ("model.layers.3.mlp.shared_expert.gate_proj.weight", True),
        ("model.layers.3.block_sparse_moe.experts.7.w2.weight", True),
        ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", True),
        # multi-token prediction
        ("model.layers.46.eh_proj.weight", False),
        ("model.mtp_layers.0.input_proj.weight", False),
        ("model.mtp_layers.0.self_attn.o_proj.weight", True),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.3.block_sparse_moe.gate.weight", False),
        ("model.layers.3.mlp.shared_expert_gate.weight", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.input_layernorm.weight", False),
    ],
)
def test_matrices_of_layers_are_quantised(name: str, expected: bool) -> None:
    shape = (4,) if name.endswith(("bias", "layernorm.weight")) else (4, 4)
    assert is_projection(TensorSpec(name, shape, "bfloat16")) == expected


def make_bucket() -> tuple[Bucket, dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"a.norm.weight": (3,), "a.q_proj.weight": (130, 5), "a.o_proj.weight": (7, 3)}
    tensors = {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}
    bucket = Bucket(2, tuple(TensorSpec(n, t.shape, "bfloat16") for n, t in tensors.items()))
    flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors.values()])
    return bucket, tensors, flat


def test_a_bucket_holds_scales_the_rest_and_matrices() -> None:
    bucket, tensors, flat = make_bucket()
    small = quantised_bucket(bucket)
    assert (small.index, [spec.name for spec in small.tensors]) == (
        2,
        ["a.q_proj.weight_scale_inv", "a.o_proj.weight_scale_inv", "a.norm.weight",
         "a.q_proj.weight", "a.o_proj.weight"],
    )  # fmt: skip
    assert [fp8_bytes((130, 5)), fp8_bytes((7, 3))] == [130 * 5 + 2 * 4, 7 * 3 + 4]
    assert small.num_bytes == fp8_bytes((130, 5)) + fp8_bytes((7, 3)) + 3 * 2
    found = dict(small.views(quantise_bucket(bucket, flat)))
    assert torch.equal(found["a.norm.weight"], tensors["a.norm.weight"])
    for name in ("a.q_proj.weight", "a.o_proj.weight"):
        expected, scale = both(tensors[name])
        assert torch.equal(found[name].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(found[f"{name}_scale_inv"], scale)


def test_a_bucket_comes_back_under_the_models_names() -> None:
    bucket, tensors, flat = make_bucket()
    small = quantised_bucket(bucket)
    assert sorted(spec.name for spec in unquantised(small)) == sorted(tensors)
    back = dict(dequantised(small.views(quantise_bucket(bucket, flat))))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.allclose(back[name].float(), tensor.float(), rtol=1 / 16, atol=0.01)


def test_a_bucket_that_is_not_quantised_comes_back_as_it_is() -> None:
    bucket, tensors, flat = make_bucket()
    assert unquantised(bucket) == list(bucket.tensors)
    back = dict(dequantised(bucket.views(flat)))
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("scale", [None, ((1, 1), "float32"), ((2, 1), "bfloat16")])
def test_a_matrix_without_its_scales_is_refused(scale: tuple[tuple[int, ...], str] | None) -> None:
    specs = [TensorSpec("a.q_proj.weight", (130, 5), "float8_e4m3fn")]
    if scale is not None:
        specs.append(TensorSpec("a.q_proj.weight_scale_inv", *scale))
    with pytest.raises(ModelError, match=r"expected a.q_proj.weight_scale_inv in the same bucket"):
        unquantised(Bucket(0, tuple(specs)))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [(0, 0), (129, 4), (127, 2)])
def test_a_weight_that_is_no_number_is_refused_by_name(bad: float, place: tuple[int, int]) -> None:
    bucket, _, flat = make_bucket()
    for name, weight in bucket.views(flat):
        if name == "a.q_proj.weight":
            weight[place] = bad
    row = place[0] // BLOCK * BLOCK
    with pytest.raises(ModelError, match=rf"^a\.q_proj\.weight: .*from \[{row}, 0\]"):
        quantise_bucket(bucket, flat)
    # What is not quantised goes to the engine as it is.
    bucket, _, flat = make_bucket()
    for name, weight in bucket.views(flat):
        if name == "a.norm.weight":
            weight[1] = bad
    views = dict(quantised_bucket(bucket).views(quantise_bucket(bucket, flat)))
    assert not views["a.norm.weight"].isfinite().all()
