"""Whole runs whose engine gets its weights in FP8, while the trainer keeps its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accounting_checks import samples_of
from hf_logprobs import logprobs, policy_before
from safetensors.torch import load_file, save_file
from workspace import LEARNING, Workspace

from rlcore.quantised_weights import FP8, dequantise, is_projection, quantise, scale_shape
from rlcore.weights import TensorSpec

GAP = "rollout/train_rollout_logprob_diff"


def rounded(folder: Path, out: Path) -> Path:
    """Make a copy of a model's folder whose matrices are what their FP8 form stands for."""
    out.mkdir(parents=True)
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
            continue
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if is_projection(TensorSpec(name, tuple(tensor.shape), "float32")):
                small = torch.empty(tensor.shape, dtype=FP8)
                scale = torch.empty(scale_shape(tensor.shape))
                quantise(tensor, small, scale)
                tensors[name] = dequantise(small, scale)
        save_file(tensors, out / path.name, metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("service", [pytest.param("in_process", marks=pytest.mark.full), "process"])
def test_an_engine_in_fp8_samples_from_the_rounded_policy(
    workspace: Workspace, tmp_path: Path, service: str
) -> None:
    """At every step, to 1e-4; the difference from the policy itself is what the run reports."""
    run = workspace.train(
        f"fp8 {service}", *LEARNING, "checkpoint.every=1", "checkpoint.keep=9",
        "rollout.engine={quantization: fp8, logprobs_every: 1}", f"rollout.service={service}",
        "algorithm.correction={name: tis}",
    )  # fmt: skip
    assert run.code == 0, run.err
    for step in (1, 2, 3):
        samples = samples_of(run, step)
        folder = policy_before(workspace, run, step)
        exact = logprobs(folder, samples)
        small = logprobs(rounded(folder, tmp_path / str(step)), samples)
        engine = [torch.from_numpy(sample.rollout_logprobs) for sample in samples]
        error = max((a - b).abs().max() for a, b in zip(engine, small, strict=True))
        assert error < 1e-4
        gap = torch.cat([(a - b).abs() for a, b in zip(engine, exact, strict=True)])
        assert gap.max() > 1e-3
        assert run.rows[step][GAP] == pytest.approx(float(gap.mean()), rel=0.01)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{quantization: fp8, transport: delta}", "a folder of weights is not quantised"),
        (
            "{kind: sglang, quantization: fp8, server: {quantization: fp8}}",
            "says how the servers are quantised: leave one of them out",
        ),
    ],
)
def test_what_does_not_go_with_fp8_is_refused(workspace: Workspace, given: str, said: str) -> None:
    run = workspace.train("refused quantisation", f"rollout.engine={given}")
    assert run.code == 2
    assert said in run.err
