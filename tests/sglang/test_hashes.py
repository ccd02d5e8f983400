"""Hashes of tensors against SGLang's own code, in the engines' environment, without a server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlcore.config.sections.rollout import EngineConfig
from rollout.engines.sglang.checksums import hash_on_cpu, hash_on_cuda
from rollout.engines.sglang.server_process import engine_python

# The file of the kernel is loaded by itself: importing sglang takes long. Its assertion that a
# tensor is on a GPU is met.
THEIRS = """
import importlib.util, json, sys, sysconfig
import torch
from safetensors.torch import load_file

path = sysconfig.get_path("purelib") + "/sglang/kernels/ops/memory/gpu_tensor_hash.py"
spec = importlib.util.spec_from_file_location("gpu_tensor_hash", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

class OnGpu(torch.Tensor):
    is_cuda = True

def plain_words(tensor):
    return words(tensor).as_subclass(torch.Tensor)

words, module._as_uint32_words = module._as_uint32_words, plain_words
tensors = load_file(sys.argv[1])
hashes = {name: module.gpu_tensor_hash(t.as_subclass(OnGpu)) for name, t in tensors.items()}
print(json.dumps({name: f"{value:016x}" for name, value in hashes.items()}))
"""


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "small": torch.randn(7),
        "bytes": torch.randint(0, 255, (13,), dtype=torch.uint8),
        "odd": torch.randn(33, 3).bfloat16(),
        "one_tile": torch.randn(8192),
        "tiles": torch.randn(20, 1000),
        "ones": torch.ones(9000, dtype=torch.bfloat16),
    }


def test_the_hash_of_a_server_on_cuda(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(tensors, tmp_path / "tensors.safetensors")
    ran = subprocess.run(
        [
            engine_python(EngineConfig(kind="sglang")),
            "-c",
            THEIRS,
            str(tmp_path / "tensors.safetensors"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    theirs = json.loads(ran.stdout)
    assert {name: hash_on_cuda([tensor]) for name, tensor in tensors.items()} == theirs
    monkeypatch.setattr("rollout.engines.sglang.checksums.TILES", 2)  # in more than one go
    assert hash_on_cuda([tensors["tiles"]]) == theirs["tiles"]
    assert len(set(theirs.values())) == len(tensors)


@pytest.mark.parametrize("make", [hash_on_cpu, hash_on_cuda])
def test_parts_are_hashed_as_one(make: object, tensors: dict[str, torch.Tensor]) -> None:
    assert callable(make)
    whole = tensors["tiles"]
    assert make(list(whole.split(3))) == make([whole])
    assert make([whole[1:], whole[:1]]) != make([whole])
