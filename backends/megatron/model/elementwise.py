"""Rotary embedding, gated activation and norms with custom backward passes.

These read and write the activations less often than autograd's backward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends.megatron.batch.rotary import Angles
from backends.megatron.model.fused import Fused, fuses


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        # The transpose of a rotation is the inverse rotation.
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x)
    a, b = x.chunk(2, -1)
    out_a, out_b = out.chunk(2, -1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), with halves paired as in Llama.

    x is [T, heads, d]; cos and sin are [T, 1, d/2]. With fewer angles only the first dimensions of
    a head are rotated.
    """
    if (turned := 2 * cos.size(-1)) < x.size(-1):
        return torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), dim=-1)
    rotated: Tensor = _Rotation.apply(x, cos.to(x.dtype), sin.to(x.dtype))
    return rotated


def rotate_heads(query: Tensor, key: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
    """Rotate q [T, heads, d] and k [T, groups, d], and scale q where the model does.

    Interleaved pairs come out in halves, in q and k alike, so that their products are the same.
    """
    rotated = 2 * angles.cos.size(-1)
    found = []
    for x in (query, key):
        if angles.interleaved:
            x = torch.cat((x[..., 0:rotated:2], x[..., 1:rotated:2], x[..., rotated:]), -1)
        found.append(rotate(x, angles.cos, angles.sin))
    query, key = found
    if angles.query_scale is not None:
        query = query * angles.query_scale.to(query.dtype)
    return query, key


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        if fuses(x.device):
            activated: Tensor = _fused_swiglu(gate, up)
            return activated
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        if fuses(x.device):
            d_x: Tensor = _fused_swiglu_gradient(gate, up, grad)
            return d_x
        out = torch.empty_like(x)
        d_gate, d_up = out.chunk(2, -1)
        torch.mul(F.silu(gate), grad, out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


@Fused.over_rows
def _fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@Fused.over_rows
def _fused_swiglu_gradient(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    share = gate.sigmoid()
    d_gate = grad * up * share * (1 + gate * (1 - share))
    return torch.cat((d_gate, grad * gate * share), dim=-1)


class SwiGLU(nn.Module):
    """silu(gate) * up (Shazeer 2020), as the `activation_func` module of Megatron's MLP."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2f] -> [..., f]."""
        activated: Tensor = _SwiGLU.apply(x)
        return activated

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return an empty dictionary: the module has no weights, but Megatron's MLP calls this."""
        return {}


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        out = torch.empty_like(x)
        d_gate, d_up = out.chunk(2, -1)
        torch.mul(F.gelu(gate, approximate="tanh"), grad, out=d_up)
        d_gate.copy_(torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh"))
        return out


class GeGLU(SwiGLU):
    """gelu(gate) * up, with the tanh form of gelu (Shazeer 2020)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2f] -> [..., f]."""
        activated: Tensor = _GeGLU.apply(x)
        return activated


class ClampedSwiGLU(SwiGLU):
    """clamp(gate) * sigmoid(1.702 clamp(gate)) * (clamp(up) + 1), the activation of gpt-oss.

    `activation_func_clamp_value` of the configuration bounds the gate above, and up on both sides.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.limit = float(config.activation_func_clamp_value)

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2f] -> [..., f]."""
        gate, up = x.chunk(2, -1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


class _ScaledNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gate: Tensor | None,
        offset: float,
        eps: float,
        gates_input: bool,
        mean: Callable[[Tensor], Tensor],
    ) -> Tensor:
        wide = _wide(x)
        if gate is not None and gates_input:
            wide = wide * F.silu(_wide(gate))
        inverse = torch.rsqrt(mean(wide.square()) + eps)
        ctx.save_for_backward(x, weight, gate, inverse)
        ctx.offset = offset
        ctx.gates_input = gates_input
        ctx.mean = mean
        out = (wide * inverse).mul_(offset + _wide(weight))
        if gate is not None and not gates_input:
            out = out * F.silu(_wide(gate))
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, gate, inverse = ctx.saved_tensors
        wide = _wide(x)
        gate_in = None if gate is None else _wide(gate)
        gated = wide if gate_in is None or not ctx.gates_input else wide * F.silu(gate_in)
        normed = gated * inverse
        scale = ctx.offset + _wide(weight)
        grad = _wide(grad)
        d_gate = None
        if gate_in is not None and not ctx.gates_input:
            d_gate = torch.ops.aten.silu_backward(grad * normed * scale, gate_in)
            grad = grad * F.silu(gate_in)
        leading = grad.dim() - weight.dim()
        d_weight = (grad * normed).flatten(0, leading - 1).sum(0).to(weight.dtype)
        scaled = grad * scale
        d_x = inverse * (scaled - normed * ctx.mean(scaled * normed))
        if gate_in is not None and ctx.gates_input:
            d_gate = torch.ops.aten.silu_backward(d_x * wide, gate_in)
            d_x = d_x * F.silu(gate_in)
        d_gate = None if d_gate is None else d_gate.to(gate.dtype)
        return d_x.to(x.dtype), d_weight, d_gate, None, None, None, None


def _wide(x: Tensor) -> Tensor:
    """The tensor in single precision at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _row_mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def scaled_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    gate: Tensor | None = None,
    gates_input: bool = False,
    mean: Callable[[Tensor], Tensor] = _row_mean,
) -> Tensor:
    """RMSNorm over the last dimension, times `offset + weight`, times silu(gate).

    It computes in single precision at least, and keeps its arguments as they are.

    Args:
        x, gate: [..., d].
        weight: [d], or the last dimensions of x.
        gates_input: multiply by silu(gate) before the norm, not after it.
        mean: the mean of the last dimension, [..., d] -> [..., 1], over the rows of all ranks where
            x is a part of them.
    """
    normed: Tensor = _ScaledNorm.apply(x, weight, gate, offset, eps, gates_input, mean)
    return normed


class SquaredReLU(SwiGLU):
    """relu(x) squared (So et al. 2021), of an MLP without a gate."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., f] -> [..., f]."""
        return F.relu(x).square()
