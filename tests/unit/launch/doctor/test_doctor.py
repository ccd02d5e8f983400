"""`rlcore doctor` on machines that lack something."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from rlcore import cli
from rlcore.interpreters import ask as interpreters
from rlcore.interpreters.ask import ask
from rlcore.launch import launchers
from rlcore.launch.doctor import checks, machine
from rlcore.launch.doctor.machine import FILES, Check

GIVEN = ["run.name=x", "model.path=m", "data.paths=d.jsonl", "training.steps=1"]
GIB = 1 << 30
SGLANG = "rollout.engine.kind=sglang"
EIGHT = "\n".join(["NVIDIA H100 80GB HBM3, 81559, 81000, 580.65.06"] * 8)


# --- the whole ------------------------------------------------------------------------------------


def test_a_machine_that_has_all_of_it(examined, capsys):
    assert cli.main(["doctor", "run.name=x", "run.sed=1"]) == 2
    assert "run.sed" in capsys.readouterr().err
    code, lines = examined("run.seed=1")
    assert code == 0, lines
    assert list(lines) == [
        "trainer environment", "engine environment", "GPUs", "NCCL", "kernels", "/dev/shm",
        "open files", "disk", "interfaces", "peers connect to", "Ray", "Slurm", "keys",
    ]  # fmt: skip
    assert "FAIL" not in "".join(lines.values())


def test_a_line_says_what_was_found_what_is_needed_and_what_to_do():
    check = Check("FAIL", "driver", "525.1", "driver 580", "a newer one")
    assert str(check) == "FAIL  driver: 525.1; needed: driver 580; to do: a newer one"


def test_it_needs_no_torch(stub):
    """Nor what imports it: a login node has Python and this package."""
    script = (
        "import sys; sys.modules['torch'] = None; sys.executable = sys.argv[1]\n"
        "from rlcore import cli; sys.exit(cli.main(['doctor', *sys.argv[2:]]))"
    )
    trainer = stub("trainer", broken="ModuleNotFoundError: No module named 'torch'")
    done = subprocess.run(
        [sys.executable, "-c", script, str(trainer), *GIVEN],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("FAIL  trainer environment: ")
    assert "No module named 'torch'; needed: every package" in first
    assert first.endswith("; to do: run ./scripts/install.sh")
    assert len(rest) > 8
    assert done.stderr.splitlines()[-1] == "rlcore: 1 of these would end a run"


def test_a_run_is_told_at_its_start_and_goes_on(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(launchers, "train", lambda loaded, **_: seen.append(loaded.warnings) or 0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 4096))
    given = ["model.path=m", "data.paths=d.jsonl", "training.steps=1", f"run.dir={tmp_path}"]
    assert cli.main(["train", "run.name=x", *given]) == 0
    [notes] = seen
    assert any(
        note.startswith("open files: at most 100; needed: 512; to do: run `ulimit -n 512`")
        for note in notes
    )
    assert list(tmp_path.iterdir()) == []


# --- environments ---------------------------------------------------------------------------------


def test_nccl_of_two_versions_ends_a_run_that_sends_weights_by_it(examined, stub):
    engine = stub("engine", nccl="2.29.7", packages={"sglang": "0.5.23"})
    named = (SGLANG, f"rollout.engine.python={engine}")
    code, lines = examined(*named)
    assert code == 1
    assert lines["NCCL"].startswith(
        "FAIL  NCCL: trainer 2.30.7, engines 2.29.7; needed: the same version on both sides"
    )
    pip = f"to do: {sys.executable} -m pip install --no-deps nvidia-nccl-cu13==2.29.7, or set"
    assert pip in lines["NCCL"]
    code, lines = examined(*named, "rollout.engine.transport=disk")
    assert code == 0
    assert lines["NCCL"].startswith("note  NCCL")
    code, lines = examined(*named, nccl="2.29.7")
    assert (code, lines["NCCL"]) == (0, "ok    NCCL: trainer 2.29.7, engines 2.29.7")


def test_engines_without_cuda_beside_a_trainer_with_gpus(examined, stub):
    engine = stub("engine", nccl="", cuda="", packages={"sglang": "0.5.23"})
    code, lines = examined(SGLANG, f"rollout.engine.python={engine}", gpus=1)
    assert code == 1
    assert "to do: run ./scripts/install_sglang.sh --gpu" in lines["NCCL"]


def test_the_toolkit_with_which_engines_compile(examined, stub, monkeypatch, tmp_path):
    monkeypatch.setattr(interpreters, "USUAL_TOOLKIT", str(tmp_path / "cuda"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    named = (SGLANG, f"rollout.engine.python={stub('engine', packages={'sglang': '0.5.23'})}")
    name = "CUDA toolkit of engines"
    nowhere = "rollout.engine.environment={PATH: /nowhere}"
    found = examined(*named, nowhere, gpus=1)[1][name]
    assert found.startswith(f"note  {name}: none: no CUDA_HOME")
    given = "rollout.engine.environment={CUDA_HOME: /opt/cuda}"
    assert examined(*named, given, gpus=1)[1][name] == f"ok    {name}: /opt/cuda"
    assert name not in examined(*named, "rollout.engine.device=cpu", gpus=1)[1]
    assert name not in examined(*named, gpus=0)[1]


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"packages": {}}, "sglang is missing (needs any)"),
        ({"broken": "ImportError: libcudart"}, "ImportError: libcudart"),
        (None, "there is no {}"),
    ],
)
def test_an_engine_environment_that_cannot_serve(examined, stub, tmp_path, told, says):
    python = tmp_path / "none" if told is None else stub("engine", **told)
    code, lines = examined(SGLANG, f"rollout.engine.python={python}")
    assert code == 1
    assert says.format(python) in lines["engine environment"]
    assert "to do: run ./scripts/install_sglang.sh" in lines["engine environment"]


def test_packages_are_compared_with_what_rlcore_asks_for():
    wanted = checks.requirements(["ray"])
    assert {"torch", "megatron-core", "ray"} <= set(wanted)
    assert "wandb" not in wanted
    there = dict.fromkeys(wanted, "0.0.1")
    del there["torch"]
    missing = checks.unmet(wanted, there)
    assert f"torch is missing (needs {wanted['torch']})" in missing
    assert f"megatron-core 0.0.1 (needs {wanted['megatron-core']})" in missing
    assert checks.unmet({"torch": ">=2.10"}, {"torch": "2.13.0+cpu"}) == []


def test_an_interpreter_tells_the_truth_of_itself():
    told = ask(sys.executable, ["pydantic", "nonsense-that-nobody-wrote"])
    assert told.python == ".".join(map(str, sys.version_info[:3]))
    assert set(told.packages) == {"pydantic"}
    import torch

    assert (told.torch, told.cuda) == (torch.__version__, torch.version.cuda or "")
    assert told.broken == ""


@pytest.mark.parametrize(
    ("script", "why"),
    [("echo oops >&2; exit 3", "exit code 3: oops"), ("exit 0", "it said nothing")],
)
def test_an_interpreter_that_does_not_answer(tmp_path, script, why):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    assert "cannot be run: Permission denied" in ask(path, []).broken
    path.chmod(0o755)
    assert why in ask(path, []).broken


# --- GPUs -----------------------------------------------------------------------------------------


def test_gpus_and_what_will_be_chosen_on_them(examined, nvidia_smi):
    nvidia_smi(EIGHT)
    te = {"packages": {"transformer-engine": "2.9.0"}, "te": True}
    code, lines = examined("cluster.processes_per_node=8", gpus=8, **te)
    assert code == 0, lines
    assert lines["GPUs"] == "ok    GPUs: 8 x NVIDIA H100 80GB HBM3, 79.6 GiB, least free 79.1 GiB"
    assert lines["driver"].startswith("ok    driver: 580.65.06")
    assert "Transformer Engine 2.9.0; chosen: its layers and its attention" in lines["kernels"]
    _, lines = examined("policy.transformer_engine=off", gpus=8, **te)
    assert "chosen: megatron-core local layers, torch's variable-length" in lines["kernels"]
    _, lines = examined("model.dtype=fp32", gpus=8)
    assert lines["kernels"].startswith("note")
    assert "attention by sequence length" in lines["kernels"]


def test_colocated_engines_that_the_trainers_gpus_do_not_hold(examined, stub, nvidia_smi):
    nvidia_smi(EIGHT)
    engine = stub("engine", packages={"sglang": "0.5.23"})
    named = (SGLANG, f"rollout.engine.python={engine}", "rollout.engine.colocated=true")
    wide = (*named, "rollout.engine.tensor_parallel=2")
    code, lines = examined(*wide, gpus=8)
    assert code == 1
    assert "1 trainer processes; needed: 2 for colocated engines" in lines["GPUs"]
    code, lines = examined(*wide, "cluster.processes_per_node=2", gpus=8)
    assert lines["GPUs"].startswith("ok"), lines


@pytest.mark.parametrize("where", ["reward", "evaluation.sets.code"])
def test_programs_that_a_model_wrote_can_be_confined_or_not(examined, monkeypatch, tmp_path, where):
    parts = "{parts: {tests: {function: code}}}"
    given = (
        f"reward={parts}" if where == "reward" else f"{where}={{paths: d.jsonl, reward: {parts}}}"
    )
    code, lines = examined(given)
    assert (code, lines["sandbox"].split(" (")[0]) == (0, "ok    sandbox: a program ran")
    assert "sandbox" not in examined("run.seed=1")[1]
    elsewhere = "reward.sandbox={kind: fusion, url: http://10.0.0.1:8080}"
    if where == "reward":
        assert "sandbox" not in examined(given, elsewhere)[1]
    monkeypatch.setenv("PATH", str(tmp_path))
    code, lines = examined(given)
    assert code == 1
    assert lines["sandbox"].startswith("FAIL  sandbox: reward.sandbox: no program can be confined")


def test_what_the_compiler_lacks_on_gpus(examined, nvidia_smi):
    nvidia_smi(EIGHT)
    lacking = "there is no C compiler (gcc, cc, clang), which triton needs"
    code, lines = examined("cluster.processes_per_node=8", gpus=8, uncompiled=lacking)
    assert code == 0, lines
    assert lines["compiled kernels"].startswith(f"note  compiled kernels: none: {lacking}; needed:")
    for settings, gpus in ((["run.deterministic=true"], 8), (["run.seed=1"], 0)):
        _, lines = examined(*settings, gpus=gpus, uncompiled=lacking)
        assert "compiled kernels" not in lines


@pytest.mark.parametrize(
    ("model", "name", "package"),
    [
        ("Qwen3-Next-80B-A3B", "gated delta rule", "flash-linear-attention"),
        ("Nemotron-3-Nano-30B-A3B", "Mamba-2", "mamba-ssm"),
    ],
)
def test_what_computes_states_on_gpus(examined, nvidia_smi, model, name, package):
    nvidia_smi(EIGHT)
    models = Path(__file__).parents[4] / "examples/models"
    hybrid = f"model.path={models}/{model}"
    has = {"packages": {package: "0.6.0"}}
    _, lines = examined(hybrid, gpus=8, **has)
    assert lines[name] == f"ok    {name}: {package} 0.6.0"
    for settings, told in (((), {}), (("run.deterministic=true",), has)):
        code, lines = examined(hybrid, *settings, gpus=8, **told)
        assert code == 0, lines
        assert lines[name].startswith(f"note  {name}: in chunks of 64")
    for model, gpus in ((f"model.path={models}/Qwen3-8B", 8), (hybrid, 0), ("run.seed=1", 8)):
        assert name not in examined(model, gpus=gpus)[1]


@pytest.mark.parametrize(
    ("printed", "told", "settings", "name", "says"),
    [
        (EIGHT, {"gpus": 8}, ["cluster.processes_per_node=9"], "GPUs", "needed: 9 for trainer"),
        (EIGHT, {"gpus": 8}, ["cluster.processes_per_node=8", SGLANG], "GPUs", "and 1 for engines"),
        (EIGHT, {"gpus": 0}, ["run.seed=1"], "GPUs", "torch sees none of them"),
        (EIGHT, {"gpus": 0, "cuda": ""}, ["run.seed=1"], "GPUs", "torch is built for the CPU"),
        ("H100, 8, 8, 525.60", {"gpus": 1}, ["run.seed=1"], "driver", "driver 580 or newer"),
    ],
)
def test_gpus_that_do_not_do(examined, nvidia_smi, stub, printed, told, settings, name, says):
    engine = stub("engine", packages={"sglang": "0.5.23"})
    nvidia_smi(printed)
    settings = [*settings, *([f"rollout.engine.python={engine}"] if SGLANG in settings else [])]
    code, lines = examined(*settings, **told)
    assert code == 1
    assert lines[name].startswith("FAIL")
    assert says in lines[name]


def test_gpus_that_somebody_else_uses(examined, nvidia_smi):
    nvidia_smi("H100, 81559, 81000, 580.65\nH100, 81559, 100, 580.65")
    code, lines = examined("run.seed=1", gpus=2)
    assert code == 0
    assert lines["GPUs"].startswith("note")
    assert "GPUs 1 are in use" in lines["GPUs"]


def test_a_driver_in_trouble(examined, nvidia_smi):
    nvidia_smi("Failed to initialize NVML: Driver/library version mismatch", 18)
    code, lines = examined("run.seed=1")
    assert code == 1
    assert "nvidia-smi ended with 18: Failed to initialize NVML" in lines["GPUs"]


# --- the machine ----------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("free", "settings", "code", "level"),
    [
        (1 << 20, ["run.seed=1"], 1, "FAIL"),
        (GIB // 8, ["cluster.processes_per_node=2"], 0, "note"),
        (GIB // 8, ["run.seed=1"], 0, "ok  "),
    ],
)
def test_a_full_dev_shm(examined, monkeypatch, free, settings, code, level):
    real = shutil.disk_usage

    def usage(path):
        return Usage(GIB, GIB - free, free) if path == machine.SHM else real(path)

    monkeypatch.setattr(machine.shutil, "disk_usage", usage)
    got, lines = examined(*settings)
    assert (got, lines["/dev/shm"][:4]) == (code, level)
    assert ("--shm-size" in lines["/dev/shm"]) is (level != "ok  ")


def test_a_low_limit_of_open_files(examined, monkeypatch, stub):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    engine = stub("engine", packages={"sglang": "0.5.23"})
    given = (SGLANG, f"rollout.engine.python={engine}", "rollout.engine.count=3")
    code, lines = examined(*given)
    assert code == 1
    needed = FILES + 3 * 256
    assert f"run `ulimit -n {needed}` first" in lines["open files"]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert "have the hard limit of 1024 raised" in examined(*given)[1]["open files"]
    assert examined("run.seed=1")[0] == 0


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/1").exists(), reason="needs /proc")
def test_a_run_folder_that_cannot_be_written(examined):
    code, lines = examined("run.dir=/proc/1/runs")
    assert code == 1
    assert "to do: set run.dir to a folder that can be written" in lines["run folder"]


@pytest.mark.parametrize(
    ("dtype", "stored", "settings", "needed"),
    [
        ("bf16", "bfloat16", [], "224.0 GiB for two checkpoints of about 112.0 GiB"),
        ("fp32", "bfloat16", [], "192.0 GiB for two checkpoints of about 96.0 GiB"),
        ("fp32", "float32", [], "192.0 GiB for two checkpoints of about 96.0 GiB"),
        ("fp32", "float32", ["policy.lora.rank=8"], ""),
        (
            "bf16",
            "bfloat16",
            ["algorithm.estimator.name=ppo"],
            "448.0 GiB for two checkpoints of about 224.0 GiB",
        ),
    ],
)
def test_a_disk_too_small_for_checkpoints(
    examined, monkeypatch, tmp_path, dtype, stored, settings, needed
):
    """The stored dtype does not matter: a checkpoint has that of the run."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"dtype": stored}))
    with open(model / "model.safetensors", "wb") as file:
        file.truncate(8 * GIB * {"bfloat16": 2, "float32": 4}[stored])
    real = shutil.disk_usage

    def usage(path):
        return real(path) if path == machine.SHM else Usage(400 * GIB, 300 * GIB, 100 * GIB)

    monkeypatch.setattr(machine.shutil, "disk_usage", usage)
    code, lines = examined(f"model.path={model}", f"model.dtype={dtype}", *settings)
    assert code == 0
    assert lines["disk"].partition("; needed: ")[2].partition(";")[0] == needed


# --- network, clusters, keys ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "fits"),
    [("eth", True), ("=eth", False), ("=eth0", True), ("^lo", True), ("ib", False)],
)
def test_the_interface_that_nccl_is_told_must_be_there(examined, monkeypatch, value, fits):
    there = {"lo": "127.0.0.1", "eth0": "192.0.2.2"}
    monkeypatch.setattr(machine, "addresses", lambda: there)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    code, lines = examined("run.seed=1")
    assert code == (0 if fits else 1)
    assert f"NCCL_SOCKET_IFNAME={value}" in lines["interfaces"]


def test_other_nodes_must_reach_this_one(examined, monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert examined("run.seed=1")[0] == 0
    code, lines = examined("cluster.nodes=2", "cluster.launcher=torchrun")
    assert code == 1
    said = lines["peers connect to"]
    assert "set GLOO_SOCKET_IFNAME" in said
    assert said.index("is 127.0.1.1") < said.index("an address that other nodes reach")


def test_slurm_gave_too_few_nodes(examined, monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "192.0.2.2")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    code, lines = examined("cluster.nodes=4", "cluster.launcher=torchrun")
    assert code == 1
    assert lines["Slurm"].startswith("FAIL  Slurm: job 7 on 2 nodes")


def test_keys_are_named_and_never_shown(examined, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # without a netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    code, lines = examined("tracking.wandb.enabled=true")
    assert code == 1
    assert "set: HF_TOKEN" in lines["keys"]
    assert "needed: WANDB_API_KEY" in lines["keys"]
    assert "secret" not in "".join(lines.values())
    monkeypatch.setenv("WANDB_API_KEY", "wb-secret")
    code, lines = examined("tracking.wandb.enabled=true")
    assert (code, lines["keys"]) == (0, "ok    keys: set: WANDB_API_KEY, HF_TOKEN")
