"""Both environments: the trainer's, in which this command runs, and that of the SGLang engines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

from backends.megatron import kernel_probe
from rlcore.interpreters.ask import Interpreter, ask, cuda_toolkit
from rlcore.launch.doctor.finding import Finding, Level
from rlcore.launch.doctor.needs import Needs

INSTALL = "./scripts/install.sh"
INSTALL_ENGINES = "./scripts/install_sglang.sh"


def requirements(extras: Sequence[str]) -> dict[str, str]:
    """Which versions rlcore asks for, by package: "" for any. Empty where it is not installed."""
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
    """What is missing or of another version, as "torch 2.9 (needs >=2.10)"."""
    from packaging.specifiers import SpecifierSet

    return [
        f"{name} {there.get(name, 'is missing')} (needs {spec or 'any'})"
        for name, spec in wanted.items()
        if name not in there or not SpecifierSet(spec).contains(there[name], prereleases=True)
    ]


def trainer(needs: Needs) -> tuple[Interpreter, list[Finding]]:
    """The interpreter that runs this command, which trains."""
    wanted = requirements(needs.extras)
    python = ask(sys.executable, [*wanted, "transformer-engine"], module=kernel_probe.__name__)
    name = "trainer environment"
    found = f"{sys.executable}: Python {python.python}, torch {python.torch or 'missing'}"
    needed = "every package of pyproject.toml, in its version"
    extras = " ".join(needs.extras)
    advice = f"run {INSTALL} {extras}".strip()
    if python.broken:
        return python, [Finding("FAIL", name, f"{found}, {python.broken}", needed, advice)]
    if not wanted:
        advice = f"{INSTALL} tells pip what it is"
        return python, [Finding("note", name, f"{found}; rlcore is not installed", "", advice)]
    if missing := unmet(wanted, python.packages):
        return python, [Finding("FAIL", name, f"{found}; {', '.join(missing)}", needed, advice)]
    return python, [Finding("ok", name, f"{found}, {len(wanted)} packages")]


def engines(needs: Needs) -> tuple[Interpreter | None, list[Finding]]:
    """The environment of SGLang engines that the run starts."""
    name = "engine environment"
    path = needs.engine_python
    if path is None:
        return None, [Finding("ok", name, "no SGLang engine is started here")]
    if not path.is_file():
        advice = f"run {INSTALL_ENGINES}, or set rollout.engine.python"
        return None, [Finding("FAIL", name, f"there is no {path}", "SGLang's own Python", advice)]
    wanted = {k: v for k, v in requirements(["sglang"]).items() if k == "sglang"}
    python = ask(path, ["sglang"])
    found = f"{path}: Python {python.python}, torch {python.torch or 'missing'}"
    needed = f"sglang{wanted.get('sglang', '')}"
    problem = python.broken or ", ".join(unmet(wanted or {"sglang": ""}, python.packages))
    if problem:
        advice = f"run {INSTALL_ENGINES}"
        return python, [Finding("FAIL", name, f"{found}; {problem}", needed, advice)]
    return python, [Finding("ok", name, f"{found}, sglang {python.packages['sglang']}")]


def toolkit(needs: Needs, ours: Interpreter, theirs: Interpreter | None) -> Iterator[Finding]:
    """The CUDA toolkit, with which SGLang compiles kernels."""
    if theirs is None or theirs.broken or not ours.gpus or needs.engine_device == "cpu":
        return
    name = "CUDA toolkit of engines"
    if (folder := cuda_toolkit({**os.environ, **needs.engine_environment})) is not None:
        yield Finding("ok", name, folder)
        return
    yield Finding(
        "note",
        name,
        "none: no CUDA_HOME, no nvcc on PATH, no /usr/local/cuda",
        "the compiler with which SGLang makes some of its kernels (without it no DeepGEMM)",
        "install the CUDA toolkit, or set CUDA_HOME",
    )


def nccl(needs: Needs, ours: Interpreter, theirs: Interpreter | None) -> Iterator[Finding]:
    """The same version on both sides, where weights go from one to the other over NCCL."""
    if ours.broken:
        return
    if theirs is None or theirs.broken:
        yield Finding("ok", "NCCL", f"trainer {_version(ours)}")
        return
    found = f"trainer {_version(ours)}, engines {_version(theirs)}"
    if ours.gpus and not theirs.nccl:
        needed = "a torch with CUDA for the engines, too"
        level: Level = "FAIL" if needs.nccl else "note"
        yield Finding(level, "NCCL", found, needed, f"run {INSTALL_ENGINES} --gpu")
        return
    if ours.nccl == theirs.nccl or not (ours.nccl and theirs.nccl):
        yield Finding("ok", "NCCL", found)
        return
    package = f"nvidia-nccl-cu{ours.cuda.partition('.')[0] or '13'}"
    yield Finding(
        "FAIL" if needs.nccl else "note",
        "NCCL",
        found,
        "the same version on both sides, for weights go to engines over NCCL",
        f"{sys.executable} -m pip install --no-deps {package}=={theirs.nccl}, or set"
        " rollout.engine.transport to disk",
    )


def _version(python: Interpreter) -> str:
    return python.nccl or "none (torch for the CPU)"


def kernels(needs: Needs, ours: Interpreter, *, gpus: bool) -> Iterator[Finding]:
    """Transformer Engine and the attention of the trainer on GPUs, and which will be chosen."""
    if ours.broken:
        return
    te = ours.packages.get("transformer-engine")
    if ours.kernels_broken:
        advice = f"run {INSTALL}, or remove the package that cannot be imported"
        level: Level = "FAIL" if gpus else "note"
        yield Finding(level, "kernels", ours.kernels_broken, "an importable backend", advice)
        return
    installed = f"Transformer Engine {te}" if te else "no Transformer Engine"
    if not gpus:
        chosen = "on the CPU: megatron-core local layers, attention by torch"
        yield Finding("ok", "kernels", f"{installed}; chosen {chosen}")
    elif ours.te and needs.transformer_engine and not needs.deterministic:
        yield Finding("ok", "kernels", f"{installed}; chosen: its layers and its attention")
    elif ours.varlen and needs.bf16:
        level = "ok" if te or not needs.transformer_engine else "note"
        attention = "torch's variable-length flash attention"
        advice = "" if level == "ok" else "Transformer Engine (extra te) is faster: " + INSTALL
        found = f"{installed}; chosen: megatron-core local layers, {attention}"
        yield Finding(level, "kernels", found, "", advice)
    else:
        found = f"{installed}; chosen: megatron-core local layers, attention by sequence length"
        advice = "slow: train in bf16, with a torch that has torch.nn.attention.varlen"
        yield Finding("note", "kernels", found, "", advice)
    if gpus and ours.uncompiled and not needs.deterministic:
        yield Finding(
            "note",
            "compiled kernels",
            f"none: {ours.uncompiled}",
            "triton and a C compiler, with which the LM head takes a third of the time",
            "install what is missing, such as gcc",
        )
