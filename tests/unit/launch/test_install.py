"""The scripts install what the locks name, checked by hash. pip is stubbed: `install_stubs.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install_stubs import ROOT, Checkout, packages


def test_the_trainer_gets_torch_first_then_the_rest_then_itself(checkout: Checkout) -> None:
    torch, rest, itself = checkout.installs("install.sh", "ray")
    assert packages(torch) == {"torch": "2.13.0+cpu"}
    assert {"megatron-core", "ray"} <= packages(rest).keys()
    assert not {"pytest", "matplotlib", "triton"} & packages(rest).keys()
    for call in (torch, rest):
        options = call.splitlines()[0]
        assert "--no-deps --require-hashes -r .venv/locked.txt" in options
        assert call.count("--hash=sha256:") >= len(packages(call))
    compat = ["--config-settings", "editable_mode=compat"]
    assert itself.split()[-5:] == ["--no-build-isolation", *compat, "--editable", "."]
    assert "--no-deps" in itself


def test_verifiers_comes_from_its_lock_alone_and_once(checkout: Checkout) -> None:
    [call] = checkout.installs("install_verifiers.sh")
    assert "--no-deps --require-hashes -r .venv-verifiers/locked.txt" in call.splitlines()[0]
    assert {"verifiers", "openai", "mcp"} <= packages(call).keys()
    assert call.count("--hash=sha256:") >= len(packages(call))
    assert checkout.installs("install_verifiers.sh") == []
    lock = checkout.folder / "scripts" / "locks" / "verifiers.txt"
    lock.write_text(lock.read_text().replace("openai==", "openai==9."))
    [call] = checkout.installs("install_verifiers.sh")
    assert packages(call)["openai"].startswith("9.")
    _, said, code = checkout.run("install_verifiers.sh", "--gpu")
    assert (code, said) == (2, "usage: install_verifiers.sh; got: --gpu\n")


def test_every_installation_of_python_packages_is_by_hash() -> None:
    """Scripts give pip nothing but the entries of a lock, and the checkout itself."""
    scripts = (ROOT / "scripts").rglob("*.sh")
    calls = {
        (path.name, line.strip())
        for path in scripts
        for line in path.read_text().splitlines()
        if re.search(r"pip_into|pip install|pip download", line.partition("#")[0])
        and "pip_into()" not in line
    }
    options = "--no-deps --no-build-isolation --config-settings editable_mode=compat --editable ."
    editable = f"pip_into .venv {options}"
    assert ("install.sh", editable) in calls
    assert {line for name, line in calls if name not in ("pip.sh", "install.sh")} == set()
    assert {line for name, line in calls if name == "install.sh"} == {editable}


@pytest.mark.rest
def test_nothing_is_done_again_until_lock_or_extras_change(checkout: Checkout) -> None:
    assert len(checkout.installs("install.sh")) == 3
    assert checkout.installs("install.sh") == []
    assert "pytest" in packages(checkout.installs("install.sh", "dev")[1])
    assert checkout.installs("install.sh") == []
    lock = checkout.folder / "scripts" / "locks" / "trainer-cpu.txt"
    lock.write_text(lock.read_text().replace("numpy==", "numpy==9."))
    assert packages(checkout.installs("install.sh")[1])["numpy"].startswith("9.")
    (checkout.folder / ".venv" / "bin" / "python").unlink()
    assert len(checkout.installs("install.sh")) == 3, "its interpreter has gone"


@pytest.mark.rest
def test_both_installations_for_gpus_get_the_same_nccl(checkout: Checkout) -> None:
    [engines] = checkout.installs("install_sglang.sh", "--gpu")
    trainer, _ = checkout.installs("install.sh", "--gpu", "ray")
    assert packages(engines)["nvidia-nccl-cu13"] == packages(trainer)["nvidia-nccl-cu13"]
    assert packages(trainer)["torch"] == "2.13.0"
    assert checkout.installs("install.sh", "--gpu", "ray") == []
    # not for GPUs by its words; torch for the CPU must not come
    assert checkout.installs("install.sh", "ray") == []
    trainer, sources, _ = checkout.installs("install.sh", "dev")
    assert {"cellpylib", "pycosat", "zss"} == packages(sources).keys()
    assert packages(trainer)["torch"] == "2.13.0"


@pytest.mark.parametrize("script", ["install.sh", "install_sglang.sh"])
@pytest.mark.rest
@pytest.mark.parametrize(
    "says",
    [
        "ERROR: No matching distribution found for torch==2.13.0+cpu",  # pip
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
        "Because there is no version of torch==2.13.0+cpu and you require it",  # uv
    ],
)
def test_an_index_without_torch_for_the_cpu_gives_the_one_for_cuda(
    checkout: Checkout, script: str, says: str
) -> None:
    calls, said, code = checkout.run(script, FAIL="torch==2.13.0+cpu", SAYS=says)
    assert code == 0, said
    there = packages(calls[1])
    assert there["torch"] == "2.13.0"
    assert "nvidia-cudnn-cu13" in there
    assert "no build of torch for the CPU that scripts/locks/" in said
    assert checkout.installs(script) == []


def test_another_failure_is_told_and_leaves_no_stamp(checkout: Checkout) -> None:
    calls, said, code = checkout.run("install.sh", FAIL="+cpu", SAYS="ERROR: no space left")
    assert code == 1
    assert len(calls) == 1, "no fallback"
    assert "no space left" in said
    assert "failed for scripts/locks/trainer-cpu.txt" in said
    assert "RLCORE_HASHES=off" in said
    assert not (checkout.folder / ".venv" / "installed").exists()
    torch, rest, _ = checkout.installs("install.sh", RLCORE_HASHES="off")
    assert "--hash" not in torch + rest
    assert "--require-hashes" not in torch + rest
    assert "\\" not in rest
    assert packages(torch) == {"torch": "2.13.0+cpu"}


def test_unknown_extras_are_refused(checkout: Checkout) -> None:
    for extra in ("te", "sglang", "pot"):
        calls, said, code = checkout.run("install.sh", extra)
        assert (calls, code) == ([], 2)
        assert (
            f"no extra {extra} in scripts/locks/trainer-cpu.txt; there are datasets dev hub" in said
        )
    assert not (checkout.folder / ".venv").exists()


def test_transformer_engine_is_built_last_from_the_locked_source(checkout: Checkout) -> None:
    rest, source, _ = checkout.installs("install.sh", "--gpu", "te")
    assert {"transformer-engine", "transformer-engine-cu13", "wheel", "torch"} <= packages(
        rest
    ).keys()
    assert "transformer-engine-torch" not in packages(rest)
    assert "--no-build-isolation" not in rest.splitlines()[0]
    assert packages(source).keys() == {"transformer-engine-torch"}
    assert source.startswith("TRUE ")
    assert "--require-hashes --no-build-isolation" in source.splitlines()[0]
    # With the headers of the lock, whatever CUDA the machine has.
    headers = "/site/nvidia/cudnn/include:/site/nvidia/nccl/include"
    assert source.splitlines()[1] == f"# /site/nvidia/cu13 {headers}"
    assert {"nvidia-cuda-nvcc", "nvidia-cuda-cccl", "nvidia-cuda-crt"} <= packages(rest).keys()


def test_uv_is_taken_where_there_is_one(checkout: Checkout) -> None:
    binaries = checkout.folder / "bin"
    binaries.mkdir()
    uv = binaries / "uv"
    uv.write_text('#!/bin/sh\necho "pip NVTE= $UV_INDEX_STRATEGY uv $*" >> "$CALLS"\n')
    uv.chmod(0o755)
    path = os.pathsep.join([str(binaries), "/usr/bin", "/bin"])
    calls = checkout.installs("install.sh", PATH=path)
    assert len(calls) == 3
    for call in calls:
        assert call.startswith(" unsafe-best-match uv pip install --python .venv/bin/python")


def test_bytecode_is_written_where_the_environment_says_not_to(tmp_path: Path) -> None:
    """Of what is imported: an image with that variable would compile torch in every process."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "imported.py").write_text("")
    (tmp_path / "not_imported.py").write_text("")
    subprocess.run(
        ["bash", "-euc", f'. "{ROOT}/scripts/pip.sh"; compile_imports . "import imported"'],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [path.name.partition(".")[0] for path in tmp_path.glob("__pycache__/*")] == ["imported"]
    done = subprocess.run(
        ["bash", "-euc", f'. "{ROOT}/scripts/pip.sh"; compile_imports . "import missing"; echo on'],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "No module named 'missing'" in done.stderr
    assert done.stdout.splitlines()[-1] == "on"
