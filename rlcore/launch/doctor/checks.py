"""The checks of environments and GPUs, and the list of all checks."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

from backends.megatron import kernel_probe
from backends.megatron.convert.read import read_architecture
from rlcore.config import Config
from rlcore.config.derived import in_weight_group
from rlcore.config.sections.sandbox import SandboxConfig
from rlcore.deadlines import NVIDIA_SMI_S
from rlcore.errors import ConfigError, ModelError
from rlcore.interpreters.ask import Interpreter, ask, cuda_toolkit
from rlcore.launch.doctor.machine import Check, Level, Run, cheap_checks, gib
from rollout.sandbox.local import build_sandbox

INSTALL = "./scripts/install.sh"
INSTALL_ENGINES = "./scripts/install_sglang.sh"
GPU_FIELDS = "name,memory.total,memory.free,driver_version"
# Packages with kernels for recurrent layers.
OF_STATES = ("flash-linear-attention", "mamba-ssm")
MIN_DRIVER = {"12": 525, "13": 580}  # major version of CUDA -> of the driver
MOSTLY_FREE = 0.9  # of a GPU's memory; with less, another process uses the GPU


def check_machine(config: Config | None) -> Iterator[Check]:
    """Make every check, and yield each result at once.

    Args:
        config: the run to check for; None: report what the machine has.
    """
    run = Run(config)
    ours, found = _trainer_environment(run)
    yield found
    theirs, found = _engine_environment(run)
    yield found
    yield from _gpus(run, ours)
    if not ours.broken:
        yield _nccl(run, ours, theirs)
        if theirs is not None and not theirs.broken and ours.gpus and run.engine.device != "cpu":
            yield _toolkit(run)
        yield _kernels(run, ours)
        if ours.gpus and not ours.kernels_broken:
            yield from _states(run, ours)
        if ours.gpus and ours.uncompiled and not run.config.run.deterministic:
            needed = "triton and a C compiler, with which the LM head takes a third of the time"
            advice = "install the missing part, such as gcc"
            yield Check("note", "compiled kernels", f"none: {ours.uncompiled}", needed, advice)
    if (sandbox := _confinement(run.config)) is not None:
        yield _sandbox(sandbox)
    yield from cheap_checks(run)


# --- environments ---------------------------------------------------------------------------------


def requirements(extras: Sequence[str]) -> dict[str, str]:
    """Return the versions that rlcore requires, by package: "" for any. Empty if not installed."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("rlcore") or []
    except metadata.PackageNotFoundError:
        return {}
    found = [Requirement(line) for line in lines]
    return {
        one.name: str(one.specifier)
        for one in found
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
    }


def unmet(wanted: dict[str, str], there: dict[str, str]) -> list[str]:
    """Return the packages that are missing or of a wrong version, as "torch 2.9 (needs >=2.10)"."""
    from packaging.specifiers import SpecifierSet

    return [
        f"{name} {there.get(name, 'is missing')} (needs {spec or 'any'})"
        for name, spec in wanted.items()
        if name not in there or not SpecifierSet(spec).contains(there[name], prereleases=True)
    ]


def _trainer_environment(run: Run) -> tuple[Interpreter, Check]:
    """Check the interpreter that runs this command, and trains."""
    extras = ["ray"] * (run.cluster.launcher == "ray")
    extras += ["wandb"] * run.config.tracking.wandb.enabled
    wanted = requirements(extras)
    python = ask(
        sys.executable, [*wanted, "transformer-engine", *OF_STATES], module=kernel_probe.__name__
    )
    name = "trainer environment"
    found = f"{sys.executable}: Python {python.python}, torch {python.torch or 'missing'}"
    if problem := python.broken or ", ".join(unmet(wanted, python.packages)):
        needed = "every package of pyproject.toml, in its version"
        advice = f"run {INSTALL} {' '.join(extras)}".strip()
        separator = ", " if python.broken else "; "
        return python, Check("FAIL", name, f"{found}{separator}{problem}", needed, advice)
    if not wanted:
        advice = f"run {INSTALL}, which installs it"
        return python, Check("note", name, f"{found}; rlcore is not installed", "", advice)
    return python, Check("ok", name, f"{found}, {len(wanted)} packages")


def _engine_environment(run: Run) -> tuple[Interpreter | None, Check]:
    """Check the environment of the SGLang engines that the run starts."""
    name = "engine environment"
    path = run.engine_python
    if path is None:
        return None, Check("ok", name, "no SGLang engine is started here")
    if not path.is_file():
        advice = f"run {INSTALL_ENGINES}, or set rollout.engine.python"
        return None, Check("FAIL", name, f"there is no {path}", "SGLang's own Python", advice)
    wanted = requirements(["sglang"]).get("sglang", "")
    python = ask(path, ["sglang"])
    found = f"{path}: Python {python.python}, torch {python.torch or 'missing'}"
    if problem := python.broken or ", ".join(unmet({"sglang": wanted}, python.packages)):
        advice = f"run {INSTALL_ENGINES}"
        return python, Check("FAIL", name, f"{found}; {problem}", f"sglang{wanted}", advice)
    return python, Check("ok", name, f"{found}, sglang {python.packages['sglang']}")


def _nccl(run: Run, ours: Interpreter, theirs: Interpreter | None) -> Check:
    """Compare NCCL's versions if the trainer sends weights to engines over NCCL."""
    none = "none (torch for the CPU)"
    found = f"trainer {ours.nccl or none}"
    if theirs is None or theirs.broken:
        return Check("ok", "NCCL", found)
    found += f", engines {theirs.nccl or none}"
    sends = run.has_sglang and in_weight_group(run.engine) and run.engine.device != "cpu"
    level: Level = "FAIL" if sends and not run.engine.is_external else "note"
    if ours.gpus and not theirs.nccl:
        advice = f"run {INSTALL_ENGINES} --gpu"
        return Check(level, "NCCL", found, "a torch with CUDA for the engines, too", advice)
    if ours.nccl == theirs.nccl or not (ours.nccl and theirs.nccl):
        return Check("ok", "NCCL", found)
    needed = "the same version on both sides, for weights go to engines over NCCL"
    package = f"nvidia-nccl-cu{ours.cuda.partition('.')[0] or '13'}=={theirs.nccl}"
    pip = f"{sys.executable} -m pip install --no-deps {package}"
    return Check(level, "NCCL", found, needed, f"{pip}, or set rollout.engine.transport to disk")


def _toolkit(run: Run) -> Check:
    """Check for the CUDA toolkit, with which SGLang compiles kernels."""
    name = "CUDA toolkit of engines"
    if (folder := cuda_toolkit({**os.environ, **run.engine.environment})) is not None:
        return Check("ok", name, folder)
    found = "none: no CUDA_HOME, no nvcc on PATH, no /usr/local/cuda"
    needed = "the compiler with which SGLang makes some of its kernels (without it no DeepGEMM)"
    return Check("note", name, found, needed, "install the CUDA toolkit, or set CUDA_HOME")


def _kernels(run: Run, ours: Interpreter) -> Check:
    """Report the layers and the attention kernels that the trainer chooses."""
    te = ours.packages.get("transformer-engine")
    takes_te = run.config.policy.transformer_engine == "auto"
    installed = f"Transformer Engine {te}" if te else "no Transformer Engine"
    layers = f"{installed}; chosen: megatron-core local layers"
    if ours.kernels_broken:
        advice = f"run {INSTALL}, or remove the package that cannot be imported"
        level: Level = "FAIL" if ours.gpus else "note"
        return Check(level, "kernels", ours.kernels_broken, "an importable backend", advice)
    if not ours.gpus:
        chosen = "on the CPU: megatron-core local layers, attention by torch"
        return Check("ok", "kernels", f"{installed}; chosen {chosen}")
    if ours.te and takes_te and not run.config.run.deterministic:
        return Check("ok", "kernels", f"{installed}; chosen: its layers and its attention")
    if run.config.model.dtype != "bf16":
        found = f"{layers}, attention by sequence length"
        return Check("note", "kernels", found, "", "slow: train in bf16")
    found = f"{layers}, torch's variable-length flash attention"
    if te or not takes_te:
        return Check("ok", "kernels", found)
    return Check(
        "note", "kernels", found, "", f"Transformer Engine (extra te) is faster: {INSTALL}"
    )


def _states(run: Run, ours: Interpreter) -> Iterator[Check]:
    """Report what computes the states of the run's model, if it has recurrent layers."""
    try:
        arch = read_architecture(run.config.model.path, weights=False)
    except ModelError:
        # `rlcore validate` reports the folder.
        return
    if (kind := arch.table.recurrence) is None:
        return
    name = kind.name
    package = kind.package
    if run.config.model.dtype == "bf16" and not run.config.run.deterministic:
        if version := ours.packages.get(package):
            yield Check("ok", name, f"{package} {version}")
            return
        advice = f"install {package} next to rlcore: pip install {package}"
    else:
        advice = f"train in bf16 without run.deterministic, which {package} needs"
    yield Check("note", name, "in chunks of 64 by torch, which is slower", package, advice)


# --- GPUs and sandbox -----------------------------------------------------------------------------


@dataclass(frozen=True)
class GPU:
    """One GPU of this machine; memory in bytes."""

    name: str
    memory: int
    free: int
    driver: str


def list_gpus() -> list[GPU]:
    """Return the GPUs that `nvidia-smi` lists. Raises RuntimeError if it fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"nvidia-smi: {error}") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[:1] or ["it said nothing"]
        raise RuntimeError(f"nvidia-smi ended with {done.returncode}: {said[0]}")
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [GPU(row[0], _bytes(row[1]), _bytes(row[2]), row[3]) for row in rows if len(row) == 4]


def _bytes(mebibytes: str) -> int:
    # Unified memory shows as "[N/A]".
    return int(mebibytes) << 20 if mebibytes.isdecimal() else 0


def _gpus(run: Run, trainer: Interpreter) -> Iterator[Check]:
    """Check the driver, the number of GPUs, and whether torch sees them."""
    try:
        found = list_gpus()
    except RuntimeError as error:
        advice = "repair the driver; a run would be on the CPU"
        yield Check("FAIL", "GPUs", str(error), "a working driver, or none", advice)
        return
    if not found:
        seen = f"torch sees {trainer.gpus}; nvidia-smi is missing"
        yield Check("ok", "GPUs", seen if trainer.gpus else "none; a run is on the CPU")
        return
    yield _driver(found[0], trainer)
    kinds = ", ".join(sorted({gpu.name for gpu in found}))
    named = f"{len(found)} x {kinds}, {gib(found[0].memory)}"
    yield _number_of_gpus(run, trainer, found, named)


def _driver(gpu: GPU, trainer: Interpreter) -> Check:
    major = trainer.cuda.partition(".")[0]
    least = MIN_DRIVER.get(major, 0)
    number = gpu.driver.partition(".")[0]
    found = f"{gpu.driver}; torch is built for CUDA {trainer.cuda or 'none'}"
    if number.isdecimal() and int(number) < least:
        advice = f"a newer driver, or a torch for CUDA {int(major) - 1}"
        return Check("FAIL", "driver", found, f"driver {least} or newer for CUDA {major}", advice)
    return Check("ok", "driver", found)


def _number_of_gpus(run: Run, trainer: Interpreter, found: Sequence[GPU], named: str) -> Check:
    name = "GPUs"
    if not trainer.broken and not trainer.gpus:
        why = "is built for the CPU" if not trainer.cuda else "sees none of them"
        advice = "install a torch for this driver's CUDA; look at CUDA_VISIBLE_DEVICES"
        # The user has hidden the GPUs; the run is on the CPU.
        level: Level = "note" if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else "FAIL"
        return Check(level, name, f"{named}; torch {why}", "a torch that uses them", advice)
    ranks = run.cluster.processes_per_node
    is_apart = not run.engine.colocated and run.cluster.launcher != "ray"
    engines = run.engine_gpus if is_apart else 0
    visible = trainer.gpus or len(found)
    if run.is_configured and visible < ranks + engines:
        needed = f"{ranks} for trainer processes and {engines} for engines"
        advice = "fewer processes_per_node or engines, smaller ones, or rollout.engine.colocated"
        return Check("FAIL", name, f"{named}; {visible} are visible", needed, advice)
    trainers = ranks * run.cluster.nodes
    if run.is_configured and run.engine.colocated and run.engine_gpus > trainers:
        needed = f"{run.engine_gpus} for colocated engines (count x tensor_parallel)"
        advice = "fewer or smaller engines: each GPU of one has a trainer process"
        return Check("FAIL", name, f"{named}; {trainers} trainer processes", needed, advice)
    taken = [str(k) for k, gpu in enumerate(found) if gpu.free < MOSTLY_FREE * gpu.memory]
    advice = f"GPUs {', '.join(taken)} are in use: see nvidia-smi" if taken else ""
    free = f"{named}, least free {gib(min(gpu.free for gpu in found))}"
    return Check("note" if taken else "ok", name, free, "", advice)


def _sandbox(config: SandboxConfig) -> Check:
    """Run a test program, as a run with the grader `code` does at its start."""

    async def run_program() -> None:
        built = build_sandbox(config)
        try:
            await built.start()
        finally:
            await built.close()

    try:
        asyncio.run(run_program())
    except ConfigError as error:
        advice = "see docs/sandbox.md, or reward.sandbox.kind: fusion"
        return Check("FAIL", "sandbox", str(error), "a confinement that works", advice)
    return Check("ok", "sandbox", f"a program ran ({config.kind})")


def _confinement(config: Config) -> SandboxConfig | None:
    """Return the sandbox for a model's programs; None if none run, or not on this machine."""
    for reward in (config.reward, *(one.reward for one in config.evaluation.sets.values())):
        functions = () if reward is None else (part.function for part in reward.parts.values())
        if reward is not None and "code" in functions and reward.sandbox.kind != "fusion":
            return reward.sandbox
    return None
