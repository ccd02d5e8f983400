"""Checks attention, head and a whole step on a device against fp32 on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from one_gpu.models import SHAPES, make_batch, make_config, write_model
from one_gpu.section import FULL, TOY, Found, Setting

STEP_DEADLINE_S = 600
# An optimizer step that is linear in the gradient, to read it off the weights: delta = lr * g /
# (|g| + eps) = 1000 g.
LINEAR = {"lr": 1e6, "eps": 1e3, "weight_decay": 0.0, "clip_grad": 0.0}


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    got = got.double().cpu()
    expected = expected.double().cpu()
    return float((got - expected).norm() / expected.norm())


def check_attention(setting: Setting) -> Found:
    """Check the device's packed attention in bf16, both passes, against fp32 SDPA on the CPU."""
    found = Found()
    lengths = [300, 1, 17, 1024, 64]
    generator = torch.Generator().manual_seed(3)
    for head_dim in (64, 128):
        tensors = [
            torch.randn(sum(lengths), heads, head_dim, generator=generator).bfloat16()
            for heads in (12, 2, 2, 12)
        ]
        got, expected = (
            _attention(tensors, lengths, *how)
            for how in ((setting.device, torch.bfloat16), ("cpu", torch.float32))
        )
        for name, one, other in zip(("output", "dQ", "dK", "dV"), got, expected):
            found.check(f"attention bf16, head {head_dim}: {name}", _relative(one, other), 0.02)
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


def check_head(setting: Setting) -> Found:
    """Check the fused head in bf16 and fp32 against log_softmax in float64 on the CPU."""
    import torch.distributed as dist

    from backends.megatron.model.head import fused_logprobs
    from backends.megatron.parallel.state import init_process_group

    found = Found()
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(512, 256, generator=generator)
    weight = torch.randn(8200, 256, generator=generator) * 0.1
    tokens = torch.randint(0, 8192, (512,), generator=generator)
    vocab = 8192
    init_process_group(torch.device(setting.device), timeout_s=60)
    group = dist.group.WORLD
    assert group is not None
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        h, w = (x.to(dtype).to(setting.device).requires_grad_() for x in (hidden, weight))
        logprobs, entropy = fused_logprobs(
            h, w, tokens.to(setting.device), vocab_size=vocab, tp=group, temperature=0.7
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
        label = str(dtype).removeprefix("torch.")
        for name, (got, want) in zip(("log-probs", "entropy", "dH", "dW"), results):
            found.check(f"head {label}: {name}", _relative(got, want), bound)
    dist.destroy_process_group()
    return found


def check_step(setting: Setting) -> Found:
    """Check a GRPO step in fp32, and in bf16 with offloading, against fp32 on the CPU."""
    found = Found()
    out = {"cpu": _reference(setting, found)}
    for name, dtype, sharded in (("fp32", "fp32", False), ("bf16", "bf16", True)):
        out[name] = _step(setting, name, setting.device, dtype, sharded=sharded)
    expected = out["cpu"]
    for name, far, norm in (("fp32", 1e-3, 1e-3), ("bf16", 0.15, 0.05)):
        got = out[name]
        for quantity in ("logprobs", "entropy"):
            off = float((got[quantity] - expected[quantity]).abs().max())
            found.check(f"step {name}: worst of {quantity}", off, far)
        off = abs(got["grad_norm"] / expected["grad_norm"] - 1)
        found.check(f"step {name}: gradient norm", off, norm)
        drift = max(
            float((got[key] - got["logprobs"]).abs().max())
            for key in ("reference", "reference_after")
        )
        found.check(f"step {name}: the reference stays the initial policy", drift, 0.0)
    worst = max(
        _relative(out["fp32"]["moved"][name], moved) for name, moved in expected["moved"].items()
    )
    found.check("step fp32: gradient of the worst weight", worst, 1e-3)
    return found


def write_reference(folder: Path, *, toy: bool) -> None:
    """Compute the step that `check_step` compares with, on the CPU, into `folder`."""
    work = folder / "work"
    setting = Setting(toy=toy, work=work, size=TOY if toy else FULL)
    work.mkdir(parents=True)
    torch.save(_step(setting, "cpu", "cpu", "fp32", sharded=False), folder / _file(toy=toy))
    shutil.rmtree(work)


def _file(*, toy: bool) -> str:
    return f"step-{'toy' if toy else 'small'}.pt"


def _reference(setting: Setting, found: Found) -> dict[str, Any]:
    """The step on the CPU: read where it was computed beforehand."""
    folder = setting.references
    path = None if folder is None else folder / _file(toy=setting.toy)
    carried = path is not None and path.exists()
    found.numbers["the CPU's results"] = "computed beforehand" if carried else "computed here"
    if carried:
        results: dict[str, Any] = torch.load(path, weights_only=False)
        return results
    return _step(setting, "cpu", "cpu", "fp32", sharded=False)


def _step(setting: Setting, name: str, device: str, dtype: str, *, sharded: bool) -> dict[str, Any]:
    """The results of `one_step`."""
    from one_gpu.step import one_step

    toy = setting.toy
    shape = SHAPES["toy" if toy else "small"]
    model = setting.work / "model"
    if not model.exists():
        write_model(model, shape, torch.float32, std=0.05)
    config = make_config(
        model,
        dtype=dtype,
        micro_tokens=192 if toy else 1536,
        optimizer={**LINEAR, "distributed": sharded},
        offload=sharded,
    )
    batch = make_batch(shape, 256 if toy else 2048, 2, 128 if toy else 1024)
    result = setting.work / f"{name}.pt"
    _apart(one_step, setting.work, result, config, batch, device)
    found: dict[str, Any] = torch.load(result, weights_only=False)
    return found


def _apart(function: Callable[..., None], *arguments: Any) -> None:
    """Run in a process of its own, since process groups and Megatron's state are global."""
    hidden = {} if arguments[-1] != "cpu" else {"CUDA_VISIBLE_DEVICES": ""}
    before = dict(os.environ)
    os.environ.update(hidden)  # Megatron's shim for the CPU is for processes that see no GPU
    try:
        process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    process.join(STEP_DEADLINE_S)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"{function.__name__}: no end within {STEP_DEADLINE_S} s")
    if process.exitcode:
        raise RuntimeError(
            f"{function.__name__} ended with exit code {process.exitcode}; its traceback is above"
        )
