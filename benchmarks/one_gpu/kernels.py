"""Products of experts, digests and FP8 on the device: right, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from one_gpu.checks import relative
from one_gpu.section import Found, Setting, seconds_of
from torch import Tensor

from rlcore.quantised_weights import FP8, quantise, scale_shape
from rollout.weight_sync.digests import Digest, new_order

# A layer of Qwen3-30B-A3B, and a pack of 16384 tokens of which each goes to 8 experts.
EXPERTS = 128
HIDDEN = 2048
WIDTH = 768
ROWS = 16384 * 8


def check_kernels(setting: Setting) -> Found:
    """Check each against a plain computation, and measure it."""
    found = Found()
    _experts(setting, found)
    _digests(setting, found)
    _quantiser(setting, found)
    return found


def _experts(setting: Setting, found: Found) -> None:
    """Our grouped products beside expert after expert, both passes, and against fp32."""
    from backends.megatron.cpu.shim import importing_megatron

    with importing_megatron():
        import backends.megatron.model.grouped_experts  # noqa: F401

    layer = _drawn_layer(setting)
    names = ("output", "dX", "d probabilities", "dW1", "dW2")
    if setting.cuda:  # the CPU has no grouped product for these stand-ins
        expected = layer.both_passes(layer.one_by_one, torch.float32)
        products = layer.both_passes(layer.grouped, torch.bfloat16)
        for name, got, want in zip(names, products, expected):
            found.check(f"grouped experts bf16: {name}", relative(got, want), 0.02)
        del expected
    rows, hidden = layer.x.shape
    width = layer.second[0].size(1)
    flops = 3 * 2 * rows * hidden * width * 3
    functions = {"grouped": layer.grouped} if setting.cuda else {}
    for label, function in {**functions, "one by one": layer.one_by_one}.items():
        seconds = seconds_of(
            lambda function=function: layer.both_passes(function, torch.bfloat16),
            setting.size.rounds,
            cuda=setting.cuda,
        )
        found.number(f"experts {label}", seconds, "s", f"{flops / seconds / 1e12:.4g} TFLOP/s")
    wide = torch.cat([*layer.first[0].chunk(2), layer.second[0].t()]).t().contiguous()
    plain = 3 * seconds_of(lambda: layer.x @ wide, setting.size.rounds, cuda=setting.cuda)
    found.number("one dense product of as many FLOPs", plain, "s")


@dataclass
class _Layer:
    """E experts and the rows that are routed to them, the first expert's first."""

    first: list[Tensor]  # E of bf16 [2 * width, hidden]: gate and up
    second: list[Tensor]  # E of bf16 [hidden, width]
    counts: Tensor  # int64 [E] on the host: the rows of each expert
    x: Tensor  # bf16 [rows, hidden]
    probabilities: Tensor  # fp32 [rows]
    grad: Tensor  # bf16 [rows, hidden], of the output

    def one_by_one(
        self, x: Tensor, weight: Tensor, ones: list[Tensor], twos: list[Tensor]
    ) -> Tensor:
        """Expert after expert."""
        sizes = self.counts.tolist()
        parts = zip(x.split(sizes), weight.split(sizes), ones, twos)
        return torch.cat(
            [
                F.linear((_swiglu(F.linear(part, one)) * w[:, None]).to(part.dtype), two)
                for part, w, one, two in parts
            ]
        )

    def grouped(self, x: Tensor, weight: Tensor, ones: list[Tensor], twos: list[Tensor]) -> Tensor:
        """All experts in one product a projection."""
        from backends.megatron.model.grouped_experts import GroupedExperts, groups_matmuls

        stand_in: Any = SimpleNamespace(
            local_experts=[
                SimpleNamespace(
                    linear_fc1=SimpleNamespace(weight=one),
                    linear_fc2=SimpleNamespace(weight=two),
                    activation_func=_swiglu,
                )
                for one, two in zip(ones, twos)
            ],
            config=SimpleNamespace(moe_apply_probs_on_input=False),
        )
        if x.is_cuda and not groups_matmuls(stand_in, x):
            raise RuntimeError("no grouped matmul is chosen here")
        return GroupedExperts.forward(stand_in, x, self.counts, weight)[0]

    def both_passes(self, function: Any, dtype: torch.dtype) -> list[Tensor]:
        """Return the output, and the gradients of rows, probabilities and both projections."""
        experts = len(self.first)
        leaves = (self.x, self.probabilities, *self.first, *self.second)
        inputs = [t.to(dtype).requires_grad_() for t in leaves]
        out = function(*inputs[:2], inputs[2 : 2 + experts], inputs[2 + experts :])
        got = torch.autograd.grad(out, inputs, self.grad.to(dtype), allow_unused=True)
        zero = [torch.zeros_like(i) if g is None else g for g, i in zip(got, inputs)]
        ones = torch.stack(zero[2 : 2 + experts])
        return [out.detach(), *zero[:2], ones, torch.stack(zero[2 + experts :])]


def _drawn_layer(setting: Setting) -> _Layer:
    experts, hidden, width, rows = (
        (4, 32, 16, 64) if setting.toy else (EXPERTS, HIDDEN, WIDTH, ROWS)
    )
    generator = torch.Generator(setting.device).manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        noise = torch.randn(shape, generator=generator, device=setting.device)
        return (noise * shape[-1] ** -0.5).bfloat16()

    share = torch.rand(experts, generator=generator, device=setting.device)
    share[1] = 0  # an expert without tokens
    counts = (share / share.sum() * rows).long().cpu()
    counts[0] += rows - counts.sum()
    return _Layer(
        first=[drawn(2 * width, hidden) for _ in range(experts)],
        second=[drawn(hidden, width) for _ in range(experts)],
        counts=counts,
        x=drawn(rows, hidden),
        probabilities=torch.rand(rows, generator=generator, device=setting.device),
        grad=drawn(rows, hidden),
    )


def _swiglu(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return F.silu(gate) * up


def _digest(order: str, flat: Tensor) -> str:
    made = Digest(order)
    made.add(flat)
    return made.read()


def _digests(setting: Setting, found: Found) -> None:
    """The digest of a bucket is the CPU's; its speed beside a copy's."""
    generator = torch.Generator().manual_seed(8)
    size = 100_003 if setting.toy else 2**28 + 12_346
    flat = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    there = flat.to(setting.device, copy=True)
    order = new_order("linear")
    differs = _digest(order, flat) != _digest(order, there)
    found.check("digest of a bucket: differs from the CPU's", float(differs), 0.0)
    there[size // 2] ^= 1
    same = _digest(order, flat) == _digest(order, there)
    found.check("digest of other bytes: the same", float(same), 0.0)
    seconds = seconds_of(lambda: _digest(order, there), setting.size.rounds, cuda=setting.cuda)
    found.number("digest of a bucket", size / seconds / 1e9, "GB/s", f"{seconds * 1e3:.3g} ms")
    other = torch.empty_like(there)
    copy = seconds_of(lambda: other.copy_(there), setting.size.rounds, cuda=setting.cuda)
    found.number("copy of a bucket", size / copy / 1e9, "GB/s")


def _quantiser(setting: Setting, found: Found) -> None:
    """FP8 by blocks has the CPU's bits; its speed."""
    generator = torch.Generator().manual_seed(9)
    shape = (200, 300) if setting.toy else (8192, 8000)
    weight = torch.randn(shape, generator=generator).bfloat16()
    results = []
    for device in ("cpu", setting.device):
        given = weight.to(device)
        small = torch.empty(shape, dtype=FP8, device=device)
        scale = torch.empty(scale_shape(given.shape), device=device)
        quantise(given, small, scale)
        results.append((small.view(torch.uint8).cpu(), scale.cpu()))
    for name, one, other in zip(("matrix", "scales"), *results):
        found.check(f"FP8: {name} that differ from the CPU's", float((one != other).sum()), 0.0)
    seconds = seconds_of(
        lambda: quantise(given, small, scale), setting.size.rounds, cuda=setting.cuda
    )
    found.number("FP8 by blocks", weight.nbytes / seconds / 1e9, "GB/s", "of bf16")
