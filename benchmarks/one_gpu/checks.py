"""Checks attention, head and whole steps on a device against fp32 on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from one_gpu.models import SHAPES, make_batch, make_config, write_model
from one_gpu.section import FULL, TOY, Found, Setting

from rlcore.launch.commands.init_model import ALPHABETS, Family, ModelSpec, init_model

FAMILIES: tuple[Family, ...] = ("qwen3_moe", "deepseek_v3")
STEP_DEADLINE_S = 600
# An optimizer step that is linear in the gradient, to read it off the weights: delta = lr * g /
# (|g| + eps) = 1000 g.
LINEAR = {"lr": 1e6, "eps": 1e3, "weight_decay": 0.0, "clip_grad": 0.0}


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The distance over the size of `expected`, both in float64."""
    got = got.double().cpu()
    expected = expected.double().cpu()
    return float((got - expected).norm() / expected.norm())


def check_attention(setting: Setting) -> Found:
    """Check the device's packed attention in bf16, both passes, against fp32 SDPA on the CPU."""
    found = Found()
    lengths = [300, 1, 17, 1024, 64]
    generator = torch.Generator().manual_seed(3)
    # the last as DeepSeek-V3 has it, with values narrower than keys
    for head_dim, values, groups in ((64, 64, 2), (128, 128, 2), (192, 128, 12)):
        sizes = ((12, head_dim), (groups, head_dim), (groups, values), (12, values))
        tensors = [
            torch.randn(sum(lengths), *size, generator=generator).bfloat16() for size in sizes
        ]
        got, expected = (
            _attention(tensors, lengths, *how)
            for how in ((setting.device, torch.bfloat16), ("cpu", torch.float32))
        )
        for name, one, other in zip(("output", "dQ", "dK", "dV"), got, expected):
            found.check(f"attention bf16, head {head_dim}: {name}", relative(one, other), 0.02)
    return found


def _attention(
    tensors: list[torch.Tensor], lengths: list[int], device: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Output and gradients of q, k, v; the last of `tensors` is the gradient of the output."""
    from backends.megatron.cpu.shim import importing_megatron

    with importing_megatron():
        from backends.megatron.batch.cp_layout import PackLayout
        from backends.megatron.model.attention.core import (
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
            found.check(f"head {label}: {name}", relative(got, want), bound)
    dist.destroy_process_group()
    return found


def check_step(setting: Setting) -> Found:
    """Check a GRPO step in fp32, and in bf16 with offloading, against fp32 on the CPU."""
    found = Found()
    name = "toy" if setting.toy else "small"
    ways = {"fp32": ("fp32", False), "bf16": ("bf16", True)}
    expected, got = _steps(setting, found, name, ways)
    for way, far, norm in (("fp32", 1e-3, 1e-3), ("bf16", 0.15, 0.05)):
        for quantity in ("logprobs", "entropy"):
            off = float((got[way][quantity] - expected[quantity]).abs().max())
            found.check(f"step {way}: worst of {quantity}", off, far)
        _check_norm(found, f"step {way}", got[way], expected, norm)
        drift = max(
            float((got[way][key] - got[way]["logprobs"]).abs().max())
            for key in ("reference", "reference_after")
        )
        found.check(f"step {way}: the reference stays the initial policy", drift, 0.0)
    _check_gradients(found, "step fp32", got["fp32"], expected)
    return found


def check_experts(setting: Setting) -> Found:
    """Check the step of two families with experts, which bf16 computes by grouped products.

    A near tie between two experts falls either way in bf16, so there the mean is compared.
    """
    found = Found()
    for family in FAMILIES:
        ways = {"fp32": ("fp32", False), "bf16": ("bf16", False)}
        expected, got = _steps(setting, found, family, ways)
        for way, far, norm in (("fp32", 1e-4, 1e-3), ("bf16", 0.02, 0.1)):
            off = float((got[way]["logprobs"] - expected["logprobs"]).abs().mean())
            found.check(f"{family} {way}: mean of log-probs", off, far)
            _check_norm(found, f"{family} {way}", got[way], expected, norm)
        _check_gradients(found, f"{family} fp32", got["fp32"], expected)
    return found


def _check_norm(
    found: Found, name: str, got: dict[str, Any], expected: dict[str, Any], bound: float
) -> None:
    off = abs(got["grad_norm"] / expected["grad_norm"] - 1)
    found.check(f"{name}: gradient norm", off, bound)


def _check_gradients(
    found: Found, name: str, got: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Print the worst weights too: where a gradient is off, they say which layer made it."""
    off = {
        weight: relative(got["moved"][weight], moved)
        for weight, moved in expected["moved"].items()
        if bool(moved.any())
    }
    worst = sorted(off, key=off.__getitem__)[-3:]
    for weight in worst:
        print(f"    {weight}: {off[weight]:.1e}", flush=True)
    found.check(f"{name}: gradient of the worst weight", off[worst[-1]], 1e-3)


def write_references(folder: Path, *, toy: bool) -> None:
    """Compute the steps that the sections compare with, on the CPU, into `folder`."""
    work = folder / "work"
    setting = Setting(toy=toy, work=work, size=TOY if toy else FULL)
    work.mkdir(parents=True)
    for model in ("toy" if toy else "small", *FAMILIES):
        step = _Step(setting, model, "cpu", "cpu", "fp32", sharded=False)
        torch.save(step.results(), folder / _file(model, toy=toy))
    shutil.rmtree(work)


def _file(model: str, *, toy: bool) -> str:
    return f"step-{model}{'-toy' if toy else ''}.pt"


def _steps(
    setting: Setting, found: Found, model: str, ways: dict[str, tuple[str, bool]]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The step on the CPU, and on the device in each way, (dtype, sharded), all at once.

    That on the CPU is read where it was computed beforehand.
    """
    folder = setting.references
    path = None if folder is None else folder / _file(model, toy=setting.toy)
    carried = path is not None and path.exists()
    found.numbers["the CPU's results"] = "computed beforehand" if carried else "computed here"
    begun = {
        way: _Step(setting, model, way, setting.device, dtype, sharded=sharded)
        for way, (dtype, sharded) in ways.items()
    }
    if carried:
        expected: dict[str, Any] = torch.load(path, weights_only=False)
    else:
        expected = _Step(setting, model, "cpu", "cpu", "fp32", sharded=False).results()
    return expected, {way: step.results() for way, step in begun.items()}


class _Step:
    """One `one_step` in a process of its own, since Megatron's state is global."""

    def __init__(
        self, setting: Setting, model: str, name: str, device: str, dtype: str, *, sharded: bool
    ) -> None:
        from one_gpu.step import one_step

        toy = setting.toy
        folder = setting.work / model
        config = make_config(
            folder,
            dtype=dtype,
            micro_tokens=192 if toy else 1536,
            optimizer={**LINEAR, "distributed": sharded},
            offload=sharded,
        )
        vocab = _write_model(folder, model)
        batch = make_batch(vocab, 256 if toy else 2048, 2, 128 if toy else 1024)
        self._name = f"{model} {name}"
        self._result = setting.work / f"{model}-{name}.pt"
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        before = dict(os.environ)
        os.environ.update(hidden)  # Megatron's shim for the CPU is for processes that see no GPU
        try:
            self._process = multiprocessing.get_context("spawn").Process(
                target=one_step, args=(setting.work, self._result, config, batch, device)
            )
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def results(self) -> dict[str, Any]:
        """Wait for its end, and return what it found."""
        process = self._process
        process.join(STEP_DEADLINE_S)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"{self._name}: no end within {STEP_DEADLINE_S} s")
        if process.exitcode:
            raise RuntimeError(
                f"{self._name} ended with exit code {process.exitcode}; its traceback is above"
            )
        found: dict[str, Any] = torch.load(self._result, weights_only=False)
        return found


def _write_model(folder: Path, model: str) -> int:
    """Write a model of a shape or family, unless it is there. Returns its vocabulary's size."""
    if model in SHAPES:
        if not folder.exists():
            write_model(folder, SHAPES[model], torch.float32, std=0.05)
        return SHAPES[model].vocab
    spec = ModelSpec(model, ALPHABETS["ascii"], layers=3, max_positions=2048)
    if not folder.exists():
        init_model(folder, spec)
    return spec.vocab_size
