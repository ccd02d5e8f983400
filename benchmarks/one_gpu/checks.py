"""Checks attention, head and a whole step on a device against fp32 on the CPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from one_gpu.models import SHAPES, make_batch, make_config, write_model

STEP_DEADLINE_S = 600
# An optimizer step that is linear in the gradient, to read it off the weights: delta = lr * g /
# (|g| + eps) = 1000 g.
LINEAR = {"lr": 1e6, "eps": 1e3, "weight_decay": 0.0, "clip_grad": 0.0}


@dataclass(frozen=True)
class Check:
    name: str
    value: float  # a distance
    bound: float

    @property
    def ok(self) -> bool:
        return self.value <= self.bound  # False for NaN


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    got = got.double().cpu()
    expected = expected.double().cpu()
    return float((got - expected).norm() / expected.norm())


def check_attention(device: str) -> list[Check]:
    """Check the device's packed attention in bf16, both passes, against fp32 SDPA on the CPU."""
    lengths = [300, 1, 17, 1024, 64]
    generator = torch.Generator().manual_seed(3)
    found = []
    for head_dim in (64, 128):
        tensors = [
            torch.randn(sum(lengths), heads, head_dim, generator=generator).bfloat16()
            for heads in (12, 2, 2, 12)
        ]
        got, expected = (
            _attention(tensors, lengths, *how)
            for how in ((device, torch.bfloat16), ("cpu", torch.float32))
        )
        for name, one, other in zip(("output", "dQ", "dK", "dV"), got, expected):
            found.append(
                Check(f"attention bf16, head {head_dim}: {name}", _relative(one, other), 0.02)
            )
    return found


def _attention(
    tensors: list[torch.Tensor], lengths: list[int], device: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Output and gradients of q, k, v; the last of `tensors` is the gradient of the output."""
    from backends.megatron.cpu.shim import importing_megatron

    with importing_megatron():
        from backends.megatron.batch.cp_layout import PackLayout
        from backends.megatron.model.attention import (
            bucketed_attention,
            uses_varlen,
            varlen_attention,
        )
    where = torch.device(device)
    *inputs, weight = (x.to(where, dtype) for x in tensors)
    inputs = [x.requires_grad_() for x in inputs]
    attend = varlen_attention if uses_varlen(where, dtype) else bucketed_attention
    out = attend(*inputs, PackLayout.of_lengths(lengths, where), inputs[0].size(-1) ** -0.5)
    return [out, *torch.autograd.grad((out * weight.view_as(out)).sum(), inputs)]


def check_head(device: str) -> list[Check]:
    """The fused head in bf16 and fp32 against log_softmax in float64 on the CPU. Needs a process
    group of one rank.
    """
    import torch.distributed as dist

    from backends.megatron.model.fused_head import fused_logprobs
    from backends.megatron.parallel.state import init_process_group

    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(512, 256, generator=generator)
    weight = torch.randn(8200, 256, generator=generator) * 0.1
    tokens = torch.randint(0, 8192, (512,), generator=generator)
    vocab = 8192
    own = init_process_group(torch.device(device), timeout_s=60)
    group = dist.group.WORLD
    found = []
    assert group is not None
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        h, w = (x.to(dtype).to(device).requires_grad_() for x in (hidden, weight))
        logprobs, entropy = fused_logprobs(
            h, w, tokens.to(device), vocab_size=vocab, tp=group, temperature=0.7
        )
        assert entropy is not None
        gradients = torch.autograd.grad(logprobs.sum() + 0.1 * entropy.sum(), (h, w))
        h64, w64 = (x.detach().cpu().double().requires_grad_() for x in (h, w))
        log_p = (h64 @ w64[:vocab].t() / 0.7).log_softmax(-1)
        expected = log_p.gather(1, tokens[:, None])[:, 0]
        expected_entropy = -(log_p.exp() * log_p).sum(-1)
        expected_gradients = torch.autograd.grad(
            expected.sum() + 0.1 * expected_entropy.sum(), (h64, w64)
        )
        results = zip(
            (logprobs, entropy, *gradients), (expected, expected_entropy, *expected_gradients)
        )
        for name, (got, want) in zip(("log-probs", "entropy", "dH", "dW"), results):
            found.append(
                Check(
                    f"head {str(dtype).removeprefix('torch.')}: {name}", _relative(got, want), bound
                )
            )
    if own:
        dist.destroy_process_group()
    return found


def _apart(function: Callable[..., None], *arguments: Any) -> None:
    """Run in a process of its own, since process groups and Megatron's state are global."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join(STEP_DEADLINE_S)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"{function.__name__}: no end within {STEP_DEADLINE_S} s")
    if process.exitcode:
        raise RuntimeError(
            f"{function.__name__} ended with exit code {process.exitcode}; its traceback is above"
        )


def check_step(device: str, work: Path, *, toy: bool) -> list[Check]:
    """Check a GRPO step in fp32, and in bf16 with offloading, against fp32 on the CPU."""
    from one_gpu.step import one_step

    shape = SHAPES["toy" if toy else "small"]
    write_model(work / "model", shape, torch.float32, std=0.05)
    batch = make_batch(shape, 256 if toy else 2048, 2, 128 if toy else 1024)
    micro_tokens = 192 if toy else 1536
    runs = {
        "cpu": ("cpu", "fp32", False),
        "fp32": (device, "fp32", False),
        "bf16": (device, "bf16", True),
    }
    for name, (where, dtype, sharded) in runs.items():
        optimizer = {**LINEAR, "distributed": sharded}
        config = make_config(
            work / "model",
            dtype=dtype,
            micro_tokens=micro_tokens,
            optimizer=optimizer,
            offload=sharded,
        )
        _apart(one_step, work, work / f"{name}.pt", config, batch, where)
    out: dict[str, dict[str, Any]] = {
        name: torch.load(work / f"{name}.pt", weights_only=False) for name in runs
    }
    found = []
    for name, far, norm in (("fp32", 1e-3, 1e-3), ("bf16", 0.15, 0.05)):
        got = out[name]
        expected = out["cpu"]
        found.append(
            Check(
                f"step {name}: worst log-prob",
                float((got["logprobs"] - expected["logprobs"]).abs().max()),
                far,
            )
        )
        found.append(
            Check(
                f"step {name}: worst entropy",
                float((got["entropy"] - expected["entropy"]).abs().max()),
                far,
            )
        )
        off = abs(got["grad_norm"] / expected["grad_norm"] - 1)
        found.append(Check(f"step {name}: gradient norm", off, norm))
        moved = max(
            float((got[key] - got["logprobs"]).abs().max())
            for key in ("reference", "reference_after")
        )
        found.append(
            Check(f"step {name}: the reference is the initial policy, before and after", moved, 0.0)
        )
    weights = [
        _relative(out["fp32"]["moved"][name], moved) for name, moved in out["cpu"]["moved"].items()
    ]
    found.append(Check("step fp32: gradient of the worst weight", max(weights), 1e-3))
    return found
